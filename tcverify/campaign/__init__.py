"""Runs many programs through the verifier, shrinks what fails and tells subscribers about it."""

from tcverify.campaign.campaign import DEEP_EVERY, Campaign
from tcverify.campaign.corpus import Case, Corpus
from tcverify.campaign.coverage import Coverage, FileReach
from tcverify.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    Crashed,
    Event,
    FindingFound,
    Progress,
    RunFinished,
    RunStarted,
    Statistics,
    Subscriber,
)
from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.campaign.in_flight import recover
from tcverify.campaign.plan import Blamer, Plan

__all__ = [
    "DEEP_EVERY",
    "SETTINGS",
    "Blamer",
    "Campaign",
    "CampaignFinished",
    "CampaignStarted",
    "Case",
    "Corpus",
    "Coverage",
    "Crashed",
    "Event",
    "FileReach",
    "FindingFound",
    "Plan",
    "Progress",
    "RunFinished",
    "RunStarted",
    "Statistics",
    "Subscriber",
    "recover",
]
