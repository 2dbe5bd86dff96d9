"""What the search finds, against drawing alone, in equal CPU time.

    python benchmarks/power.py MODULE [--sound NAME] [--seconds N] [--seeds N] [--world-size 2,4] [--only NAME]... [--markdown]

MODULE has passes in a list SUBJECTS of their names, each with one defect, and a pass without these (`--sound`, default Guarded),
which may have defects of its own: a finding counts for a subject if the sound pass handles its program right. Every subject is
verified twice for each seed, with the search and without it, at the settings of `tcverify run` without a process group, with the
CPU time shared evenly by the numbers of ranks. CPU time is that of this process and of the pass's; the time to judge whose a
finding is does not count. Printed: CPU seconds and programs until the first finding that is the subject's own.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from tcverify import verify
from tcverify.application import Guarded, InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan, Event, FindingFound, Progress
from tcverify.campaign.search import ProgramSearch
from tcverify.cli.strategy_choice import choose_strategies
from tcverify.program import Program
from tcverify.strategies import programs_of

#: Checks by which it is judged whose a finding is.
CHECKS = ("structure", "collectives", "equivalence")

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Sought:
    """One subject on one side.

    Attributes:
        seconds, programs: until its own defect was found; None where it was not.
        tried: programs in all.
    """

    seconds: float | None = None
    programs: int | None = None
    tried: int = 0

    def __str__(self) -> str:
        return "-" if self.seconds is None else f"{self.seconds:.1f} s, {self.programs:,}"


def hunt(target: str, sound: str, seconds: float, seed: int, world_sizes: list[int], search: bool) -> Sought:
    """Verify a pass until its own defect is found, or the time is over."""
    found = Sought()
    before = 0.0
    with tempfile.TemporaryDirectory() as folder, Guarded(target) as tried:
        chosen = choose_strategies(tried, Path(folder), "ranks", world_sizes[0], max_time=seconds).strategy
    with Guarded(target, covered=() if search else None) as subject:
        searching = ProgramSearch(subject, seed) if search else None
        for size in world_sizes:
            with tempfile.TemporaryDirectory() as folder:
                watch = _Watch(subject, target, sound, seconds / len(world_sizes))
                plan = CampaignPlan(
                    programs_of(chosen, None, size), f"{size} ranks", Path(folder), Path(folder),
                    max_examples=None, max_time=100 * seconds, seed=seed, earlier=False, collect=True, search=searching,
                )  # fmt: skip
                Campaign(subject, plan, None, [watch]).run()
                if watch.found is not None:
                    found.seconds, found.programs = before + watch.found, found.tried + watch.programs
                before, found.tried = before + watch.spent(), found.tried + watch.programs
            if found.seconds is not None:
                break
    return found


class _Watch:
    """Ends a campaign when the subject's own defect is found, or its CPU time is over.

    Attributes:
        found: CPU seconds until then.
        programs: so far.
    """

    def __init__(self, subject: Guarded, target: str, sound: str, limit: float) -> None:
        self.found: float | None = None
        self.programs = 0
        self._subject, self._target, self._sound, self._limit = subject, target, sound, limit
        self._start, self._aside, self._over = self._clock(), 0.0, False

    def _clock(self) -> float:
        return time.process_time() + sum(map(_cpu, self._subject.pids))

    def spent(self) -> float:
        return self._clock() - self._start - self._aside

    def __call__(self, event: Event) -> None:
        if self._over:  # the campaign keeps what it has found so far
            return
        if isinstance(event, Progress):
            self.programs = event.statistics.programs
            self._over = self.spent() > self._limit
        elif isinstance(event, FindingFound):
            at, begin = self.spent(), time.process_time()
            own = is_own(event.counterexample.program, self._target, self._sound)
            self._aside += time.process_time() - begin
            if own:
                self.found, self._over = at, True
        if self._over:
            raise KeyboardInterrupt


def _cpu(pid: int) -> float:
    """CPU seconds of a process, 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def is_own(program: Program, target: str, sound: str) -> bool:
    """Whether a program is handled right by the sound pass, and not by the subject."""
    if verify(_loaded(target), program, checks=CHECKS).status != "refuted":
        return False
    return verify(_loaded(sound), program, checks=CHECKS).status == "passed"


def _loaded(target: str) -> InProcess:
    module, _, name = target.partition(":")
    return InProcess(prepare_pass(getattr(importlib.import_module(module), name), "", {}))


@click.command()
@click.argument("module")
@click.option("--sound", default="Guarded")
@click.option("--seconds", default=60.0)
@click.option("--seeds", default=1)
@click.option("--world-size", default="2,4")
@click.option("--only", multiple=True)
@click.option("--side", type=click.Choice(["both", "search", "draw"]), default="both")
@click.option("--markdown", is_flag=True)
def main(
    module: str,
    sound: str,
    seconds: float,
    seeds: int,
    world_size: str,
    only: tuple[str, ...],
    side: str,
    markdown: bool,
) -> None:
    """See the module."""
    sys.path[:0] = [str(Path.cwd()), str(Path(__file__).resolve().parent.parent)]  # where passes may lie
    torch.set_num_threads(1)
    sides = {"draw": False, "search": True} if side == "both" else {side: side == "search"}
    sizes = [int(size) for size in world_size.split(",")]
    subjects = [name for name in importlib.import_module(module).SUBJECTS if not only or name in only]
    rows: list[tuple[str, ...]] = []
    totals = dict.fromkeys(sides, 0)
    for name in subjects:
        row = [name]
        for which, search in sides.items():
            found = [
                hunt(f"{module}:{name}", f"{module}:{sound}", seconds, seed, sizes, search) for seed in range(seeds)
            ]
            totals[which] += sum(one.seconds is not None for one in found)
            row.append(" / ".join(map(str, found)))
            rate = statistics.mean(one.tried for one in found)
            print(f"{name}, {which}: {row[-1]}  ({rate:,.0f} programs tried)", file=sys.stderr, flush=True)
        rows.append(tuple(row))
    header = ("defect", *sides)
    if markdown:
        print("| " + " | ".join(header) + " |\n|---|" + "--:|" * len(sides))
        for cells in rows:
            print("| " + " | ".join(cells) + " |")
    else:
        for cells in [header, *rows]:
            print("  ".join(cell.ljust(28) for cell in cells).rstrip())
    print(", ".join(f"{which}: {n} of {seeds * len(subjects)}" for which, n in totals.items()))


if __name__ == "__main__":
    main()
