"""Every planted defect of resharding is refuted on a program made for it, on which the sound passes pass.

`pytest -m slow tests/mutants` looks for all of them in drawn programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.passes.resharding.host_program import HostProgram
from tcverify.program import PlacedBuilder, Program
from tcverify.verification.verifier import verify
from tests.mutants import resharding, resharding_memory, resharding_streams
from tests.mutants.resharding_streams import PointToPoint, Ring
from tests.support.pipelined_programs import gathered, scattered

_MODULES = (resharding, resharding_streams, resharding_memory)
MUTANTS = {name: mutant for module in _MODULES for name, mutant in module.MUTANTS.items()}
EXPECTED = {name: kinds for module in _MODULES for name, kinds in module.EXPECTED.items()}

Made = Callable[[], Program]


def brought(source: str, target: str, shape: Sequence[int] = (12, 2), world: int = 4) -> Made:
    """One set of an input; what it gives is used once."""

    def made() -> Program:
        b = PlacedBuilder(world)
        return b.build(b.call("aten::neg", b.set(b.input("x", shape, source), target)))

    return made


def reduced(op: str, source: str, target: str, shape: Sequence[int] = (2, 4, 3)) -> Made:
    """One reduction of an input over dim 0."""

    def made() -> Program:
        b = PlacedBuilder(4)
        return b.build(b.call("aten::neg", b.reduce(b.input("x", shape, source), 0, target, op)))

    return made


def looped(op: str, axis: int, trips: int = 4) -> Made:
    """A loop over a dim of an intermediate of shape [trips, trips], on two ranks that do the same."""

    def made() -> Program:
        b = PlacedBuilder(2)
        given = [b.input(name, (trips, trips), "[0, 1] replicated") for name in ("x", "y")]
        x, y = (b.call("aten::neg", one) for one in given)
        return b.build(b.call("aten::neg", b.call(op, *([x, y] if op.endswith(".Tensor") else [x]), stream_axis=axis)))

    return made


def read_through_a_view() -> Program:
    b = PlacedBuilder(2)
    x = b.call("aten::relu", b.input("x", (4, 2), "[0, 1] replicated"))
    return b.build(b.call("aten::neg", b.call("aten::view", x, [2, 4])))


def unread() -> Program:
    """What both ranks gather, rank 0 alone uses."""
    b = PlacedBuilder(2)
    y = b.set(b.input("x", (4, 2), "[0, 1] shard(0)"), "[0, 1] replicated")
    return b.build(b.call("aten::neg", b.set(y, "[0] replicated")))


def given_away() -> Program:
    """What is gathered is an intermediate, which is used for nothing else."""
    b = PlacedBuilder(2)
    x = b.call("aten::relu", b.input("x", (4, 2), "[0, 1] shard(0)"))
    return b.build(b.call("aten::neg", b.set(x, "[0, 1] replicated")))


def pipeline(chunks: int = 4, mesh: Sequence[int] = (0, 1)) -> Made:
    """A is computed before, so that workers must wait for that."""
    return lambda: gathered(len(mesh), mesh, chunks, before=lambda b, a: b.call("aten::relu", a))


PROGRAMS: dict[str, Made] = {
    "ScatteredAxisOfTheResult": reduced("sum", "[0, 1] shard(0)", "[0, 1] shard(0)"),
    "RankNumberPicksChunk": brought("[1, 0] replicated", "[1, 0] shard(0)"),
    "TeamSorted": brought("[1, 0, 2] shard(0)", "[1, 0, 2] replicated"),
    "TeamAlongTheOtherMeshDim": brought("[[0, 1], [2, 3]] shard(0), replicated", "[[0, 1], [2, 3]] replicated, replicated"),
    "PairsByRankNumber": brought("[1, 0] shard(0)", "[1, 2] shard(0)"),
    "PairsReversed": brought("[0, 1] shard(0)", "[2, 3] shard(0)"),
    "RootOutsideItsTeam": brought("[0, 1] shard(0)", "[2] replicated"),
    "RootIsRankZero": brought("[1] replicated", "[0, 2] shard(0)"),
    "JoinedRootIsAShard": brought("[0, 1] shard(0)", "[2] replicated"),
    "BroadcastFromAReceiver": brought("[0] replicated", "[1, 2] replicated"),
    "NoGatherForTheLastReceiver": brought("[0, 1] shard(0)", "[2, 3] replicated"),
    "ReducesToTheFirstReceiver": reduced("sum", "[0, 1] shard(0)", "[2, 3] replicated"),
    "EveryGatherAllocates": brought("[0, 1] shard(0)", "[0, 1, 2] replicated"),
    "SelfPairSent": brought("[0, 1] shard(0)", "[0, 2] shard(0)"),
    "SelfPairDropped": brought("[0, 1] shard(0)", "[0, 2] shard(0)"),
    "AllToAllNotUnpacked": brought("[0, 1] shard(1)", "[0, 1] shard(0)"),
    "SmallestPositiveIsTheIdentity": reduced("max", "[0, 1] shard(0)", "[2] replicated"),
    "ZeroIsTheIdentity": reduced("product", "[0, 1] shard(0)", "[2] replicated"),
    "AverageCountsTheRoot": reduced("avg", "[0, 1] shard(0)", "[2] replicated"),
    "LocalOnesLeft": brought("[0, 1] replicated", "[0, 1] shard(0)"),
    "LastWaitForgotten": pipeline(),
    "WaitsForTheOneBefore": pipeline(),
    "WaitsOnTheCallersStream": pipeline(),
    "NoInitialSync": pipeline(),
    "LastWorkerNotJoined": pipeline(),
    "CallersStreamNotRestored": pipeline(),
    "OneStreamTooMany": pipeline(),
    "OthersPeer": pipeline(2, (0, 1, 2)),
    "OwnChunkNotCopied": pipeline(2),
    "RingOffByOne": pipeline(2),
    "ChunksInReverse": lambda: scattered(2, (0, 1), 2),
    "PartsOfTheNextRank": lambda: scattered(2, (0, 1), 2),
    "AddendsOverwritten": lambda: scattered(2, (0, 1), 2),
    "ReadsAtTheNextIndex": looped("aten::relu", 0),
    "LastTripLeftOut": looped("aten::relu", 0),
    "WritesAlongTheFirstAxis": looped("aten::relu", 1),
    "SeveralOperandsPassedOver": looped("aten::add.Tensor", 0),
    "FreedAtThePost": given_away,
    "FreedBeforeTheJoin": looped("aten::relu", 0),
    "ViewsDoNotCount": read_through_a_view,
    "OutputsFreed": given_away,
    "InputsFreed": given_away,
    "FreedTwice": read_through_a_view,
    "UnreadNotFreed": unread,
    "TripsNotFreed": looped("aten::relu", 0),
    "OutputsOfCommunicationsKept": given_away,
}  # fmt: skip


def test_every_mutant_has_a_program() -> None:
    assert PROGRAMS.keys() == MUTANTS.keys() == EXPECTED.keys()
    assert len(PROGRAMS) >= 40


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mutant_is_refuted_where_the_sound_passes_pass(name: str) -> None:
    program, mutant = PROGRAMS[name](), MUTANTS[name]
    sound = next((kind for kind in (PointToPoint, Ring) if issubclass(mutant, kind)), HostProgram)
    passed = verify(InProcess(prepare_pass(sound, "", {})), program)
    assert (passed.status, [f.title for f in passed.findings]) == ("passed", [])
    kinds = {finding.kind for finding in verify(InProcess(prepare_pass(mutant, "", {})), program).findings}
    assert kinds & EXPECTED[name], kinds
