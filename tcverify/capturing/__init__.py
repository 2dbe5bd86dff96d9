"""Makes programs of the user's own graphs: captured from a model, exported, or returned by a function."""

from tcverify.capturing.assemble import RankRule, for_all_ranks, program_of
from tcverify.capturing.model import capture
from tcverify.capturing.normalize import InputFacts, plain
from tcverify.capturing.record import Captured, CapturedInput, GroupFacts
from tcverify.capturing.sources import Loaded, Told, load

__all__ = [
    "Captured",
    "CapturedInput",
    "GroupFacts",
    "InputFacts",
    "Loaded",
    "RankRule",
    "Told",
    "capture",
    "for_all_ranks",
    "load",
    "plain",
    "program_of",
]
