"""Programs per second, CPU time per program, and where the time goes.

    python benchmarks/throughput.py [--programs N] [--world-size N] [--spawned N] [--against COMMIT | --workers N] [--turns N]

Draws the same programs for every row of one world size. Rows: a whole campaign (drawing, pass in its worker, checks,
statistics) in lockstep alone and confirmed on gloo, and one of five times as many programs with the search; of those that it has
made the programs of at most 8 nodes once more, in lockstep with all checks, without what made them; the bare execution of the
same pairs in lockstep and on the same pool, one after the other and with all of them in flight; and, to compare with,
`torch.multiprocessing.spawn` for every pair, which starts the ranks, joins them to a gloo group, runs both versions and compares
them. CPU time is that of all processes that work on the row; where it is well below the time per program, the machine was busy
with something else, and where it is above, processes worked side by side. Compare rows of one run only: machines differ.

With `--against`, another commit is checked out beside. Both sides take turns, each with its own copy of this script, and one
table shows CPU time per program of both, each the median of its turns. With `--workers`, `tcverify run` takes turns: one
process, one that does not record what the pass reaches, and N processes. One table shows programs per second on the clock,
from the start of the command to its end.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, seed, settings
from rich.console import Console
from rich.table import Table

from tcverify.application import Guarded, Watch
from tcverify.campaign import Campaign, CampaignFinished, CampaignPlan
from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.campaign.pipeline import InFlightProgram, Pipeline
from tcverify.campaign.search import ProgramSearch
from tcverify.execution import Lockstep, ProcessGroupPool, RankResult, compare_ranks
from tcverify.execution.asynchrony import Join
from tcverify.execution.interpreter import rank_inputs, run_rank
from tcverify.execution.plan import ExecutionPlan as RankPlan
from tcverify.execution.plan import plans_of, rank_constants
from tcverify.ops.distributed import perform
from tcverify.program import Program, dumps, loads
from tcverify.strategies import transformer_programs
from tcverify.verification.verifier import chosen_checks, verify_in_steps

#: Programs of the campaign that is searched for each one of the others; and calls of those that are small.
SEARCHED, SMALL = 5, 8

PASS = "tcverify.passes.sequence_parallel:SequenceParallel"


@dataclass(frozen=True)
class Row:
    """What was measured: seconds on the clock, and of CPU time of all processes that took part."""

    name: str
    programs: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.programs / self.seconds

    def show(self, rest: str = "") -> None:
        cpu = f"{1e3 * self.cpu / self.programs:8.2f} ms CPU" if self.cpu else " " * 15
        print(f"  {self.name:<36}{self.rate:8.1f} programs/s {cpu}   {rest}".rstrip())


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of this process and these others so far, by the clock that Linux keeps for each process."""
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def measured(name: str, pids: Callable[[], Sequence[int]], work: Callable[[], int]) -> Row:
    """Do `work`, which returns the number of programs that it did. The processes `pids` live before and after."""
    before, start = cpu_seconds(pids()), time.perf_counter()
    programs = work()
    return Row(name, programs, time.perf_counter() - start, cpu_seconds(pids()) - before)


def campaign(
    subject: Guarded, world_size: int, pool: ProcessGroupPool | None, programs: int, search: ProgramSearch | None = None
) -> CampaignFinished:
    """Run a campaign in a fresh directory."""
    with tempfile.TemporaryDirectory() as scratch:
        plan = CampaignPlan(
            transformer_programs(world_size=world_size),
            f"{world_size} ranks",
            Path(scratch) / "reports",
            Path(scratch) / "state",
            max_examples=programs,
            seed=1,
            search=search,
        )
        return Campaign(subject, plan, pool).run()


class Kept(ProgramSearch):
    """A search that keeps the programs that it makes."""

    def __init__(self, subject: Guarded, seed: int) -> None:
        super().__init__(subject, seed)
        self.programs: list[Program] = []

    def turn(self, masked: Callable[[Program], bool]) -> Iterator[Program]:
        for program in super().turn(masked):
            self.programs.append(program)
            yield program


def verify_all(subject: Guarded, programs: Sequence[Program]) -> int:
    """Verify programs as a campaign verifies those that a search makes."""
    pipeline = Pipeline(InFlightProgram.advance, lambda flight: None)
    for program in programs:
        pipeline.answer()
        steps = verify_in_steps(
            subject,
            program,
            contract=subject.contract,
            confirm=None,
            checks=chosen_checks(None),
            watch=Watch(),
            lean=True,
        )
        pipeline.feed(InFlightProgram(program, False, steps))
    while len(pipeline):
        pipeline.answer()
        pipeline.feed(None)
    return len(programs)


