"""Makes programs of the user's own graphs: captured from a model, exported, or returned by a function."""

from tcverify.capturing.assemble import RankRule, for_all_ranks, program_of
from tcverify.capturing.model import capture
from tcverify.capturing.normalize import InputFacts, plain
from tcverify.capturing.record import Captured, CapturedInput, GroupFacts
from tcverify.capturing.sources import LoadedProgram, UserFacts, load

__all__ = [
    "Captured",
    "CapturedInput",
    "GroupFacts",
    "InputFacts",
    "LoadedProgram",
    "RankRule",
    "UserFacts",
    "capture",
    "for_all_ranks",
    "load",
    "plain",
    "program_of",
]
