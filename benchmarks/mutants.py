"""How many programs it takes to refute each planted defect, and how small the counterexample gets.

    python benchmarks/mutants.py [--programs N] [--seeds N] [STRATEGY]...

One row per mutant of tests/mutants, one column per strategy: the programs drawn up to the first finding, of whatever kind, and
the compute nodes of the shrunk program, in lockstep at 2 ranks, or at 4 (marked) where 2 do not show it. Campaigns judge up to
three programs at a time: counts below four say no more than that.
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
    """What came of one seed: the world size, the programs up to the finding, and the nodes of its program when shrunk."""

    world_size: int
    programs: int
    shrunk: int


def hunt(mutant: str, strategy: str, seed: int, bound: int) -> Hunt | None:
    """Run a campaign at each size, until one refutes the mutant; None when none does."""
    from tests.mutants.catalogue import MUTANTS

    torch.set_num_threads(1)
    for size in WORLD_SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            plan = Plan(
                STRATEGIES[strategy](world_size=size),
                f"{size} ranks",
                Path(scratch) / "reports",
                Path(scratch) / "state",
                max_examples=bound,
                seed=seed,
                fail_fast=True,
            )
            finished = Campaign(InProcess(prepare(MUTANTS[mutant], "", {})), plan, None).run()
        if finished.counterexamples:
            return Hunt(size, finished.statistics.programs, finished.counterexamples[0].program.size)
    return None


def cell(hunts: list[Hunt | None]) -> str:
    """Sum up the seeds of one mutant with one strategy."""
    found = [one for one in hunts if one is not None]
    if not found:
        return "not found"
    programs = statistics.median_low([one.programs for one in found])
    larger = "" if all(one.world_size == WORLD_SIZES[0] for one in found) else f" *{max(h.world_size for h in found)}"
    missed = f" ({len(hunts) - len(found)} of {len(hunts)} missed)" if len(found) < len(hunts) else ""
    return f"{programs} → {max(one.shrunk for one in found)}{larger}{missed}"


@click.command()
@click.argument("strategies", nargs=-1)
@click.option("--programs", type=click.IntRange(1), default=300, show_default=True, help="Bound per campaign.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
def main(strategies: tuple[str, ...], programs: int, seeds: int, workers: int) -> None:
    from tests.mutants.catalogue import MUTANTS

    chosen = strategies or ("structured", "mixed", "wild")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {
            (mutant, strategy): [pool.submit(hunt, mutant, strategy, seed, programs) for seed in range(seeds)]
            for mutant in MUTANTS
            for strategy in chosen
        }
        print(
            f"programs to the first finding (median) → compute nodes (most); {seeds} seeds, at most {programs} programs"
        )
        print(f"{'mutant':<34}" + "".join(f"{strategy:<28}" for strategy in chosen))
        for mutant in MUTANTS:
            cells = [cell([future.result() for future in futures[mutant, strategy]]) for strategy in chosen]
            print(f"{mutant:<34}" + "".join(f"{text:<28}" for text in cells), flush=True)


if __name__ == "__main__":
    main()
