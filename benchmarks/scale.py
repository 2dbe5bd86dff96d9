"""What lockstep and the checks cost as programs grow: per rank, from 2 to 1,024 ranks, and per node, up to 10,000.

    python benchmarks/scale.py [--markdown] [--programs N] [--ranks N]... [--layers N]...

Ranks: drawn transformer programs on a mesh of data × tensor parallelism run in lockstep, rank by rank and with the ranks of one
graph stacked, in turns. Only programs that can be stacked count; how many that are is said. Nodes: models of repeated layers, as
large as captured ones, go through sequence_parallel and all checks. CPU time of this process throughout; the most memory is what
the process has taken by the end of a row, so that it cannot fall.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from hypothesis import given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))  # the large programs are those of the tests

from tcverify.arithmetic import FLOAT64
from tcverify.campaign.drawing import SETTINGS
from tcverify.execution.lockstep import _execute
from tcverify.execution.stacked import run_stacked
from tcverify.passes import SequenceParallel
from tcverify.program import Mesh, Program
from tcverify.strategies import transformer_programs
from tcverify.verifier import verify
from tests.unit.large_programs import tensor_parallel


def mesh_of(ranks: int) -> Mesh:
    """At most 8 ranks of tensor parallelism, the rest of data parallelism."""
    tensor = min(8, ranks)
    return Mesh.grid({"dp": ranks // tensor, "tp": tensor} if ranks > tensor else {"tp": tensor})


def drawn(ranks: int, number: int) -> list[Program]:
    """Draw programs."""
    found: list[Program] = []

    @seed(1)
    @settings(SETTINGS, max_examples=number)
    @given(transformer_programs(mesh=mesh_of(ranks)))
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found


def spent(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of some work, and what it returns."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def memory() -> float:
    """The most memory that this process has taken so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def by_ranks(sizes: Sequence[int], number: int) -> list[list[str]]:
    """A row per number of ranks."""
    rows = []
    for ranks in sizes:
        alone = together = 0.0
        stacked = 0
        programs = drawn(ranks, number)
        for program in programs:
            run_stacked(program, FLOAT64)  # fills what is kept of shapes and plans
            seconds, run = spent(lambda: run_stacked(program, FLOAT64))  # noqa: B023 - called at once
            if run is None:
                continue
            stacked += 1
            together += seconds
            alone += spent(lambda: _execute(program, False, None))[0]  # noqa: B023
        if stacked:
            each = [1e3 * total / stacked for total in (alone, together)]
            costs = [*(f"{ms:.1f}" for ms in each), *(f"{ms / ranks:.2f}" for ms in each)]
            rows.append([f"{ranks:,}", f"{stacked} of {len(programs)}", *costs, f"{memory():.0f}"])
    return rows


def by_nodes(layers: Sequence[int]) -> list[list[str]]:
    """A row per number of layers."""
    rows = []
    verify(SequenceParallel(), tensor_parallel(1))  # what is loaded at the first use
    for number in layers:
        program = tensor_parallel(number)
        seconds, verdict = spent(lambda: verify(SequenceParallel(), program))  # noqa: B023 - called at once
        if verdict.status != "passed":
            raise SystemExit(f"the pass is {verdict.status} on {program.size} nodes: {verdict.findings}")
        rows.append([f"{program.size:,}", f"{seconds:.2f}", f"{1e6 * seconds / program.size:.0f}", f"{memory():.0f}"])
    return rows


RANKS = ("ranks", "programs stacked", "ms, rank by rank", "ms, stacked", "per rank", "per rank, stacked", "MiB")
NODES = ("nodes", "s", "µs per node", "MiB")


def show(heads: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> None:
    """Print a table."""
    if markdown:
        print("| " + " | ".join(heads) + " |\n|" + "--:|" * len(heads))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    for line in (heads, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


@click.command()
@click.option("--programs", type=click.IntRange(1), default=6, show_default=True, help="Drawn per number of ranks.")
@click.option("--ranks", type=click.IntRange(2), multiple=True, default=(2, 8, 16, 64, 256, 1024), show_default=True)
@click.option("--layers", type=click.IntRange(1), multiple=True, default=(8, 80, 800), show_default=True)
@click.option("--markdown", is_flag=True, help="As tables for docs/performance.md.")
def main(programs: int, ranks: tuple[int, ...], layers: tuple[int, ...], markdown: bool) -> None:
    torch.set_num_threads(1)
    show(RANKS, by_ranks(ranks, programs), markdown=markdown)
    print()
    show(NODES, by_nodes(layers), markdown=markdown)


if __name__ == "__main__":
    main()
