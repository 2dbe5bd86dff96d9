"""What the exact domain costs next to float64, and how often it has to step aside.

    python benchmarks/exact.py [--programs N] [--world-size N]

Per op: one call in float64 and one on residues, the fastest of several. Per strategy, on the same programs, those that sequence
parallelism and streams change: the time of a whole verification in lockstep in both domains, and the share of programs where
the exact domain stepped aside. Compare numbers of one run only: machines differ.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import click
import torch

from tcverify import verify
from tcverify.application import Subject
from tcverify.application.guarded import subject_of
from tcverify.domains import Domain, Exact, Float64
from tcverify.domains.exact import field
from tcverify.passes import Multistream, SequenceParallel
from tcverify.program import Program
from tcverify.strategies import DECODERS, all_meshes

OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "matmul": lambda x: x @ x,
    "add": lambda x: x + x,
    "mul": lambda x: x * x,
    "div": lambda x: x / x,
    "mean": lambda x: x.mean(-1),
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: torch.rms_norm(x, (x.shape[-1],), None, 1e-6),
}


def seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """The fastest of several calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def in_domain(op: Callable[[torch.Tensor], Any], x: torch.Tensor, domain: Domain) -> float:
    with torch.no_grad(), domain.running():
        return seconds(lambda: op(x))


def changed_programs(strategy: str, count: int, world_size: int, subject: Subject) -> list[Program]:
    """Draw programs until the pass has changed this many, or twenty times as many have been drawn."""
    generator = random.Random(0)
    decoder, meshes = DECODERS[strategy], all_meshes(world_size)
    found: list[Program] = []
    for _ in range(20 * count):
        program = decoder.decode(generator.choice(meshes), generator.randbytes(decoder.width))
        if subject.start(program, deep=False)().changed:
            found.append(program)
        if len(found) == count:
            break
    return found


@click.command()
@click.option("--programs", default=40, show_default=True, help="Changed programs per strategy.")
@click.option("--world-size", default=2, show_default=True)
def main(programs: int, world_size: int) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    click.echo("op on [512, 512]        float64       exact   times")
    x = torch.randint(-field.H, field.H, (512, 512), generator=torch.Generator().manual_seed(0)).double()
    for name, op in OPS.items():
        plain, exact = in_domain(op, x / field.H, Float64()), in_domain(op, x, Exact(0))
        click.echo(f"{name:<20}{1e3 * plain:8.3f} ms {1e3 * exact:8.3f} ms {exact / plain:7.1f}")
    subject = subject_of([SequenceParallel(), Multistream()])
    click.echo("\nstrategy        programs   float64       exact   times   stepped aside")
    for strategy in DECODERS:
        sample = changed_programs(strategy, programs, world_size, subject)
        verdicts = {}
        took = {}
        for domain in ("float64", "exact"):
            start = time.perf_counter()
            verdicts[domain] = [verify(subject, program, domain=domain) for program in sample]
            took[domain] = 1e3 * (time.perf_counter() - start) / max(len(sample), 1)
        aside = sum(any(note.reason == "exact-aside" for note in v.notes) for v in verdicts["exact"])
        refuted = sum(v.status == "refuted" for vs in verdicts.values() for v in vs)
        click.echo(
            f"{strategy:<16}{len(sample):8}{took['float64']:8.1f} ms {took['exact']:8.1f} ms"
            f"{took['exact'] / took['float64']:7.2f}{aside:10} ({refuted} refuted)"
        )
    subject.close()


if __name__ == "__main__":
    main()
