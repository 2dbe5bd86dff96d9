"""Every planted defect is found; what is sound is not refuted.

By default a few mutants run; `pytest -m slow tests/mutants` runs the whole matrix. `-s` shows in how many of 100 programs each
defect shows.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignFinished, CampaignPlan
from tcverify.passes import Identity, Multistream, Pass, SequenceParallel
from tcverify.passes.resharding.host_program import HostProgram
from tcverify.program import Program
from tcverify.strategies import (
    fsdp_programs,
    functional_programs,
    mixed_programs,
    moe_programs,
    overlap_programs,
    resharding_programs,
    sequence_functional_programs,
)
from tcverify.verification.verifier import verify
from tests.mutants.catalogue import EXPECTED, MUTANTS, Drawn, hunting_grounds, world_sizes
from tests.mutants.comm_buffer_forms import InPlace
from tests.mutants.overlap_memory import RaiseUnjudged, SinkUnjudged
from tests.mutants.resharding_streams import PointToPoint, Ring

SEED = 7

#: Mutants of the default tests, one for each way to be found, and where.
CHOSEN = {
    "FirstChunkForAll": 2,
    "RankNumberPicksShard": 4,
    "GatherSkippedOnFirstRank": 2,
    "AllReduceErasedOnFirstRank": 2,
    "StaleMetadata": 2,
    "ResidualNotSliced": 2,
    "RowsLeftByExpert": 2,
    "CapacityOfLocalTokens": 2,
    "AttentionSlicedByRankNumber": 4,
    "TokenSharedByCollectives": 2,
    "CollectivesUnordered": 4,
    "WaitNamesMainStream": 2,
    "RecordedWhereNeeded": 2,
    "OverheadForgotten": 4,
    "NoGuard": 2,
    "WriteDuringReadAllowed": 2,
    "EffectsAreCompute": 2,
    "ViewsOfErasedWaits": 2,
    "OperandsFreedAtStart": 2,
    "FreesAtTheStart": 2,
    "CopiedInReverse": 2,
    "DeclaredBehindItself": 2,
    "TeamSorted": 4,
    "NoGatherForTheLastReceiver": 4,
    "NoInitialSync": 4,
    "LastWorkerNotJoined": 4,
    "FreedAtThePost": 4,
    "UnreadNotFreed": 4,
    "AverageTakenForSum": 2,
    "WaitsWhereItIsReadLast": 2,
    "NumbersTrusted": 2,
    "GatherNotWaitedFor": 4,
}

#: Least share of programs that should show a defect.
LEAST = 0.03
#: Defects that show in fewer: they need pairs of ranks that cross, a grid with two dims of more than one rank, or one certain
#: oddity in a layer that moves; or attention in full behind a local residual (one program in twenty), for one of them with
#: a matrix that differs between ranks.
RARER = {
    "PairsByRankNumber": 0.02,
    "TeamAlongTheOtherMeshDim": 0.02,
    "MeanOverTokensTaken": 0.01,
    "StatisticStaysLocal": 0.01,
    "WeightPerRowTaken": 0.01,
    "NumbersTrusted": 0.01,
    "BrokenRowsTaken": 0.01,
    "AttentionSlicedByRankNumber": 0.01,
    "FirstChunkOfAttention": 0.01,
    "AddendsTakenForSums": 0.0,
}


def _campaign(
    pass_: type[Pass],
    world_size: int,
    directory: Path,
    *,
    programs: int,
    fail_fast: bool,
    drawn: Drawn = mixed_programs,
) -> CampaignFinished:
    plan = CampaignPlan(
        drawn(world_size=world_size),
        f"{world_size} ranks",
        directory / "reports",
        directory / "state",
        max_examples=programs,
        seed=SEED,
        shrink_time=0.0,
        fail_fast=fail_fast,
    )
    return Campaign(InProcess(prepare_pass(pass_, "", {})), plan, None).run()


def _is_refuted(name: str, world_size: int, directory: Path, drawn: Drawn = mixed_programs) -> bool:
    """Whether 300 programs show an expected kind of finding; when another kind comes first, the campaign looks on for it."""
    finished = _campaign(MUTANTS[name], world_size, directory, programs=300, fail_fast=True, drawn=drawn)
    if finished.verdict == "refuted" and not finished.statistics.findings.keys() & EXPECTED[name]:
        finished = _campaign(MUTANTS[name], world_size, directory / "on", programs=300, fail_fast=False, drawn=drawn)
    return not finished.statistics.findings.keys().isdisjoint(EXPECTED[name])


#: Of these, one of each system and each kind of finding, for every run: programs made by hand show the others there.
ALWAYS = {
    "FirstChunkForAll",
    "GatherSkippedOnFirstRank",
    "StaleMetadata",
    "TokenSharedByCollectives",
    "CollectivesUnordered",
    "OverheadForgotten",
    "WriteDuringReadAllowed",
    "EffectsAreCompute",
    "CopiedInReverse",
    "TeamSorted",
    "FreedAtThePost",
    "GatherNotWaitedFor",
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, size, id=name, marks=[] if name in ALWAYS else pytest.mark.slow)
        for name, size in CHOSEN.items()
    ],
)
def test_a_mutant_is_refuted(name: str, world_size: int, tmp_path: Path) -> None:
    assert _is_refuted(name, world_size, tmp_path, hunting_grounds(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_every_mutant_is_refuted(name: str, tmp_path: Path) -> None:
    """At 2 ranks or at 4: a residual in another order of the same ranks, for one, takes a mesh that only 2 ranks have."""
    hunts = [(programs, size) for programs in hunting_grounds(name) for size in world_sizes(name)]
    assert any(_is_refuted(name, size, tmp_path / f"{i}", programs) for i, (programs, size) in enumerate(hunts))


#: Sound passes, and what they are tried on.
SOUND: dict[str, tuple[type[Pass], Drawn]] = {
    "sequence_parallel": (SequenceParallel, mixed_programs),
    "experts": (SequenceParallel, moe_programs),
    "sequence_functional": (SequenceParallel, sequence_functional_programs),
    "identity": (Identity, mixed_programs),
    "multistream": (Multistream, overlap_programs),
    "raise-unjudged": (RaiseUnjudged, functional_programs),
    "sink-unjudged": (SinkUnjudged, functional_programs),
    "in-place": (InPlace, functional_programs),
}


def _require_sound(name: str, world_size: int, programs: int, directory: Path) -> None:
    pass_, drawn = SOUND[name]
    finished = _campaign(pass_, world_size, directory, programs=programs, fail_fast=True, drawn=drawn)
    assert finished.verdict == "passed", finished.counterexamples[0].finding.title
    assert finished.statistics.inconclusive == 0


@pytest.mark.parametrize(("name", "world_size"), [("sequence_parallel", 2), ("multistream", 4), ("sink-unjudged", 2)])
def test_what_is_sound_passes(name: str, world_size: int, tmp_path: Path) -> None:
    _require_sound(name, world_size, 40, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", SOUND)
def test_whatever_is_sound_passes(name: str, world_size: int, tmp_path: Path) -> None:
    _require_sound(name, world_size, 75, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pass_", [HostProgram, PointToPoint, Ring], ids=["collective", "point-to-point", "ring"])
def test_sound_resharding_passes(pass_: type[Pass], tmp_path: Path) -> None:
    finished = _campaign(pass_, 4, tmp_path, programs=300, fail_fast=True, drawn=resharding_programs)
    assert finished.verdict == "passed", finished.counterexamples[0].finding.title
    assert finished.statistics.inconclusive <= 30  # declined: what no lowering carries out is drawn too


_SHARES = {
    "mixed": mixed_programs, "moe": moe_programs, "overlap": overlap_programs, "functional": functional_programs,
    "fsdp": fsdp_programs, "sequence-functional": sequence_functional_programs,
}  # fmt: skip


#: Into how many tests the defects of resharding are divided, and those of rows.
_PARTS, _PARTS_OF_ROWS = 6, 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawn", "world_size", "part"),
    [
        *(
            pytest.param(drawn, size, slice(None), id=f"{name}-{size}")
            for name, drawn in _SHARES.items()
            for size in (2, 4)
        ),
        *(
            pytest.param(resharding_programs, 4, slice(part, None, _PARTS), id=f"resharding-4-{part}")
            for part in range(_PARTS)
        ),
        *(
            pytest.param(
                sequence_functional_programs,
                size,
                slice(part, None, _PARTS_OF_ROWS),
                id=f"sequence-functional-{size}-{part}",
            )
            for size in (2, 4)
            for part in range(_PARTS_OF_ROWS)
        ),
    ],
)
def test_defects_show_often_enough(drawn: Drawn, world_size: int, part: slice) -> None:
    names = [name for name in MUTANTS if hunting_grounds(name)[0] is drawn][part]
    shown: Counter[str] = Counter()
    programs = 0

    @seeded(SEED)
    @settings(
        max_examples=100,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn(world_size=world_size))
    def judge(program: Program) -> None:
        nonlocal programs
        programs += 1
        for name in names:
            shown[name] += bool(verify(InProcess(prepare_pass(MUTANTS[name], "", {})), program).findings)

    judge()
    for name in names:
        print(f"{name:<28} {shown[name]:3} of {programs} programs of {world_size} ranks")
    rare = [name for name in names if shown[name] < RARER.get(name, LEAST) * programs]
    assert rare == []
