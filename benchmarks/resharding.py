"""What resharding lowers, and whether all of it verifies: `python benchmarks/resharding.py [--gloo] [--every N] [--largest N]`.

1. Rows: every transition between all pairs of the listed meshes, of one tensor, by dim 0, dim 1 or replicated, with and without a
   reduction, on 6 ranks in lockstep; with `--gloo` those that 4 ranks can run, on processes as well.
2. Pipelines: S = 1 … 8 chunks, 1 … 4 streams, every form of both directions, in lockstep and in adverse orders of the streams.
3. Growth: seconds to lower a chain of set, local op, set, … as it grows, up to --largest steps.

With --every, each N-th program of the first two.

Prints counts of verdicts; what is declined, by reason. A refuted program ends it with exit code 1.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
from rich.console import Console
from rich.table import Table

from tcverify import DeviceMesh, Layout, PlacedBuilder, ProcessGroupPool, Program, verify
from tcverify.errors import Unsupported
from tcverify.ops.reductions import ReduceOp
from tcverify.passes import BUILTIN
from tcverify.passes.resharding.decisions import InnerResharding, plan_resharding
from tcverify.passes.resharding.layouts import resharding_of
from tcverify.passes.resharding.pipelined.gather import GATHER_FORMS
from tcverify.passes.resharding.pipelined.scatter import SCATTER_FORMS
from tests.support.pipelined_programs import gathered, scattered

#: Of the design: those that every row is tried between, and those of its pipeline of stages.
MESHES = [(0,), (1,), (0, 1, 2, 3), (0, 2, 3), (1, 0, 2), (1, 0)]
STAGES = [(5,), (2, 4), (0, 1, 4), (1, 3), (2,), (4, 5)]
SIZES = (500, 1000, 2000, 4000)
REDUCTIONS: tuple[ReduceOp, ...] = ("sum", "max", "avg", "product", "min")


def rows() -> Iterator[tuple[str, Program]]:
    """Each program with one `set` or `reduce`, and the row of the table that it is."""
    meshes = [DeviceMesh.of(*ranks) for ranks in MESHES + STAGES]
    for source, target in itertools.product(meshes, meshes):
        size = max(*source.ranks, *target.ranks) + 1
        for had, gets in itertools.product((None, 0, 1), repeat=2):
            b = PlacedBuilder(size)
            x = b.input("x", (12, 12), Layout(source, (had,)))
            yield _named(b.build(b.set(x, Layout(target, (gets,)))))
        for dim, gets, how in itertools.product((0, 1), (None, 0), REDUCTIONS):
            b = PlacedBuilder(size)
            x = b.input("x", (source.size, 12) if dim == 0 else (12, source.size), Layout(source, (dim,)))
            yield _named(b.build(b.reduce(x, dim, Layout(target, (gets,)), how)))


def _named(program: Program) -> tuple[str, Program]:
    """The row: the op, and the kinds of communication on any rank."""
    kinds: set[str] = set()
    op = ""
    for rank in range(program.world_size):
        for node in program.graph(rank).nodes:
            made = resharding_of(node)
            if made is None:
                continue
            op = "set" if made.dim is None else "reduce"
            try:
                kinds |= {each.kind for each in plan_resharding(made, rank, node.meta["val"].dtype).communications}
            except InnerResharding:
                return f"{op}: inner, first brought to the front", program
            except Unsupported:
                return f"{op}: refused", program
    return f"{op}: {' + '.join(sorted(kinds)) or 'local'}", program


def check(
    console: Console, title: str, programs: Iterator[tuple[str, object, Program]], pools: dict[int, ProcessGroupPool]
) -> bool:
    """Verify and print. Returns whether nothing was refuted."""
    found: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    start = time.perf_counter()
    for row, subject, program in programs:
        verdict = verify(subject, program, confirm=pools.get(program.world_size))
        counts = found.setdefault(row, Counter())
        if verdict.pair.declined is not None:
            counts["declined"] += 1
            reasons[_reason(verdict.pair.declined)] += 1
        else:
            counts[verdict.status] += 1
        counts["on gloo"] += "gloo" in verdict.executors
        for finding in verdict.findings:
            console.print(f"  {row}: {finding.title}", markup=False)
    table = Table(title=title)
    columns = ("passed", "refuted", "inconclusive", "declined", "on gloo")
    table.add_column("row")
    for column in columns:
        table.add_column(column, justify="right")
    for row in sorted(found):
        table.add_row(row, *(str(found[row][column]) for column in columns))
    console.print(table)
    for reason, count in reasons.most_common():
        console.print(f"  declined {count}: {reason}", markup=False)
    console.print(f"  {time.perf_counter() - start:.0f} s")
    return not any(counts["refuted"] or counts["inconclusive"] for counts in found.values())


def _reason(text: str) -> str:
    """A refusal without its numbers and names."""
    for words in (
        "loses its shard and dim",
        "do not pair up",
        "reduce_scatter from mesh",
        "not sharded",
        "inner resharding",
    ):
        if words in text:
            return words
    return text[:100]


def pipelines() -> Iterator[tuple[str, object, Program]]:
    """Every form, number of chunks and of streams."""
    make = BUILTIN["resharding"]
    for chunks, streams in itertools.product(range(1, 9), range(1, 5)):
        for form in GATHER_FORMS:
            yield f"gather, {form}", make(form=form, number_of_streams=streams), gathered(3, (1, 0, 2), chunks)
        for reduce_form in SCATTER_FORMS:
            yield (
                f"scatter, {reduce_form}",
                make(reduce_form=reduce_form, number_of_streams=streams),
                scattered(3, (1, 0, 2), chunks),
            )


def growth(console: Console, largest: int) -> None:
    """Seconds to lower chains of growing length, all ranks."""
    table = Table(title="growth: chain of set and relu between two meshes of 2 ranks")
    for column in ("nodes before", "nodes after", "seconds", "µs per node after"):
        table.add_column(column, justify="right")
    for steps in (steps for steps in SIZES if steps <= largest):
        b = PlacedBuilder(4)
        x = b.input("x", (4, 4), "[0, 1] shard(0)")
        for step in range(steps):
            x = b.call("aten::relu", b.set(x, "[3, 2] shard(0)" if step % 2 == 0 else "[0, 1] shard(0)"))
        modules = b.build(x).graph_modules()
        before = sum(len(gm.graph.nodes) for gm in modules)
        lower = BUILTIN["resharding"]()
        start = time.perf_counter()
        after = sum(len(lower(gm).graph.nodes) for gm in modules)
        seconds = time.perf_counter() - start
        table.add_row(str(before), str(after), f"{seconds:.2f}", f"{1e6 * seconds / after:.0f}")
    console.print(table)


@click.command()
@click.option("--gloo", is_flag=True, help="Confirm programs of 2 to 4 ranks on processes.")
@click.option("--every", type=click.IntRange(1), default=1, show_default=True)
@click.option("--largest", type=click.IntRange(SIZES[0]), default=SIZES[-1], show_default=True)
def main(gloo: bool, every: int, largest: int) -> None:
    console = Console(width=110)
    pools = {size: ProcessGroupPool(size) for size in (2, 3, 4)} if gloo else {}
    try:
        lower = BUILTIN["resharding"]()
        sound = check(
            console,
            "every row between the meshes",
            ((row, lower, p) for row, p in islice(rows(), None, None, every)),
            pools,
        )
        sound = (
            check(
                console,
                "pipelines: S = 1 … 8, 1 … 4 streams, mesh [1, 0, 2]",
                islice(pipelines(), None, None, every),
                pools,
            )
            and sound
        )
    finally:
        for pool in pools.values():
            pool.close()
    growth(console, largest)
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
