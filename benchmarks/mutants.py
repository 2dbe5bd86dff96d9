"""How many programs it takes to refute each planted defect, and how small the counterexample gets.

    python benchmarks/mutants.py [--programs N] [--seeds N] [--search] [--only NAME]... [STRATEGY]...

One row per mutant of tests/mutants, one column per strategy ("own": what the tests draw for that mutant): the programs drawn up
to the first finding, of whatever kind, and the compute nodes of the shrunk program, in lockstep at 2 ranks, or at more (marked)
where 2 do not show it. Campaigns judge up to three programs at a time: counts below four say no more than that. With --search a
second column per strategy has the same campaigns as `tcverify run` makes them by default; the last lines say how many mutants
each column has found on all seeds, and which ones the search has found later, by the medians.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan
from tcverify.campaign.search import search_of
from tcverify.strategies import STRATEGIES

if TYPE_CHECKING:
    from tests.mutants.catalogue import Drawn

WORLD_SIZES = (2, 4)

#: The column for the strategies from which the tests draw for a mutant.
OWN = "own"


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of one seed: the world size, the programs up to the finding, and the nodes of its program when shrunk."""

    world_size: int
    programs: int
    shrunk: int


def grounds(mutant: str, strategy: str) -> list[tuple[Drawn, int]]:
    """What to draw from, and on how many ranks, in turn."""
    from tests.mutants.catalogue import hunting_grounds, world_sizes

    if strategy != OWN:
        return [(STRATEGIES[strategy], size) for size in WORLD_SIZES]
    return [(drawn, size) for size in world_sizes(mutant) for drawn in hunting_grounds(mutant)[:1]]


def hunt(mutant: str, strategy: str, seed: int, bound: int, search: bool) -> Hunt | None:
    """Run a campaign at each size, until one refutes the mutant; None when none does."""
    from tests.mutants.catalogue import MUTANTS

    torch.set_num_threads(1)
    for drawn, size in grounds(mutant, strategy):
        subject = InProcess(prepare_pass(MUTANTS[mutant], "", {}))
        with tempfile.TemporaryDirectory() as scratch:
            plan = CampaignPlan(
                drawn(world_size=size),
                f"{size} ranks",
                Path(scratch) / "reports",
                Path(scratch) / "state",
                max_examples=bound,
                seed=seed,
                fail_fast=True,
                search=search_of(subject, seed, bound) if search else None,
            )
            finished = Campaign(subject, plan, None).run()
        if finished.counterexamples:
            return Hunt(size, finished.statistics.programs, finished.counterexamples[0].program.size)
    return None


def median(hunts: list[Hunt | None]) -> float:
    """Programs up to the finding; those that find nothing count as if it took longer than any."""
    return statistics.median_low([math.inf if one is None else one.programs for one in hunts])


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
@click.option("--search", is_flag=True, help="A second column per strategy, with the search.")
@click.option("--only", multiple=True, help="A mutant.  [default: all]")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
def main(
    strategies: tuple[str, ...], programs: int, seeds: int, search: bool, only: tuple[str, ...], workers: int
) -> None:
    from tests.mutants.catalogue import MUTANTS

    chosen = [
        (one, way) for one in strategies or ("structured", "mixed", "wild") for way in (False, search)[: 1 + search]
    ]
    mutants = [name for name in MUTANTS if not only or name in only]
    found: dict[tuple[str, bool], int] = dict.fromkeys(chosen, 0)
    later = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {
            (mutant, *column): [
                pool.submit(hunt, mutant, column[0], seed, programs, column[1]) for seed in range(seeds)
            ]
            for mutant in mutants
            for column in chosen
        }
        print(
            f"programs to the first finding (median) → compute nodes (most); {seeds} seeds, at most {programs} programs"
        )
        names = [f"{strategy}, searched" if way else strategy for strategy, way in chosen]
        print(f"{'mutant':<34}" + "".join(f"{name:<28}" for name in names))
        for mutant in mutants:
            hunts = {column: [future.result() for future in futures[(mutant, *column)]] for column in chosen}
            print(f"{mutant:<34}" + "".join(f"{cell(hunts[column]):<28}" for column in chosen), flush=True)
            for strategy, way in chosen:
                found[strategy, way] += None not in hunts[strategy, way]
                if way and median(hunts[strategy, True]) > median(hunts[strategy, False]):
                    later.append(f"{mutant} ({strategy})")
    for name, column in zip(names, chosen, strict=True):
        print(f"{name}: {found[column]} of {len(mutants)} on all seeds")
    if search:
        print(f"later with the search: {', '.join(later) or 'none'}")


if __name__ == "__main__":
    main()
