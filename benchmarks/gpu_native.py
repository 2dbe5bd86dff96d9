"""The native domain's limits on CUDA kernels: python benchmarks/gpu_native.py --seconds 90

Programs of benchmarks/native.py, each with one of its sound rewrites that changes it. Original and rewritten program run on
ranks that are processes and share the device (`--confirm cuda`), in the programs' own dtypes and the original also in float64;
the limits of the native domain judge what the device computes. So do they for the planted losses of precision. Ends with 1 on a
false alarm or a planted loss that is never found.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import click
import torch
from native import drawn

from tcverify import Verdict, verify
from tcverify.checks.values.native import native_differences
from tcverify.domains import NATIVE
from tcverify.errors import TcverifyError
from tcverify.execution import Comparison, ProcessGroupPool, range_used, rounding_noise
from tcverify.program import Finding, Program
from tests.mutants.rounding import PLANTED, SHOWING, SOUND, long_program

STARTED = time.monotonic()

#: Most ranks of the programs that most workers take.
FEW = 2
#: Seeds of each planted loss.
PLANTED_SEEDS = 4

What = Literal["equal", "rounded", "refuted", "refuted on the CPU too", "inconclusive"]


@dataclass
class Tally:
    """What came of the programs of one rewrite."""

    counts: Counter[What] = field(default_factory=Counter)
    words: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.words += other.words


@dataclass
class Started:
    """A program whose ranks compute: the rest of its judgement, which waits for them."""

    name: str
    finish: Callable[[], tuple[What, str]]


def begin(name: str, rewrite: object, program: Program, pool: ProcessGroupPool) -> Started | None:
    """Rewrite a program and give both versions to the ranks of a pool; None where the rewrite leaves it alone."""
    verdict = verify(rewrite, program, domain="native", checks=["equivalence"])
    if not verdict.changed or verdict.pair.rewritten is None:
        return None
    try:
        compared = pool.start_comparison(program, verdict.pair.rewritten, NATIVE)
    except TcverifyError as error:
        words = f"{name}: {error.message}"
        return Started(name, lambda: ("inconclusive", words))
    return Started(name, lambda: judged(name, verdict, program, compared))


def judged(name: str, verdict: Verdict, program: Program, compared: Callable[[], Comparison]) -> tuple[What, str]:
    """What a rewritten program is on the ranks that computed it."""
    assert verdict.pair.rewritten is not None
    try:
        comparison = compared()
    except TcverifyError as error:
        return "inconclusive", f"{name}: {error.message}"
    for run in (comparison.original, comparison.rewritten):
        if not run.finished:
            return "refuted", f"{name}: on the device, {run.why}"
    reference = next((run.reference for run in verdict.runs if run.domain == "native"), None)
    if reference is None:
        return "inconclusive", f"{name}: no reference in lockstep"
    versions = program, verdict.pair.rewritten
    found = native_differences(
        comparison, lambda: rounding_noise(program, reference), lambda: max(map(range_used, versions))
    )
    wrong = [one for one in found if isinstance(one, Finding)]
    if wrong:
        alike = verdict.status == "refuted"
        return ("refuted on the CPU too" if alike else "refuted"), f"{name}: {wrong[0].title}: {wrong[0].detail}"
    if found:
        return "inconclusive", f"{name}: {found[0]}"
    return ("equal" if all(delta.equal for delta in comparison.deltas) else "rounded"), ""


def work(device: Literal["cpu", "cuda"], first: int, step: int, count: int, until: float) -> dict[str, Tally]:
    """Judge a share of planted losses, then of programs, until a time on the monotonic clock.

    The first of several workers takes the programs of many ranks, and the others those of few: ranks share the device, and each
    takes memory there.
    """
    torch.set_num_threads(1)
    found: dict[str, Tally] = {}
    names = list(SOUND)
    with ExitStack() as stack:
        pools: dict[int, ProcessGroupPool] = {}

        def pool(size: int) -> ProcessGroupPool:
            if size not in pools:
                pools[size] = stack.enter_context(ProcessGroupPool(size, device=device, timeout=60))
            return pools[size]

        def note(started: Started) -> None:
            what, words = started.finish()
            tally = found.setdefault(started.name, Tally())
            tally.counts[what] += 1
            tally.words += [words] if words else []

        def rewritten(seed: int, program: Program) -> Started | None:
            """A program with the first rewrite, counted from its own number, that changes it."""
            for name in (*names[seed % len(names) :], *names[: seed % len(names)]):
                started = begin(name, SOUND[name], program, pool(program.world_size))
                if started is not None:
                    return started
            return None

        for name, seed in planted(first, step):
            program = long_program(*SHOWING[name], seed)
            started = begin(name, PLANTED[name], program, pool(program.world_size))
            if started is not None:
                note(started)
        done, before = 0, None
        for seed in range(first, 100 * count, step):
            if time.monotonic() > until or done >= count / step:
                break
            program = drawn(seed)
            if step > 1 and (program.world_size > FEW) is bool(first):
                continue
            started = rewritten(seed, program)
            if started is not None:
                if before is not None:  # its ranks have computed meanwhile
                    note(before)
                before, done = started, done + 1
        if before is not None:
            note(before)
    return found


def planted(first: int, step: int) -> Iterator[tuple[str, int]]:
    """A worker's share of the planted losses."""
    everything = [(name, seed) for seed in range(PLANTED_SEEDS) for name in PLANTED]
    return iter(everything[first::step])


