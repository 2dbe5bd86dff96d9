"""How many programs it takes to refute each planted defect, and how small the counterexample gets.

    python benchmarks/mutants.py [--programs N] [--seeds N] [STRATEGY]...

One row per mutant of tests/mutants, one column per strategy: the programs drawn up to the first finding of an expected kind (the
median over the seeds) and the compute nodes of the shrunk program (the largest of them), both in lockstep at 2 ranks, or at 4
where 2 do not show it in any seed (marked). Run it from the top of the repository.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is no package that is installed

from tcverify.application import InProcess
from tcverify.application.loading import prepare
from tcverify.campaign import Campaign, Plan
from tcverify.strategies import STRATEGIES

WORLD_SIZES = (2, 4)


@dataclass(frozen=True, slots=True)
class Hunt:
    """What one campaign found: programs up to the finding (None: nothing within the bound), nodes drawn and shrunk to."""

    programs: int | None
    drawn: int = 0
    shrunk: int = 0


def hunt(mutant: str, strategy: str, world_size: int, seed: int, bound: int) -> Hunt:
    """Run campaigns until a finding of an expected kind; other kinds count as programs drawn in vain."""
    from tests.mutants.sequence_parallel import EXPECTED, MUTANTS

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan(
            STRATEGIES[strategy](world_size=world_size),
            f"{world_size} ranks",
            Path(scratch) / "reports",
            Path(scratch) / "state",
            max_examples=bound,
            seed=seed,
            fail_fast=True,
        )
        campaign = Campaign(InProcess(prepare(MUTANTS[mutant], "", {})), plan, None)
        finished = campaign.run()
    for case in finished.counterexamples:
        kinds = {case.finding.kind, *(other.kind for other in case.others)}
        if kinds & EXPECTED[mutant]:
            return Hunt(finished.statistics.programs, case.size_drawn, case.program.size)
    return Hunt(None)


def cell(hunts: dict[int, list[Hunt]]) -> str:
    """Sum up the hunts of one mutant with one strategy, by world size."""
    for size, found in hunts.items():
        counts = [h.programs for h in found if h.programs is not None]
        if counts:
            missed = f" ({len(found) - len(counts)} of {len(found)} missed)" if len(counts) < len(found) else ""
            shrunk = max(h.shrunk for h in found if h.programs is not None)
            return f"{statistics.median_low(counts)} → {shrunk}{'' if size == WORLD_SIZES[0] else ' *'}{missed}"
    return "not found"


@click.command()
@click.argument("strategies", nargs=-1)
@click.option("--programs", type=click.IntRange(1), default=300, show_default=True, help="Bound per campaign.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
def main(strategies: tuple[str, ...], programs: int, seeds: int, workers: int) -> None:
    from tests.mutants.sequence_parallel import MUTANTS

    chosen = strategies or ("structured", "mixed", "wild")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {
            (mutant, strategy, size): [
                pool.submit(hunt, mutant, strategy, size, seed, programs) for seed in range(seeds)
            ]
            for mutant in MUTANTS
            for strategy in chosen
            for size in WORLD_SIZES
        }
        print(
            f"programs to the first finding → compute nodes of the counterexample; {seeds} seeds, at most {programs} programs"
        )
        print(f"{'mutant':<34}" + "".join(f"{strategy:<28}" for strategy in chosen) + "  * at 4 ranks")
        for mutant in MUTANTS:
            cells = [
                cell({size: [future.result() for future in futures[mutant, strategy, size]] for size in WORLD_SIZES})
                for strategy in chosen
            ]
            print(f"{mutant:<34}" + "".join(f"{text:<28}" for text in cells), flush=True)


if __name__ == "__main__":
    main()
