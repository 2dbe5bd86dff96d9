"""Campaigns that several processes share: ranges of seeds, handed out to workers on this machine or on many."""

from tcverify.division.driver import RANGE, DividedCampaign
from tcverify.division.slices import Crew, Drawing, Outcome, Slice
from tcverify.division.workers import LocalCrew
from tcverify.division.working import Worker

__all__ = ["RANGE", "Crew", "DividedCampaign", "Drawing", "LocalCrew", "Outcome", "Slice", "Worker"]
