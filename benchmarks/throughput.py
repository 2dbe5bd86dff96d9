"""Programs per second, and where the time goes.

    python benchmarks/throughput.py [--programs N]

Draws the same programs for every row of one world size. Rows: a whole campaign (drawing, pass in its worker, checks,
statistics) in lockstep alone and confirmed on gloo, against the bare execution of the same pairs on the same pool, one after
the other, with all of them in flight, and with new rank processes for each. Compare rows of one run only: machines differ.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tcverify.application import Guarded
from tcverify.campaign import Campaign, CampaignFinished, Plan
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.program import Program
from tcverify.strategies import transformer_programs

PASS = "tcverify.passes.sequence_parallel:SequenceParallel"


def campaign(subject: Guarded, world_size: int, pool: ProcessGroupPool | None, programs: int) -> CampaignFinished:
    """Run a campaign in a fresh directory."""
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan(
            transformer_programs(world_size=world_size),
            f"{world_size} ranks",
            Path(scratch) / "reports",
            Path(scratch) / "state",
            max_examples=programs,
            seed=1,
        )
        return Campaign(subject, plan, pool).run()


def pairs(subject: Guarded, world_size: int, programs: int) -> list[tuple[Program, Program]]:
    """Draw programs and apply the pass to them."""
    found: list[tuple[Program, Program]] = []

    @seed(1)
    @settings(
        max_examples=programs,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(transformer_programs(world_size=world_size))
    def collect(program: Program) -> None:
        rewritten = subject.apply(program).rewritten
        if rewritten is not None:
            found.append((program, rewritten))

    collect()
    return found


def row(name: str, count: int, seconds: float, rest: str = "") -> None:
    print(f"  {name:<38}{count / seconds:8.1f} programs/s   {rest}")


def phases(finished: CampaignFinished) -> str:
    """Where the time of a campaign went."""
    counts = finished.statistics
    spent: Counter[str] = Counter(counts.seconds)
    spent["drawing and the rest"] = counts.elapsed - sum(spent.values())
    return ", ".join(f"{name} {1e3 * s / counts.programs:.1f} ms" for name, s in spent.most_common())


@click.command()
@click.option("--programs", type=click.IntRange(10), default=300, show_default=True)
@click.option("--world-size", type=click.IntRange(2), multiple=True, default=(2, 4), show_default=True)
def main(programs: int, world_size: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    with Guarded(PASS) as subject:
        for size in world_size:
            with ProcessGroupPool(size) as pool:
                pool.start()
                drawn = pairs(subject, size, programs)
                nodes = sum(original.size for original, _ in drawn) / len(drawn)
                print(f"{size} ranks, {len(drawn)} programs of {nodes:.0f} compute nodes on average")
                campaign(subject, size, None, programs // 5)  # fills the memos
                finished = campaign(subject, size, None, programs)
                row("campaign, lockstep", finished.statistics.programs, finished.statistics.elapsed, phases(finished))
                finished = campaign(subject, size, pool, programs)
                row(
                    "campaign, lockstep and gloo",
                    finished.statistics.programs,
                    finished.statistics.elapsed,
                    phases(finished),
                )
                start = time.perf_counter()
                for original, rewritten in drawn:
                    Lockstep().compare(original, rewritten)
                row("bare pairs, lockstep", len(drawn), time.perf_counter() - start)
                start = time.perf_counter()
                for original, rewritten in drawn:
                    pool.compare(original, rewritten)
                row("bare pairs, gloo, one at a time", len(drawn), time.perf_counter() - start)
                start = time.perf_counter()
                for ticket in [pool.submit(original, rewritten) for original, rewritten in drawn]:
                    pool.result(ticket)
                row("bare pairs, gloo, all in flight", len(drawn), time.perf_counter() - start)
            start = time.perf_counter()
            for original, rewritten in drawn[:10]:
                with ProcessGroupPool(size) as fresh:
                    fresh.compare(original, rewritten)
            row("bare pairs, gloo, new ranks for each", len(drawn[:10]), time.perf_counter() - start)


if __name__ == "__main__":
    main()
