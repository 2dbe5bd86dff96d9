"""What lockstep and the checks cost as programs grow: per rank, from 2 to 1,024 ranks, and per node, up to 10,000.

    python benchmarks/scale.py [--markdown] [--plot FILE] [--programs N] [--ranks N]... [--layers N]...

Ranks: drawn transformer programs on a mesh of data × tensor parallelism run in lockstep, rank by rank and with the ranks of one
graph stacked, in turns. Only programs that can be stacked count; how many that are is said. Nodes: models of repeated layers, as
large as captured ones, go through sequence_parallel and all checks. CPU time of this process throughout; the most memory is what
the process has taken by the end of a row, so that it cannot fall. A plot needs matplotlib: pip install -e '.[benchmarks]'.
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

from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.domains import FLOAT64
from tcverify.execution.lockstep.lockstep import _execute
from tcverify.execution.lockstep.stacked import run_stacked
from tcverify.passes import SequenceParallel
from tcverify.program import Mesh, Program
from tcverify.strategies import transformer_programs
from tcverify.verification.verifier import verify
from tests.support.large_programs import tensor_parallel


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


def plot(ranks: Sequence[Sequence[str]], nodes: Sequence[Sequence[str]], file: Path) -> None:
    """Draw both tables, on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "tcverify", "svg.fonttype": "none", "font.family": "sans-serif"})

    def numbers(rows: Sequence[Sequence[str]], column: int) -> list[float]:
        return [float(row[column].replace(",", "")) for row in rows]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.plot(numbers(ranks, 0), numbers(ranks, 2), "o-", label="rank by rank")
    left.plot(numbers(ranks, 0), numbers(ranks, 3), "s-", label="ranks stacked")
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms of CPU time per program", title="lockstep")
    left.set_xticks(numbers(ranks, 0), [row[0] for row in ranks])
    left.minorticks_off()
    left.legend(frameon=False)
    sizes, seconds = numbers(nodes, 0), numbers(nodes, 1)
    right.plot(sizes, seconds, "o-", label="measured")
    right.plot(sizes, [seconds[0] * size / sizes[0] for size in sizes], ":", color="gray", label="linear in the nodes")
    right.set(xscale="log", yscale="log", xlabel="nodes", ylabel="s of CPU time", title="pass, lockstep and all checks")
    right.set_xticks(sizes, [row[0] for row in nodes])
    right.minorticks_off()
    right.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None}, transparent=False)


@click.command()
@click.option("--programs", type=click.IntRange(1), default=6, show_default=True, help="Drawn per number of ranks.")
@click.option("--ranks", type=click.IntRange(2), multiple=True, default=(2, 8, 16, 64, 256, 1024), show_default=True)
@click.option("--layers", type=click.IntRange(1), multiple=True, default=(8, 80, 800), show_default=True)
@click.option("--markdown", is_flag=True, help="As tables for docs/performance.md.")
@click.option("--plot", "file", type=click.Path(path_type=Path), help="Where to draw both, e.g. docs/scale.svg.")
def main(programs: int, ranks: tuple[int, ...], layers: tuple[int, ...], markdown: bool, file: Path | None) -> None:
    torch.set_num_threads(1)
    with_ranks = by_ranks(ranks, programs)
    show(RANKS, with_ranks, markdown=markdown)
    print()
    with_nodes = by_nodes(layers)
    show(NODES, with_nodes, markdown=markdown)
    if file is not None:
        plot(with_ranks, with_nodes, file)


if __name__ == "__main__":
    main()
