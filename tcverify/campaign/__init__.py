"""Runs many programs through the verifier, shrinks what fails and tells subscribers about it."""

from tcverify.campaign.driver import Campaign, Plan
from tcverify.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    Event,
    FindingFound,
    Progress,
    Statistics,
    Subscriber,
)

__all__ = [
    "Campaign",
    "CampaignFinished",
    "CampaignStarted",
    "Event",
    "FindingFound",
    "Plan",
    "Progress",
    "Statistics",
    "Subscriber",
]