def pairs(subject: Guarded, world_size: int, programs: int) -> list[tuple[Program, Program]]:
    """Draw programs and apply the pass to them."""
    found: list[tuple[Program, Program]] = []

    @seed(1)
    @settings(SETTINGS, max_examples=programs)
    @given(transformer_programs(world_size=world_size))
    def collect(program: Program) -> None:
        rewritten = subject.apply(program).rewritten
        if rewritten is not None:
            found.append((program, rewritten))

    collect()
    return found


def phases(finished: CampaignFinished) -> str:
    """Where the time of a campaign went, as seen by the process that runs it: for other processes it waits."""
    counts = finished.statistics
    spent: dict[str, float] = dict(counts.seconds)
    spent["drawing and the rest"] = counts.elapsed - sum(spent.values())
    return ", ".join(
        f"{name} {1e3 * s / counts.programs:.1f} ms" for name, s in sorted(spent.items(), key=lambda phase: -phase[1])
    )


def spawned(rank: int, world_size: int, store: str, texts: tuple[str, str]) -> None:
    """What a rank does that is started for one pair alone."""
    torch.set_num_threads(1)
    rendezvous = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    programs = [loads(text) for text in texts]
    results = [run_on_group(program, plans_of(program), rank) for program in programs]
    if any(delta.problem for delta in compare_ranks(*results)):
        raise RuntimeError("the rewritten program computes something else")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # now and then gloo's threads outlive the group and abort the interpreter's own end


def run_on_group(program: Program, plans: Sequence[RankPlan], rank: int) -> RankResult:
    """Run a rank of a program on torch.distributed's process group, whichever that is."""
    binding = program.ranks[rank]
    plan = plans[binding.graph]
    constants = rank_constants(program.mesh, rank, binding.constants)
    answer: Any = None
    with torch.no_grad():
        steps = run_rank(plan, rank, constants, rank_inputs(plan, rank, program.sources))
        while True:
            try:
                _, request = steps.send(answer)
            except StopIteration as stop:
                result: RankResult = stop.value
                return result
            assert not isinstance(request, Join), "the programs drawn here have no asynchronous collectives"
            answer = perform(request.collective, request.tensor)


def spawn_for_each(world_size: int, drawn: Sequence[tuple[Program, Program]]) -> Row:
    start = time.perf_counter()
    for original, rewritten in drawn:
        with tempfile.TemporaryDirectory() as scratch:
            texts = dumps(original), dumps(rewritten)
            arguments = world_size, str(Path(scratch) / "store"), texts
            mp.spawn(spawned, arguments, world_size)  # type: ignore[attr-defined, no-untyped-call]
    return Row("pairs, torch.multiprocessing.spawn", len(drawn), time.perf_counter() - start, 0.0)


