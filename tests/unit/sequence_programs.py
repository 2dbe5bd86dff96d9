"""Builds programs around norms behind an all_reduce, applies a pass to them and judges what comes out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx.node import map_aggregate

from tcverify.execution import Lockstep
from tcverify.ops import ShapeError, TensorSpec, infer
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
    RankConstant,
    Recipe,
    compute_nodes,
    shard,
    spmd_program,
)
from tcverify.program.graph import constant_value, map_structure

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

    def begin(self, value: Any) -> Any:
        return self.call("_internal_mark_region_begin", value, 1)

    def view(self, value: Any, *shape: int) -> Any:
        return self.call("aten::view", value, list(shape))


def program(build: Build, shape: tuple[int, ...] = (12, 8), mesh: Mesh = TP2) -> Program:
    """Inputs: x, y partial; r, q replicated; v varying, s a shard of the tokens; w a norm weight, u one that varies."""
    hidden = (shape[-1],)
    weight = Recipe("norm_weight")
    specs = [
        InputSpec("x", shape, placements=(("tp", PARTIAL),)),
        InputSpec("y", shape, placements=(("tp", PARTIAL),)),
        InputSpec("r", shape),
        InputSpec("q", shape),
        InputSpec("v", shape, placements=(("tp", VARYING),)),
        InputSpec("s", shape, placements=(("tp", shard(len(shape) - 2)),)),
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


def wrong_metadata(program: Program) -> list[str]:
    """The nodes whose recorded spec, or sharing of storage with operands, is not what the op implies."""
    wrong = []
    for rank, binding in enumerate(program.ranks):
        for node in program.graphs[binding.graph].nodes:
            if node.op != "call_function":
                continue

            def known(value: Any, constants: Any = binding.constants) -> Any:
                if isinstance(value, RankConstant):
                    return constant_value(value, constants)
                return value.meta["val"] if hasattr(value, "meta") else value

            fresh = itertools.count(1 << 30).__next__
            args, kwargs = map_aggregate(node.args, known), dict(map_aggregate(node.kwargs, known))
            try:
                expected = infer(node.target, args, kwargs, fresh)
            except ShapeError as error:
                wrong.append(f"{node.name} on rank {rank}: {error}")
                continue
            operands = {o.meta["val"].alias for o in node.all_input_nodes if isinstance(o.meta["val"], TensorSpec)}

            def shown(spec: TensorSpec, operands: set[Any] = operands) -> Any:
                return spec.layout, spec.offset, spec.alias if spec.alias in operands else None

            if map_structure(shown, node.meta["val"]) != map_structure(shown, expected):
                wrong.append(f"{node.name} on rank {rank}: {node.meta['val']} instead of {expected}")
    return wrong


def findings(original: Program, pass_: Pass) -> set[str]:
    """The kinds of finding that lockstep and the metadata show."""
    try:
        rewritten, _ = apply(original, pass_)
    except ShapeError:
        return {"pass-raised"}
    kinds = {"stale-metadata"} if wrong_metadata(rewritten) else set()
    comparison = Lockstep().compare(original, rewritten)
    assert comparison.original.finished
    if comparison.rewritten.hang is not None:
        kinds.add("deadlock")
    if comparison.rewritten.mismatch is not None:
        kinds.add("collective-mismatch")
    if comparison.rewritten.error is not None:
        kinds.add("rewritten-raises")
    if any(d.alias for d in comparison.deltas):
        kinds.add("wrong-alias")
    if any(
        (d.problem and not d.alias) or d.overflow or d.difference > 1e-12 * max(d.scale, 1) for d in comparison.deltas
    ):
        kinds.add("wrong-value")
    return kinds


def check(build: Build, fires: int, shape: tuple[int, ...] = (12, 8), mesh: Mesh = TP2) -> Program:
    """Assert that P1 fires so often on every rank with a group, keeps the meaning, and does nothing a second time."""
    original = program(build, shape, mesh)
    members = sum(len(mesh.dim("tp").group(rank)) > 1 for rank in range(mesh.world_size))
    rewritten, fired = apply(original, SequenceParallel())
    assert fired == fires * members
    assert findings(original, SequenceParallel()) == set()
    again, fired_again = apply(rewritten, SequenceParallel())
    assert fired_again == 0
    assert [ops(again, r) for r in range(mesh.world_size)] == [ops(rewritten, r) for r in range(mesh.world_size)]
    return rewritten