@click.command()
@click.option("--seconds", type=float, default=90.0, show_default=True, help="Time limit for all.")
@click.option("--programs", type=click.IntRange(1), default=2000, show_default=True, help="Sound programs.")
@click.option("--rehearse", is_flag=True, help="Ranks on the CPU in the place of a CUDA device.")
@click.option(
    "--workers", type=click.IntRange(1), default=max(1, min(4, (os.cpu_count() or 2) // 2)), help="Processes."
)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Where all that is not sound is written.")
def main(seconds: float, programs: int, rehearse: bool, workers: int, out: Path | None) -> None:
    if not rehearse and not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        sys.exit(2)
    totals: dict[str, Tally] = {}
    until = STARTED + seconds - 10
    device: Literal["cpu", "cuda"] = "cpu" if rehearse else "cuda"
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        made = [executor.submit(work, device, first, workers, programs, until) for first in range(workers)]
        for one in as_completed(made):
            try:
                for name, tally in one.result().items():
                    totals.setdefault(name, Tally()).add(tally)
            except Exception as error:  # noqa: BLE001 - the other workers' results count
                print(f"a worker failed: {type(error).__name__}: {error}", file=sys.stderr)
    sound = {name: totals.get(name, Tally()) for name in SOUND}
    print("## The native domain on CUDA kernels" + (" (rehearsal: no device)" if rehearse else ""))
    print("\nSound rewrites, by what the device computes.\n")
    print("| rewrite | programs that it changed | round otherwise | refuted | inconclusive |\n|---|--:|--:|--:|--:|")
    for name, tally in sound.items():
        c = tally.counts
        wrong = c["refuted"] + c["refuted on the CPU too"]
        print(f"| {name} | {c.total()} | {c['rounded'] + wrong} | {wrong} | {c['inconclusive']} |")
    print("\nPlanted losses of precision.\n\n| loss | programs | found |\n|---|--:|--:|")
    missed = 0
    for name in PLANTED:
        c = totals.get(name, Tally()).counts
        hits = c["refuted"] + c["refuted on the CPU too"]
        missed += not hits
        print(f"| {name} | {c.total()} | {hits} |")
    alarms = sum(t.counts["refuted"] + t.counts["refuted on the CPU too"] for t in sound.values())
    ran = sum(t.counts.total() for t in sound.values())
    print(f"\n{ran} sound programs, {alarms} false alarms; {missed} planted losses never found.")
    words = [line for name in SOUND for line in sound[name].words]
    for line in words[:5]:
        print(f"\n- {line}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu_native.txt").write_text("\n".join(words))
    sys.exit(1 if alarms or missed or not ran else 0)


if __name__ == "__main__":
    main()
