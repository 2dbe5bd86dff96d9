"""Whether it pays to vary programs that reached something new, rather than to draw all of them anew.

    python benchmarks/steering.py [--programs N] [--seeds N] [--mutants] [PASS=STRATEGY]...

For each pass, both ways on the same seeds in one run: what is reached of its code (lines, and outcomes of conditions) after so
many programs, summed up over the seeds; of what both ways reach in the end on some seed, how many programs it takes (median and
90th percentile, what is not reached counted as all programs); and, with --mutants, the programs it takes to refute each
planted defect of sequence parallelism, for both ways.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click
import hypothesis
import torch
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is no package that is installed

from tcverify.application import InProcess, Pair, load_pass
from tcverify.application.loading import prepare
from tcverify.application.reaching import Recorder, scope_of
from tcverify.campaign import Campaign, Coverage, Plan
from tcverify.campaign.drawing import SETTINGS
from tcverify.program import Program
from tcverify.strategies import STRATEGIES
from tcverify.strategies.pool import Pool

PASSES = (
    "tcverify.passes:SequenceParallel=mixed",
    "tcverify.passes:SequenceParallel=structured",
    "tcverify.passes:Multistream=mixed",
    "tcverify.passes:CommBuffers=functional",
)


def reached(target: str, strategy: str, seed: int, bound: int, *, steered: bool) -> dict[str, int]:
    """What is reached, and with which program for the first time."""
    loaded = load_pass(target)
    found: dict[str, int] = {}
    pool = Pool()
    drawn = pool.steered(STRATEGIES[strategy](world_size=2)) if steered else STRATEGIES[strategy](world_size=2)
    with closing(Recorder(scope_of([loaded.subject], []))) as recorder:
        coverage = Coverage(recorder.scope.files)
        number = 0

        @hypothesis.seed(seed)
        @settings(SETTINGS, max_examples=bound)
        @given(drawn)
        def judge(program: Program) -> None:
            nonlocal number
            number += 1
            pair: Pair = InProcess(loaded).apply(program)
            pair.reached = recorder.taken()
            new = coverage.novel(program, pair)
            for reason in new:
                found.setdefault(reason, number)
            if new:
                pool.keep(program)

        judge()
    return found


def tell(name: str, plain: Sequence[dict[str, int]], steered: Sequence[dict[str, int]], bound: int) -> None:
    """Print what came of one pass."""
    known = sorted({one for side in (*plain, *steered) for one in side if ".py:" in one})
    marks = [bound >> shift for shift in range(4, -1, -1)]
    print(f"{name}: {len(known)} lines and outcomes")
    for label, side in (("drawn", plain), ("steered", steered)):
        counts = [sum(one[p] <= mark for one in side for p in known if p in one) / len(side) for mark in marks]
        until = [one.get(point, bound) for one in side for point in known]
        late = statistics.quantiles(until, n=10)[-1]
        missed = sum(point not in one for one in side for point in known) / len(side)
        cells = "  ".join(f"{count:7.1f} at {mark}" for count, mark in zip(counts, marks, strict=True))
        print(f"  {label:<8} {cells}   90 % within {late:.0f}, mean {statistics.mean(until):.1f}, missed {missed:.1f}")


def hunts(seeds: int, bound: int) -> None:
    """Print how many programs it takes to refute each mutant of sequence parallelism."""
    from tests.mutants.sequence_parallel import MUTANTS

    totals: dict[str, list[int]] = defaultdict(list)
    for name, mutant in MUTANTS.items():
        row = []
        for label in ("drawn", "steered"):
            needed = [_hunt(mutant, seed, bound, steered=label == "steered") for seed in range(seeds)]
            totals[label] += needed
            row.append(f"{label} {' '.join(f'{one:4d}' for one in needed)}")
        print(f"  {name:<32} {'   '.join(row)}")
    for label, counts in totals.items():
        print(
            f"  {label}: mean {statistics.mean(counts):.1f}, found {sum(one < bound for one in counts)} of {len(counts)}"
        )


def _hunt(mutant: type, seed: int, bound: int, *, steered: bool) -> int:
    loaded = prepare(mutant, "", {})
    with tempfile.TemporaryDirectory() as scratch, closing(Recorder(scope_of([loaded.subject], []))) as recorder:
        pool = Pool()
        programs = STRATEGIES["mixed"](world_size=2)

        class Recorded(InProcess):
            def apply(self, program: Program, *, deep: bool = False) -> Pair:
                pair = super().apply(program, deep=deep)
                pair.reached = recorder.taken()
                return pair

        plan = Plan(
            pool.steered(programs) if steered else programs, "2 ranks", Path(scratch) / "reports", Path(scratch) / "state",
            max_examples=bound, seed=seed, fail_fast=True, shrink_time=0.0, coverage=Coverage(recorder.scope.files),
            keep=pool.keep,
        )  # fmt: skip
        return Campaign(Recorded(loaded), plan, None).run().statistics.programs


@click.command()
@click.argument("passes", nargs=-1, metavar="[PASS=STRATEGY]...")
@click.option("--programs", default=400, show_default=True, help="Programs per seed.")
@click.option("--seeds", default=3, show_default=True, help="Seeds.")
@click.option("--mutants", is_flag=True, help="Also hunt the mutants of sequence parallelism.")
def main(passes: tuple[str, ...], programs: int, seeds: int, mutants: bool) -> None:
    torch.set_num_threads(1)
    for entry in passes or PASSES:
        target, _, strategy = entry.rpartition("=")
        sides = [
            [reached(target, strategy, seed, programs, steered=steered) for seed in range(seeds)]
            for steered in (False, True)
        ]
        tell(entry, sides[0], sides[1], programs)
    if mutants:
        hunts(seeds, programs)


if __name__ == "__main__":
    main()
