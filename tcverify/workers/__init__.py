"""Campaigns that several processes share: ranges of seeds, handed out to workers on this machine or on many."""

from tcverify.workers.driver import RANGE, DividedCampaign
from tcverify.workers.pool import LocalCrew
from tcverify.workers.slices import Crew, DrawPlan, Slice, SliceOutcome
from tcverify.workers.worker import Worker

__all__ = ["RANGE", "Crew", "DividedCampaign", "DrawPlan", "LocalCrew", "Slice", "SliceOutcome", "Worker"]
