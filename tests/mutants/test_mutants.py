"""Every planted defect is found; what is sound is not refuted.

By default a few mutants run; `pytest -m slow tests/mutants` runs the whole matrix. `-s` shows in how many of 100 programs each
defect shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

from tcverify.application import InProcess
from tcverify.application.loading import prepare
from tcverify.campaign import Campaign, CampaignFinished, Plan
from tcverify.passes import Identity, Multistream, Pass, SequenceParallel
from tcverify.program import Program
from tcverify.strategies import mixed_programs, near_miss_programs, overlap_programs
from tcverify.verifier import verify
from tests.mutants import multistream, sequence_parallel

SEED = 7

Drawn = Callable[..., SearchStrategy[Program]]

MUTANTS: dict[str, type[Pass]] = {**sequence_parallel.MUTANTS, **multistream.MUTANTS}
EXPECTED = {**sequence_parallel.EXPECTED, **multistream.EXPECTED}

#: Programs in which mutants are hunted, the likeliest first.
HUNTS: dict[str, tuple[Drawn, ...]] = {
    **dict.fromkeys(sequence_parallel.MUTANTS, (mixed_programs, near_miss_programs)),
    **dict.fromkeys(multistream.MUTANTS, (overlap_programs, mixed_programs)),
}

#: Defects that no drawn program shows, since each takes what none has: see the programs of `test_multistream_mutants`.
BY_HAND = frozenset(
    {
        "OneTokenPerWait",  # an op that waits for two streams at once
        "WritesIntoInputsNotJoined",  # compute beside the main stream that writes into an input and is not read afterwards
    }
)

#: Mutants of the default tests, one for each way to be found, and where.
CHOSEN = {
    "FirstChunkForAll": 2,
    "RankNumberPicksShard": 4,
    "GatherSkippedOnFirstRank": 2,
    "AllReduceErasedOnFirstRank": 2,
    "StaleMetadata": 2,
    "ResidualNotSliced": 2,
    "TokenSharedByCollectives": 2,
    "RecordedWhereNeeded": 2,
    "OverheadForgotten": 4,
    "WaitNamesMainStream": 2,
    "NoGuard": 2,
}

#: Least share of programs that should show a defect.
LEAST = 0.03


def _campaign(
    pass_: type[Pass],
    world_size: int,
    directory: Path,
    *,
    programs: int,
    fail_fast: bool,
    drawn: Drawn = mixed_programs,
) -> CampaignFinished:
    plan = Plan(
        drawn(world_size=world_size),
        f"{world_size} ranks",
        directory / "reports",
        directory / "state",
        max_examples=programs,
        seed=SEED,
        shrink_time=0.0,
        fail_fast=fail_fast,
    )
    return Campaign(InProcess(prepare(pass_, "", {})), plan, None).run()


def _is_refuted(name: str, world_size: int, directory: Path, drawn: Drawn = mixed_programs) -> bool:
    """Whether 300 programs show an expected kind of finding; when another kind comes first, the campaign looks on for it."""
    finished = _campaign(MUTANTS[name], world_size, directory, programs=300, fail_fast=True, drawn=drawn)
    if finished.verdict == "refuted" and not finished.statistics.findings.keys() & EXPECTED[name]:
        finished = _campaign(MUTANTS[name], world_size, directory / "on", programs=300, fail_fast=False, drawn=drawn)
    return not finished.statistics.findings.keys().isdisjoint(EXPECTED[name])


@pytest.mark.parametrize(("name", "world_size"), CHOSEN.items(), ids=CHOSEN)
def test_a_mutant_is_refuted(name: str, world_size: int, tmp_path: Path) -> None:
    assert _is_refuted(name, world_size, tmp_path, HUNTS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in BY_HAND])
def test_every_mutant_is_refuted(name: str, tmp_path: Path) -> None:
    """At 2 ranks or at 4: a residual in another order of the same ranks, for one, takes a mesh that only 2 ranks have.

    What needs one certain mutation is hunted with mutations alone: of what campaigns draw, they are a quarter.
    """
    hunts = [(programs, size) for programs in HUNTS[name] for size in (2, 4)]
    assert any(_is_refuted(name, size, tmp_path / f"{i}", programs) for i, (programs, size) in enumerate(hunts))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("pass_", "drawn"),
    [
        (SequenceParallel, mixed_programs),
        (Identity, mixed_programs),
        (Multistream, mixed_programs),
        (Multistream, overlap_programs),
    ],
    ids=["sequence_parallel", "identity", "multistream", "multistream-overlap"],
)
def test_what_is_sound_passes(pass_: type[Pass], drawn: Drawn, world_size: int, tmp_path: Path) -> None:
    finished = _campaign(pass_, world_size, tmp_path, programs=75, fail_fast=True, drawn=drawn)
    assert finished.verdict == "passed", finished.counterexamples[0].finding.title
    assert finished.statistics.inconclusive == 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_defects_show_often_enough(world_size: int) -> None:
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
    @given(mixed_programs(world_size=world_size))
    def judge(program: Program) -> None:
        nonlocal programs
        programs += 1
        for name, mutant in sequence_parallel.MUTANTS.items():
            shown[name] += bool(verify(InProcess(prepare(mutant, "", {})), program).findings)

    judge()
    for name in sequence_parallel.MUTANTS:
        print(f"{name:<28} {shown[name]:3} of {programs} programs of {world_size} ranks")
    rare = [name for name in sequence_parallel.MUTANTS if shown[name] < LEAST * programs]
    assert rare == []
