"""Programs with something to pipeline, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from tcverify.execution import Lockstep, explore
from tcverify.ops import lookup
from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.program import Placed, PlacedBuilder, Program
from tcverify.verification.verifier import verify

#: World size and mesh: whole and part of the world, in order and not.
MESHES = ((1, (0,)), (2, (0, 1)), (3, (1, 0, 2)), (4, (3, 1)), (4, (2, 0, 3, 1)))


def gathered(
    world: int,
    mesh: Sequence[int],
    chunks: int,
    op: str = "matmul",
    *,
    rows: int = 2,
    inner: int = 3,
    columns: int = 4,
    before: Callable[[PlacedBuilder, Placed], Placed] = lambda b, x: x,
    seed: int = 0,
) -> Program:
    """relu((all_gather(A) @ B)), with A [S, D, rows, inner] sharded on dim 1.

    Args:
        op: "matmul", "linear" without bias, or "bias" with one.
        before: what becomes of A before it is gathered.
    """
    b, text = PlacedBuilder(world), str(list(mesh))
    a = b.input("a", (chunks, len(mesh), rows, inner), f"{text} shard(1)")
    weight = b.input("w", (inner, columns) if op == "matmul" else (columns, inner), f"{text} replicated")
    more = [b.input("bias", (columns,), f"{text} replicated")] if op == "bias" else []
    whole = b.set(before(b, a), f"{text} replicated")
    called = "aten::matmul" if op == "matmul" else "aten::linear"
    return b.build(b.call("aten::relu", b.call(called, whole, weight, *more, stream_axis=0)), seed=seed)


def scattered(
    world: int,
    mesh: Sequence[int],
    chunks: int | None,
    dim: int = 1,
    op: str = "matmul",
    *,
    rows: int = 2,
    inner: int = 3,
    columns: int = 4,
    axis_on: str = "reduce",
) -> Program:
    """relu(reduce_scatter(A @ B)), the partial products [S, D, D·rows, D·columns] summed over dim 1.

    Args:
        chunks: S; None for partial products without a dim for chunks, in which dim 0 of the sum is divided.
        dim: of the sum, the dim that is divided.
        op: "matmul" with a matrix per rank, or "linear" with one weight and bias for all.
        axis_on: which of "matmul" and "reduce" carries the stream axis.
    """
    b, text, ranks = PlacedBuilder(world), str(list(mesh)), len(mesh)
    lead = () if chunks is None else (chunks,)
    summed = len(lead)
    a = b.input("a", (*lead, ranks, ranks * rows, inner), f"{text} shard({summed})")
    if op == "matmul":
        operands = [b.input("w", (ranks, inner, ranks * columns), f"{text} shard(0)")]
    else:
        operands = [b.input("w", (ranks * columns, inner), f"{text} replicated")]
        operands += [b.input("bias", (ranks * columns,), f"{text} replicated")]
    on_matmul = {"stream_axis": 0 if chunks is not None else 1} if axis_on == "matmul" else {}
    partial = b.call(f"aten::{op}", a, *operands, **on_matmul)
    on_reduce = {"stream_axis": 0} if axis_on == "reduce" else {}
    return b.build(b.call("aten::relu", b.reduce(partial, summed, f"{text} shard({dim})", **on_reduce)))


def pipelined(program: Program, expected: int = 1, **options: object) -> Program:
    """The program as the pass leaves it on all ranks, which it rewrites `expected` times each where there is an input."""
    modules = program.graph_modules()
    for gm in modules:
        done = PipelinedMatmul(**options)
        done(gm)
        has_inputs = any(node.op == "placeholder" for node in gm.graph.nodes)
        assert sum(done.rewrites.values()) == (expected if has_inputs else 0)
    return program.with_graphs([gm.graph for gm in modules])


def calls(graph: fx.Graph) -> list[str]:
    """Names of the ops that a graph calls, in order."""
    return [lookup(node.target).name for node in graph.nodes if node.op == "call_function"]


def holds(program: Program, *, domain: str = "float64", deep: bool = False, **options: object) -> None:
    """The pass rewrites the program, and the verifier refutes nothing."""
    verdict = verify(PipelinedMatmul(**options), program, domain=domain, deep=deep)
    assert verdict.changed
    assert (verdict.status, [str(found.title) for found in verdict.findings]) == ("passed", [])


def outputs(program: Program) -> list[list[torch.Tensor]]:
    """What lockstep computes, by rank."""
    run = Lockstep().run(program)
    assert run.finished, run.error
    return [[x for x in result.outputs if isinstance(x, torch.Tensor)] for result in run.ranks]


def sound_in_all_orders(program: Program) -> None:
    """No order in which streams may run changes anything."""
    found = explore(program, inputs="stream0", systematic=True)
    assert found is not None
    assert not found.observations
