"""How soon planted defects are found, against a campaign that draws unstructured random graphs.

    python benchmarks/first_finding.py [--programs N] [--seeds N] [--markdown] [MUTANT]...

For mutants of the built-in passes (tests/mutants; default: some of each kind), counts programs and CPU time, of drawing and of
verifying, until the first finding of a kind that the mutant is known by: once on the programs that the tests draw for it, once
on random graphs: an op drawn uniformly, on operands drawn uniformly from what fits, without any structure of a model. All else
is the same: passes, checks, limits, lockstep. A side that finds nothing in --programs programs is given as "> N".
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

import click
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tcverify import verify
from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.errors import UnsupportedOp
from tcverify.ops import ShapeError
from tcverify.program import PARTIAL, InputSpec, Mesh, Program, spmd_program
from tcverify.program.builder import GraphBuilder
from tests.mutants.catalogue import EXPECTED, MUTANTS, hunting_grounds, world_sizes

#: Some mutants of every pass and of every way to be found.
CHOSEN = (
    "ResidualNotSliced", "RankNumberPicksShard", "FirstChunkForAll", "StaleMetadata", "AllReduceErasedOnFirstRank",
    "GatherSkippedOnFirstRank", "RowsLeftByExpert", "CapacityOfLocalTokens", "AverageTakenForSum", "GatherNotWaitedFor",
    "TokenSharedByCollectives", "CollectivesUnordered", "WaitNamesMainStream", "WriteDuringReadAllowed", "EffectsAreCompute",
    "OperandsFreedAtStart", "FreesAtTheStart", "CloneDropped", "CopiedInReverse", "TeamSorted",
)  # fmt: skip

#: Ops of random graphs: name, number of operands, what follows them. `DIM`, `RANK`, `GROUP`, `NAME` and `SIZE` are filled in.
DIM, RANK, GROUP, NAME, SIZE = "<dim>", "<rank>", "<group>", "<name>", "<size>"
OPS: tuple[tuple[str, int, tuple[Any, ...]], ...] = (
    ("aten::add.Tensor", 2, ()), ("aten::mul.Tensor", 2, ()), ("aten::sub.Tensor", 2, ()), ("aten::relu", 1, ()),
    ("aten::neg", 1, ()), ("aten::tanh", 1, ()), ("aten::clone", 1, ()), ("aten::mm", 2, ()), ("aten::matmul", 2, ()),
    ("aten::transpose.int", 1, (0, 1)), ("aten::add_.Tensor", 2, ()), ("aten::unsqueeze", 1, (0,)),
    ("aten::squeeze.dim", 1, (0,)), ("aten::softmax.int", 1, (-1,)),
    ("tensor_cast::rms_norm", 2, (1e-6,)), ("tensor_cast::add_rms_norm", 3, (1e-6,)),
    ("tensor_cast::add_rms_norm2", 3, (1e-6,)), ("tensor_cast::silu", 1, ()), ("tensor_cast::swiglu", 2, ()),
    ("tensor_cast::_internal_mark_region_begin", 1, ("r",)), ("tensor_cast::_internal_mark_region_end", 1, ("r",)),
    ("tensor_cast::all_reduce", 1, (RANK, GROUP)), ("tensor_cast::all_gather", 1, (DIM, RANK, GROUP)),
    ("tensor_cast::reduce_scatter", 1, (DIM, RANK, GROUP)), ("tensor_cast::matmul_all_reduce", 2, (None, RANK, GROUP)),
    ("_c10d_functional::all_reduce", 1, ("sum", NAME)), ("_c10d_functional::all_reduce_", 1, ("sum", NAME)),
    ("_c10d_functional::all_gather_into_tensor", 1, (SIZE, NAME)),
    ("_c10d_functional::reduce_scatter_tensor", 1, ("sum", SIZE, NAME)), ("_c10d_functional::wait_tensor", 1, ()),
)  # fmt: skip

#: Nodes of a random graph, and shapes of its inputs: few, so that operands fit each other.
NODES = 24
SHAPES = ((4, 8), (4, 8), (4, 8), (8, 8), (8,), (8,))


def random_graphs(world_size: int) -> st.SearchStrategy[Program]:
    """Well-typed graphs without structure: calls that do not fit are left out."""
    mesh = Mesh.grid({"tp": world_size})
    width = 5

    def decode(choices: bytes) -> Program:
        partial = [choices[i] % 2 for i in range(len(SHAPES))]
        records = [choices[i : i + width] for i in range(len(SHAPES), len(choices), width)]
        inputs = [
            InputSpec(f"x{i}", shape, placements=(("tp", PARTIAL),) if varies and len(shape) == 2 else ())
            for i, (shape, varies) in enumerate(zip(SHAPES, partial, strict=True))
        ]

        def build(b: GraphBuilder) -> Any:
            values = [b.input(spec.name) for spec in inputs]
            started: set[Any] = set()  # what waits for its collective
            for op_byte, *operands, dim in records:
                op, arity, rest = OPS[op_byte % len(OPS)]
                waits = op.endswith("wait_tensor")
                fitting = [value for value in values if (value in started) is waits]
                if not fitting:
                    continue
                chosen = [fitting[byte % len(fitting)] for byte in operands[:arity]]
                known = {DIM: dim % 2, RANK: b.rank, GROUP: b.group("tp"), NAME: "tp", SIZE: world_size}
                try:
                    made = b.call(op, *chosen, *[known.get(v, v) if isinstance(v, str) else v for v in rest])
                except (ShapeError, UnsupportedOp):
                    continue
                results = made.meta["val"]
                if isinstance(results, (tuple, list)):
                    values += [b.getitem(made, i) for i in range(len(results))]
                else:
                    values.append(made)
                if waits:
                    started.discard(chosen[0])
                    values.remove(chosen[0])
                elif op.startswith("_c10d"):
                    started.add(made)
            for value in [value for value in values if value in started]:  # nothing is left in flight
                values[values.index(value)] = b.call("_c10d_functional::wait_tensor", value)
            return [value for value in values if not value.users and value.op != "placeholder"] or values[:1]

        return spmd_program(mesh, inputs, build, seed=choices[0])

    size = len(SHAPES) + NODES * width
    return st.binary(min_size=size, max_size=size).map(decode)


@dataclass(frozen=True)
class Hunt:
    """What it took: programs and seconds of CPU time; not found where `found` is False."""

    found: bool
    programs: int
    seconds: float
    changed: int


def hunt(name: str, drawn: st.SearchStrategy[Program], limit: int, number: int) -> Hunt:
    """Draw and verify programs until one shows the defect, as a campaign in lockstep does."""
    subject = InProcess(prepare_pass(MUTANTS[name], "", {}))
    count = changed = 0
    found = False

    class Found(BaseException):
        pass

    @seed(number)
    @settings(SETTINGS, max_examples=limit)
    @given(drawn)
    def judge(program: Program) -> None:
        nonlocal count, changed, found
        count += 1
        verdict = verify(subject, program)
        changed += verdict.changed
        if any(finding.kind in EXPECTED[name] for finding in verdict.findings):
            found = True
            raise Found

    start = time.process_time()
    with contextlib.suppress(Found):
        judge()
    return Hunt(found, count, time.process_time() - start, changed)


def told(hunts: list[Hunt], limit: int) -> tuple[str, str]:
    """Medians of programs and seconds over seeds; those without a finding stand at the end."""
    ranked = sorted(hunts, key=lambda one: (not one.found, one.programs))
    middle = ranked[(len(ranked) - 1) // 2]
    seconds = statistics.median(one.seconds for one in hunts)
    return (f"{middle.programs}" if middle.found else f"> {limit}"), (
        f"{seconds:.1f}" if middle.found else f"> {seconds:.1f}"
    )


@click.command()
@click.argument("mutants", nargs=-1)
@click.option(
    "--programs", type=click.IntRange(1), default=200, show_default=True, help="After which a hunt is given up."
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--markdown", is_flag=True, help="Print a table for docs/performance.md.")
def main(mutants: tuple[str, ...], programs: int, seeds: int, markdown: bool) -> None:
    torch.set_num_threads(1)
    torch_version = torch.__version__.split("+")[0]
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch_version}; median of {seeds} seeds\n"
    )
    if markdown:
        print("| mutant | programs | CPU s | random graphs: programs | CPU s | of them changed by the pass |")
        print("|---|--:|--:|--:|--:|--:|", flush=True)
    for name in mutants or CHOSEN:
        size = world_sizes(name)[0]
        ours = [hunt(name, hunting_grounds(name)[0](world_size=size), programs, n) for n in range(seeds)]
        random = [hunt(name, random_graphs(size), programs, n) for n in range(seeds)]
        changed = sum(one.changed for one in random) / sum(one.programs for one in random)
        row = (name, *told(ours, programs), *told(random, programs), f"{changed:.0%}")
        print("| " + " | ".join(row) + " |" if markdown else "  ".join(f"{cell:>12}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
