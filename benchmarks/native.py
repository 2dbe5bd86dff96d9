"""The native domain's limits: false alarms on sound rewrites, planted losses of precision found and missed.

    python benchmarks/native.py [--programs N] [--minutes M] [--shares] [REWRITE]...

Sound rewrites of tests/mutants/rounding.py are applied to drawn programs (mixed, wild and overlap) and to row-parallel products
of up to 1,024 terms in bf16, fp16 and float32, and judged in lockstep in the native domain. A row per rewrite: programs, those
that it changed, those in which rounding changed as well, false alarms, inconclusive ones, and, with --shares, how much of the
limits is used by the outputs that round otherwise. Planted defects then run on the programs that show them.
"""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify import Verdict, verify
from tcverify.checks.values.native import errors_of
from tcverify.execution import rounding_noise
from tcverify.program import Mesh, Program
from tcverify.strategies import DECODERS, WORLD_SIZES, all_meshes
from tests.mutants.rounding import PLANTED, SHOWING, SOUND, long_program

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(seed: int) -> Program:
    """The program of a number."""
    generator = random.Random(seed)
    if seed % 5 == 4:
        mesh = Mesh.grid({"tp": generator.choice((2, 4))})
        inner, hidden = generator.choice((16, 64, 256, 1024)), generator.choice((4, 16, 64, 256))
        return long_program(generator.choice(DTYPES), inner, hidden, seed, mesh)
    decoder = DECODERS[("mixed", "mixed", "wild", "overlap")[seed % 5]]
    mesh = generator.choice(all_meshes(generator.choice(WORLD_SIZES)))
    return decoder.decode(mesh, generator.randbytes(decoder.width))


def shares(verdict: Verdict, program: Program) -> Iterator[float]:
    """How much of its limit each output uses that is not computed as before."""
    for comparison in verdict.runs:
        if comparison.domain != "native" or comparison.reference is None:
            continue
        noise = None
        for label in dict.fromkeys(delta.label for delta in comparison.deltas):
            deltas = [delta for delta in comparison.deltas if delta.label == label]
            if any(d.problem or d.overflow for d in deltas) or all(d.equal for d in deltas):
                continue
            noise = rounding_noise(program, comparison.reference) if noise is None else noise
            if label in noise:
                yield errors_of(deltas, noise[label]).share


@click.command()
@click.argument("rewrites", nargs=-1)
@click.option("--programs", type=click.IntRange(1), default=100, show_default=True, help="Per sound rewrite.")
@click.option("--minutes", type=float, default=60.0, show_default=True, help="Bound for the sound rewrites together.")
@click.option("--first", type=int, default=0, show_default=True, help="Number of the first program.")
@click.option("--shares", "with_shares", is_flag=True, help="Measure how much of the limits is used.")
def main(rewrites: tuple[str, ...], programs: int, minutes: float, first: int, with_shares: bool) -> None:
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    used: dict[str, list[float]] = defaultdict(list)
    stop = time.monotonic() + 60 * minutes
    for seed in range(first, first + programs):
        if time.monotonic() > stop:
            break
        program = drawn(seed)
        for name in rewrites or SOUND:
            verdict = verify(SOUND[name], program, domain="native", checks=["equivalence"])
            count = counts[name]
            count["programs"] += 1
            count["changed"] += verdict.changed
            native = [delta for run in verdict.runs if run.domain == "native" for delta in run.deltas]
            count["rounded"] += verdict.changed and not all(delta.equal for delta in native)
            count["refuted"] += verdict.status == "refuted"
            count["inconclusive"] += verdict.status == "inconclusive"
            if verdict.status != "passed":
                what = verdict.findings or verdict.doubts
                print(f"  {name}, program {seed}: {what[0]}", flush=True)
            if with_shares and verdict.changed:
                used[name] += shares(verdict, program)
    for name, count in counts.items():
        line = ", ".join(f"{count[key]} {key}" for key in ("programs", "changed", "rounded", "refuted", "inconclusive"))
        found = sorted(used[name])
        if found:
            line += "; of the limits: " + ", ".join(
                f"{q} {found[min(len(found) - 1, int(float(q) * len(found)))]:.2f}" for q in ("0.5", "0.99", "0.999")
            )
            line += f", most {found[-1]:.2f} of {len(found)}"
        print(f"{name}: {line}")
    total = sum(count["programs"] for count in counts.values())
    alarms = sum(count["refuted"] for count in counts.values())
    print(f"false alarms: {alarms} / {total} programs")
    for name, rewrite in PLANTED.items():
        verdicts = [
            verify(rewrite, long_program(*SHOWING[name], seed), domain="native", checks=["equivalence"])
            for seed in range(10)
        ]
        print(f"planted: {name}: found in {sum(v.status == 'refuted' for v in verdicts)} of {len(verdicts)}")


if __name__ == "__main__":
    main()
