"""Runs many programs through the verifier, shrinks what fails and tells subscribers about it."""

from tcverify.campaign.campaign import Campaign
from tcverify.campaign.corpus import Corpus, CorpusCase
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
from tcverify.campaign.in_flight import recover_in_flight
from tcverify.campaign.plan import Blamer, CampaignPlan
from tcverify.campaign.program_verifier import DEEP_EVERY
from tcverify.campaign.record import CampaignRecord

__all__ = [
    "DEEP_EVERY",
    "SETTINGS",
    "Blamer",
    "Campaign",
    "CampaignFinished",
    "CampaignPlan",
    "CampaignRecord",
    "CampaignStarted",
    "Corpus",
    "CorpusCase",
    "Coverage",
    "Crashed",
    "Event",
    "FileReach",
    "FindingFound",
    "Progress",
    "RunFinished",
    "RunStarted",
    "Statistics",
    "Subscriber",
    "recover_in_flight",
]