def measure(subject: Guarded, size: int, programs: int, spawns: int) -> list[Row]:
    """Print the rows of one world size, and return those whose CPU time is known."""
    drawn = pairs(subject, size, programs)
    campaign(subject, size, None, max(60, programs // 5))  # fills the memos, starts the second worker
    finished: list[CampaignFinished] = []

    def run(pool: ProcessGroupPool | None) -> int:
        finished.append(campaign(subject, size, pool, programs))
        return finished[-1].statistics.programs

    def bare(compare: Callable[[Program, Program], Any]) -> int:
        for original, rewritten in drawn:
            compare(original, rewritten)
        return len(drawn)

    with ProcessGroupPool(size) as pool:
        pool.start()

        def everybody() -> list[int]:
            return [*subject.pids, *pool.pids]

        def in_flight() -> int:
            for ticket in [pool.submit(original, rewritten) for original, rewritten in drawn]:
                pool.result(ticket)
            return len(drawn)

        alone = measured("campaign, lockstep", lambda: subject.pids, lambda: run(None))
        confirmed = measured("campaign, lockstep and gloo", everybody, lambda: run(pool))
        bare_rows = [
            measured("pairs, lockstep", list, lambda: bare(Lockstep().compare)),
            measured("pairs, gloo, one at a time", lambda: pool.pids, lambda: bare(pool.compare)),
            measured("pairs, gloo, all in flight", lambda: pool.pids, in_flight),
        ]
    kept = Kept(subject, 1)
    searched = measured(
        "campaign, lockstep, searched",
        lambda: subject.pids,
        lambda: campaign(subject, size, None, SEARCHED * programs, kept).statistics.programs,
    )
    small = [program for program in kept.programs if program.size <= SMALL]
    again = measured("searched programs, 8 nodes at most", lambda: subject.pids, lambda: verify_all(subject, small))
    counts = finished[-1].statistics
    nodes = sum(original.size for original, _ in drawn) / len(drawn)
    fired = ", ".join(f"{name} {n / counts.programs:.0%}" for name, n in sorted(counts.fired.items()))
    print(f"{size} ranks, {len(drawn)} programs of {nodes:.1f} compute nodes on average; fired: {fired}")
    alone.show(phases(finished[0]))
    confirmed.show(phases(finished[1]))
    searched.show(f"{searched.programs / searched.cpu:.0f} per CPU second")
    again.show(f"{again.programs / again.cpu:.0f} per CPU second")
    for row in bare_rows:
        row.show()
    if spawns:
        each = spawn_for_each(size, drawn[:spawns])
        each.show(f"the campaign on gloo does {confirmed.rate / each.rate:.0f} times as many")
    return [alone, confirmed, searched, again, *bare_rows]


def one_side(tree: Path, programs: int, sizes: Sequence[int]) -> dict[str, float]:
    """Milliseconds of CPU time per program, by row, of the sources in a directory."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.json"
        options = [f"--programs={programs}", "--spawned=0", f"--rows={rows}", *(f"--world-size={n}" for n in sizes)]
        command = [sys.executable, str(tree / "benchmarks" / "throughput.py"), *options]
        subprocess.run(
            command, check=True, cwd=tree, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(tree)}
        )
        found: dict[str, float] = json.loads(rows.read_text())
        return found


def compare(commit: str, turns: int, programs: int, sizes: Sequence[int]) -> None:
    """Print what a program costs in another commit, and here."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(scratch) / "other"
        subprocess.run(["git", "-C", str(root), "worktree", "add", "--detach", str(other), commit], check=True)
        try:
            sides = [[one_side(tree, programs, sizes) for tree in (other, root)] for _ in range(turns)]
        finally:
            subprocess.run(["git", "-C", str(root), "worktree", "remove", "--force", str(other)], check=True)
    table = Table("ms of CPU time per program", commit, "here", "ratio")
    for name in sides[0][0]:
        before, after = (statistics.median(turn[side][name] for turn in sides) for side in (0, 1))
        table.add_row(name, f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}")
    Console(width=110).print(table)


def by_workers(workers: int, turns: int, programs: int, size: int) -> None:
    """Print how many programs per second one process and several verify."""
    sides = {
        "1 worker": [],
        "1 worker, --no-coverage": ["--no-coverage"],
        f"{workers} workers": [f"--workers={workers}"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, options in sides.items():
            with tempfile.TemporaryDirectory() as scratch:
                common = ["--strategy=structured", "--draw", "--confirm=none", f"--report-dir={scratch}"]
                drawn = ["--seed=1", f"--world-size={size}", f"--max-examples={programs}"]
                command = [sys.executable, "-m", "tcverify", "run", "sequence_parallel", *common, *drawn, *options]
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - start)
    table = Table(f"{programs:,} programs on {size} ranks", "programs/s", "times the first")
    rates = {name: programs / statistics.median(taken) for name, taken in seconds.items()}
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.1f}", f"{rate / rates['1 worker']:.2f}")
    Console(width=110).print(table)


@click.command()
@click.option("--programs", type=click.IntRange(10), default=300, show_default=True)
@click.option("--world-size", type=click.IntRange(2), multiple=True, default=(2, 4), show_default=True)
@click.option("--spawned", "spawns", type=click.IntRange(0), default=5, show_default=True, help="0 leaves the row out.")
@click.option("--against", metavar="COMMIT", help="Compare with this commit.")
@click.option("--workers", type=click.IntRange(2), help="Compare that many workers with one.")
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True, help="Of each side that is compared.")
@click.option("--rows", type=click.Path(path_type=Path), hidden=True)
def main(
    programs: int,
    world_size: tuple[int, ...],
    spawns: int,
    against: str | None,
    workers: int | None,
    turns: int,
    rows: Path | None,
) -> None:
    if workers is not None:
        by_workers(workers, turns, programs, world_size[0])
        return
    if against is not None:
        compare(against, turns, programs, world_size)
        return
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with Guarded(PASS, covered=()) as subject:
        for size in world_size:
            for row in measure(subject, size, programs, spawns):
                found[f"{size} ranks: {row.name}"] = 1e3 * row.cpu / row.programs
    if rows is not None:
        rows.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
