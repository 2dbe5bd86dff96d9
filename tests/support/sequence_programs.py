"""Builds programs around norms behind an all_reduce, applies a pass to them and judges what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tcverify.passes import SequenceParallel
from tcverify.passes.base import Pass
from tcverify.program import (
    PARTIAL,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    MeshDim,
    Program,
    Recipe,
    compute_nodes,
    shard,
    spmd_program,
)
from tcverify.verification.verifier import verify

TP2 = Mesh.grid({"tp": 2})
TP3 = Mesh.grid({"tp": 3})
TP4 = Mesh.grid({"tp": 4})
GRID = Mesh.grid({"dp": 2, "tp": 2})
REVERSED = Mesh(2, (MeshDim("tp", ((1, 0),)),))
STRIDED = Mesh(4, (MeshDim("tp", ((0, 2), (3, 1))),))
UNEVEN = Mesh(3, (MeshDim("tp", ((0,), (2, 1))),))
ALL_MESHES = {
    "2": TP2, "3": TP3, "4": TP4, "grid": GRID, "reversed": REVERSED, "strided": STRIDED, "uneven": UNEVEN,
}  # fmt: skip
LAYOUTS = [(12, 8), (1, 12, 8), (3, 12, 8), (12, 12, 12), (2, 12, 2)]

Build = Callable[["Builder"], Any]


class Builder:
    """Short names for what these programs are made of."""

    def __init__(self, graph: GraphBuilder, inputs: Sequence[str]) -> None:
        self.graph = graph
        self.inputs = {name: graph.input(name) for name in inputs}

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        return self.graph.call(op if "::" in op else f"tensor_cast::{op}", *args, **kwargs)

    def all_reduce(self, value: Any, dim: str = "tp") -> Any:
        return self.call("all_reduce", value, self.graph.rank, self.graph.group(dim))

    def rms_norm(self, value: Any, weight: str = "w") -> Any:
        return self.call("rms_norm", value, self[weight], 1e-6)

    def add_rms_norm(self, value: Any, residual: Any, weight: str = "w") -> Any:
        return self.call("add_rms_norm", value, residual, self[weight], 1e-6)

    def add_rms_norm2(self, value: Any, residual: Any, weight: str = "w") -> Any:
        return self.call("add_rms_norm2", value, residual, self[weight], 1e-6)

    def fused(self, value: Any, residual: Any) -> tuple[Any, Any]:
        """The norm and the residual that add_rms_norm2 returns."""
        both = self.add_rms_norm2(value, residual)
        return self.graph.getitem(both, 0), self.graph.getitem(both, 1)

    def add(self, value: Any, other: Any) -> Any:
        return self.call("aten::add.Tensor", value, other)

    def end(self, value: Any) -> Any:
        return self.call("_internal_mark_region_end", value, 1)

    def copy(self, value: Any) -> Any:
        return self.call("_internal_copy_region", value, 1)

    def begin(self, value: Any) -> Any:
        return self.call("_internal_mark_region_begin", value, 1)

    def view(self, value: Any, *shape: int) -> Any:
        return self.call("aten::view", value, list(shape))


def program(build: Build, shape: tuple[int, ...] = (12, 8), mesh: Mesh = TP2) -> Program:
    """Inputs: x, y partial; r, q replicated; v varying, s a shard of the tokens; w a norm weight, u one that varies."""
    hidden = (shape[-1],)
    weight = Recipe("norm_weight")
    sizes = {len(group) for group in mesh.dim("tp").groups}
    whole = len(shape) < 2 or any(
        shape[-2] % size for size in sizes
    )  # ranks whose inputs differ in shape are not alike
    specs = [
        InputSpec("x", shape, placements=(("tp", PARTIAL),)),
        InputSpec("y", shape, placements=(("tp", PARTIAL),)),
        InputSpec("r", shape),
        InputSpec("q", shape),
        InputSpec("v", shape, placements=(("tp", VARYING),)),
        InputSpec("s", shape, placements=() if whole else (("tp", shard(len(shape) - 2)),)),
        InputSpec("w", hidden, recipe=weight),
        InputSpec("u", hidden, placements=(("tp", VARYING),), recipe=weight),
    ]
    names = [spec.name for spec in specs]
    return spmd_program(mesh, specs, lambda graph: build(Builder(graph, names)))


def apply(original: Program, pass_: Pass) -> tuple[Program, int]:
    """Return the rewritten program and how many rewrites all ranks counted."""
    graphs, fired = [], 0
    for rank in range(original.world_size):
        graphs.append(pass_(original.graph_module(rank)).graph)
        fired += sum(pass_.rewrites.values())
    return original.with_graphs(graphs), fired


def ops(program: Program, rank: int = 0) -> list[str]:
    """Names of the ops that a rank computes, without namespace and overload."""
    return [str(node.target).split(".")[1] for node in compute_nodes(program.graph(rank))]


def findings(original: Program, pass_: Pass) -> set[str]:
    """The kinds of finding in lockstep."""
    verdict = verify(pass_, original)
    assert verdict.status != "inconclusive", verdict.doubts
    return {finding.kind for finding in verdict.findings}


def check(build: Build, fires: int | dict[str, int], shape: tuple[int, ...] = (12, 8), mesh: Mesh = TP2) -> Program:
    """Assert that it fires so often on every rank with a group, keeps the meaning, and does nothing a second time.

    Args:
        fires: how often, by pattern; a number is that of P1.
    """
    original = program(build, shape, mesh)
    expected = dict.fromkeys(SequenceParallel.PATTERNS, 0) | ({"P1": fires} if isinstance(fires, int) else fires)
    pass_ = SequenceParallel()
    for rank in range(mesh.world_size):
        pass_(original.graph_module(rank))
        alone = len(mesh.dim("tp").group(rank)) == 1
        assert pass_.rewrites == (dict.fromkeys(expected, 0) if alone else expected)
    rewritten, _ = apply(original, SequenceParallel())
    assert findings(original, SequenceParallel()) == set()
    again, fired_again = apply(rewritten, SequenceParallel())
    assert fired_again == 0
    assert [ops(again, r) for r in range(mesh.world_size)] == [ops(rewritten, r) for r in range(mesh.world_size)]
    return rewritten
