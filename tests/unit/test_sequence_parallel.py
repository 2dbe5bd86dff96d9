"""P1 on hand-built programs: it fires where it may, leaves alone what it must, and every planted defect shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
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
from tests.mutants.sequence_parallel import EXPECTED, MUTANTS

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


# ------------------------------------------------------------------------------------------------------ where it fires


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_norms_with_and_without_residual(mesh: Mesh, shape: tuple[int, ...]) -> None:
    def build(b: Builder) -> Any:
        first = b.rms_norm(b.all_reduce(b["x"]))
        return first, b.add_rms_norm(b.all_reduce(b["y"]), b["r"])

    check(build, 2, shape, mesh)


def test_the_rewrite_is_reduce_scatter_norm_all_gather() -> None:
    rewritten = check(lambda b: b.rms_norm(b.all_reduce(b["x"])), 1)
    assert ops(rewritten) == ["reduce_scatter", "rms_norm", "all_gather"]


def test_inserted_collectives_take_rank_and_group_from_the_all_reduce() -> None:
    rewritten = check(lambda b: b.rms_norm(b.all_reduce(b["x"])), 1, mesh=STRIDED)
    for rank, group in ((0, [0, 2]), (1, [3, 1]), (2, [0, 2]), (3, [3, 1])):
        nodes = compute_nodes(rewritten.graph(rank))
        assert [list(nodes[i].args[-1]) for i in (0, 2)] == [group, group]
        assert [nodes[i].args[-2] for i in (0, 2)] == [rank, rank]


def test_a_replicated_residual_is_sliced_at_the_position_in_the_group() -> None:
    rewritten = check(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"]), 1, mesh=REVERSED)
    starts = [n.args[2] for rank in (0, 1) for n in compute_nodes(rewritten.graph(rank)) if n.name == "residual_shard"]
    assert starts == [6, 0]


def test_a_residual_that_was_gathered_is_taken_from_its_shard() -> None:
    def build(b: Builder) -> Any:
        gathered = b.call("all_gather", b["s"], -2, b.graph.rank, b.graph.group("tp"))
        return b.add_rms_norm(b.all_reduce(b["x"]), gathered)

    rewritten = check(build, 1, (3, 12, 8), REVERSED)
    assert ops(rewritten) == ["reduce_scatter", "add_rms_norm", "all_gather"]


def test_a_gathered_residual_that_others_read_stays_for_them() -> None:
    def build(b: Builder) -> Any:
        gathered = b.call("all_gather", b["s"], 0, b.graph.rank, b.graph.group("tp"))
        return b.add_rms_norm(b.all_reduce(b["x"]), gathered), gathered

    assert ops(check(build, 1)).count("all_gather") == 2


def test_a_residual_gathered_on_another_dim_is_sliced() -> None:
    def build(b: Builder) -> Any:
        half = b.call("aten::slice.Tensor", b["r"], 1, 0, 4)
        gathered = b.call("all_gather", half, 1, b.graph.rank, b.graph.group("tp"))
        return b.add_rms_norm(b.all_reduce(b["x"]), gathered)

    assert "slice" in ops(check(build, 1))


def test_a_norm_feeds_the_next_residual_from_its_shard() -> None:
    def build(b: Builder) -> Any:
        first = b.rms_norm(b.all_reduce(b["x"]))
        return b.add_rms_norm(b.all_reduce(b["y"]), first)

    rewritten = check(build, 2)
    assert ops(rewritten).count("all_gather") == 1
    assert "slice" not in ops(rewritten)


@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_the_all_reduce_may_be_the_second_addend(mesh: Mesh) -> None:
    check(lambda b: b.add_rms_norm(b["r"], b.all_reduce(b["x"])), 1, (3, 12, 8), mesh)


def test_both_addends_may_be_the_same_all_reduce() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return b.add_rms_norm(reduced, reduced)

    assert ops(check(build, 1)) == ["reduce_scatter", "add_rms_norm", "all_gather"]


def test_both_addends_may_be_all_reduces() -> None:
    check(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b.all_reduce(b["y"])), 1)


@pytest.mark.parametrize("up", ["aten::view", "aten::reshape", "aten::unsqueeze"])
@pytest.mark.parametrize("mesh", [TP2, TP3, STRIDED], ids=str)
def test_a_view_that_adds_a_batch_of_one(mesh: Mesh, up: str) -> None:
    def build(b: Builder) -> Any:
        reduced = b.call(up, b.all_reduce(b["x"]), 0 if "unsqueeze" in up else [1, 12, 8])
        return b.add_rms_norm(reduced, b["r"])

    check(build, 1, (12, 8), mesh)


@pytest.mark.parametrize("down", ["aten::view", "aten::reshape", "aten::squeeze.dim"])
def test_a_view_that_drops_a_batch_of_one(down: str) -> None:
    def build(b: Builder) -> Any:
        reduced = b.call(down, b.all_reduce(b["x"]), 0 if "squeeze" in down else [12, 8])
        return b.add_rms_norm(reduced, b["r"])

    check(build, 1, (1, 12, 8))


def test_a_squeeze_that_does_nothing_does_not_drop_a_shard_of_one_token() -> None:
    check(lambda b: b.rms_norm(b.call("aten::squeeze.dim", b.all_reduce(b["x"]), 1)), 1, (3, 2, 8))


def test_views_of_the_result_keep_their_storage() -> None:
    def build(b: Builder) -> Any:
        norm = b.rms_norm(b.all_reduce(b["x"]))
        return norm, b.view(norm, 3, 4, 8)

    check(build, 1)


def test_a_marker_moves_to_the_shard() -> None:
    rewritten = check(lambda b: b.rms_norm(b.view(b.begin(b.all_reduce(b["x"])), 1, 12, 8)), 1)
    assert ops(rewritten) == ["reduce_scatter", "_internal_mark_region_begin", "view", "rms_norm", "all_gather"]


def test_a_marker_moves_once_with_all_its_norms() -> None:
    def build(b: Builder) -> Any:
        marked = b.begin(b.all_reduce(b["x"]))
        return b.rms_norm(marked), b.add_rms_norm(b.view(marked, 1, 12, 8), b["r"])

    rewritten = check(build, 2)
    assert ops(rewritten).count("_internal_mark_region_begin") == 1
    assert ops(rewritten).count("reduce_scatter") == 1


def test_an_all_reduce_behind_a_marker_keeps_the_marker_in_full() -> None:
    """The second all_reduce moves to the shard, but it reads its own operand on all tokens."""

    def build(b: Builder) -> Any:
        marked = b.view(b.begin(b.all_reduce(b["x"])), 1, 12, 8)
        return b.rms_norm(marked), b.rms_norm(b.all_reduce(marked))

    rewritten = check(build, 1)
    assert ops(rewritten).count("all_reduce") == 1


def test_a_view_that_others_read_stays_for_them() -> None:
    def build(b: Builder) -> Any:
        viewed = b.view(b.all_reduce(b["x"]), 1, 12, 8)
        return b.rms_norm(b.begin(viewed)), b.call("aten::relu", viewed)

    assert ops(check(build, 1)).count("view") == 2


def test_several_norms_share_one_reduce_scatter() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return b.rms_norm(reduced), b.rms_norm(b.view(reduced, 1, 12, 8)), b.add_rms_norm(reduced, b["r"])

    rewritten = check(build, 3)
    assert ops(rewritten).count("reduce_scatter") == 1
    assert "all_reduce" not in ops(rewritten)


def test_other_readers_keep_the_all_reduce() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return b.rms_norm(reduced), reduced, b.call("aten::add.Tensor", reduced, b["r"])

    rewritten = check(build, 1)
    assert ops(rewritten).count("all_reduce") == 1


def test_groups_of_two_mesh_dims_are_not_mixed() -> None:
    def build(b: Builder) -> Any:
        return b.rms_norm(b.all_reduce(b["x"], "tp")), b.rms_norm(b.all_reduce(b["x"], "dp"))

    rewritten, fired = apply(program(build, mesh=GRID), SequenceParallel())
    assert fired == 8
    groups = [list(n.args[-1]) for n in compute_nodes(rewritten.graph(1)) if n.name.startswith("reduce_scatter")]
    assert groups == [[0, 1], [1, 3]]
    assert findings(program(build, mesh=GRID), SequenceParallel()) == set()


def test_a_stack_of_layers() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b["x"], b["r"]
        for _ in range(3):
            reduced = b.all_reduce(hidden)
            total = b.call("aten::add.Tensor", reduced, residual)
            norm = b.add_rms_norm(reduced, residual)
            hidden, residual = b.call("aten::mul.Tensor", norm, b["v"]), total
        return hidden, residual

    check(build, 3, (3, 12, 8), STRIDED)


def test_a_long_chain_of_norms_is_rewritten_without_recursion() -> None:
    def build(b: Builder) -> Any:
        value = b["x"]
        for _ in range(600):
            value = b.rms_norm(b.all_reduce(value))
        for _ in range(3000):
            value = b.call("aten::relu", value)
        return value

    _, fired = apply(program(build), SequenceParallel())
    assert fired == 1200


def test_a_long_chain_of_views_is_rewritten_without_recursion() -> None:
    def build(b: Builder) -> Any:
        value = b.all_reduce(b["x"])
        for i in range(4000):
            value = b.view(value, *((1, 12, 8) if i % 2 == 0 else (12, 8)))
        return b.rms_norm(value)

    rewritten, fired = apply(program(build), SequenceParallel())
    assert fired == 2
    assert "all_reduce" not in ops(rewritten)


def test_fake_tensors_keep_their_mode_and_device() -> None:
    gm = program(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"])).graph_module(1)
    modes = {node.meta["val"].fake_mode for node in gm.graph.nodes if "val" in node.meta}
    SequenceParallel()(gm)
    after = [node.meta["val"] for node in gm.graph.nodes if node.op != "output"]
    assert {val.fake_mode for val in after} == modes
    assert {val.device for val in after} == {torch.device("cpu")}


def test_the_rewritten_module_computes_without_a_process_group_of_more_than_one() -> None:
    mesh = Mesh(1, (MeshDim("tp", ((0,),)),))
    gm = program(lambda b: b.rms_norm(b.all_reduce(b["x"])), mesh=mesh).graph_module(0)
    before = gm.code
    assert SequenceParallel()(gm).code == before


# ---------------------------------------------------------------------------------------------- what it leaves alone


def in_place(b: Builder) -> Any:
    reduced = b.all_reduce(b["x"])
    viewed = b.view(reduced, 1, 12, 8)
    b.inputs["touched"] = touched = b.call("aten::add_.Tensor", viewed, b["r"])
    return b.rms_norm(reduced), touched


def marker_with_other_reader(b: Builder) -> Any:
    marked = b.begin(b.all_reduce(b["x"]))
    return b.rms_norm(marked), b.call("aten::relu", marked)


def marker_behind_a_shared_marker(b: Builder) -> Any:
    outer = b.begin(b.all_reduce(b["x"]))
    return b.rms_norm(b.begin(outer)), b.call("aten::relu", outer)


def marker_read_as_both_addends(b: Builder) -> Any:
    marked = b.begin(b.all_reduce(b["x"]))
    return b.add_rms_norm(b.view(marked, 1, 12, 8), marked)


def residual_of_mutated_input(b: Builder) -> Any:
    touched = b.call("aten::mul_.Tensor", b["r"], b["v"])
    return b.add_rms_norm(b.all_reduce(b["x"]), b["r"]), touched


def split_by_rank(b: Builder) -> Any:
    start = b.graph.constant("start", lambda rank: rank)
    stop = b.graph.constant("stop", lambda rank: 12 + rank)
    doubled = b.call("aten::cat", [b["r"], b["q"]], 0)
    return b.add_rms_norm(b.all_reduce(b["x"]), b.call("aten::slice.Tensor", doubled, 0, start, stop))


def scaled_by_rank(b: Builder) -> Any:
    factor = b.graph.constant("factor", lambda rank: rank + 2)
    return b.add_rms_norm(b.all_reduce(b["x"]), b.call("aten::mul.Scalar", b["r"], factor))


def reduced_over_another_group(b: Builder) -> Any:
    return b.add_rms_norm(b.all_reduce(b["x"], "tp"), b.all_reduce(b["v"], "dp"))


LEFT_ALONE: dict[str, tuple[Build, tuple[int, ...], Mesh]] = {
    "group of one": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (12, 8), Mesh(2, (MeshDim("tp", ((0,), (1,))),))),
    "tokens not divisible": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (5, 8), TP2),
    "fewer tokens than ranks": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (2, 8), TP4),
    "batch divisible, tokens not": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (2, 5, 8), TP2),
    "no tokens": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (0, 8), TP2),
    "four dims": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (2, 2, 2, 8), TP2),
    "one dim": (lambda b: b.rms_norm(b.all_reduce(b["w"])), (12, 8), TP2),
    "a view that merges batch and tokens": (
        lambda b: b.rms_norm(b.view(b.all_reduce(b["x"]), 24, 8)), (2, 12, 8), TP2,
    ),
    "a view that splits the hidden dim": (
        lambda b: b.call("rms_norm", b.view(b.all_reduce(b["x"]), 24, 4), b.call("aten::slice.Tensor", b["w"], 0, 0, 4), 1e-6),
        (12, 8), TP2,
    ),
    "a transpose before the norm": (
        lambda b: b.rms_norm(b.call("aten::transpose.int", b.all_reduce(b["x"]), 0, 1)), (8, 8), TP2,
    ),
    "an op between": (lambda b: b.rms_norm(b.call("aten::relu", b.all_reduce(b["x"]))), (12, 8), TP2),
    "a varying residual": (lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["v"]), (12, 8), TP2),
    "a partial residual": (lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["y"]), (12, 8), TP2),
    "a varying first addend": (lambda b: b.add_rms_norm(b["v"], b.all_reduce(b["x"])), (12, 8), TP2),
    "a varying weight": (lambda b: b.rms_norm(b.all_reduce(b["x"]), "u"), (12, 8), TP2),
    "a residual that is broadcast": (
        lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b.call("aten::mean.dim", b["r"], [0], True)), (12, 8), TP2,
    ),
    "a weight for every token": (
        lambda b: b.call("rms_norm", b.all_reduce(b["x"]), b["r"], 1e-6), (12, 8), TP2,
    ),
    "a marker that others read": (marker_with_other_reader, (12, 8), TP2),
    "a marker behind one that others read": (marker_behind_a_shared_marker, (12, 8), TP2),
    "a marker read as both addends": (marker_read_as_both_addends, (12, 8), TP2),
    "an all_reduce written in place": (in_place, (12, 8), TP2),
    "a residual written in place": (residual_of_mutated_input, (12, 8), TP2),
    "a residual selected by rank": (split_by_rank, (12, 8), TP2),
    "a residual scaled by rank": (scaled_by_rank, (12, 8), TP2),
    "a residual reduced over another group": (reduced_over_another_group, (12, 8), GRID),
    "add_rms_norm2": (
        lambda b: b.graph.getitem(b.call("add_rms_norm2", b.all_reduce(b["x"]), b["r"], b["w"], 1e-6), 0),
        (12, 8), TP2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    build, shape, mesh = LEFT_ALONE[case]
    original = program(build, shape, mesh)
    for rank in range(mesh.world_size):
        gm = original.graph_module(rank)
        code = gm.code
        pass_ = SequenceParallel()
        pass_(gm)
        assert pass_.rewrites == {"P1": 0}
        gm.recompile()
        assert gm.code == code


@pytest.mark.parametrize(
    ("tp", "dp"), [(((0, 1), (2, 3)), ((0, 2), (3, 1))), (((0, 1),), ((0, 1),))], ids=["crossing", "twice the same"]
)
def test_an_input_that_varies_over_a_dim_which_tells_the_members_apart(tp: Any, dp: Any) -> None:
    mesh = Mesh(2 * len(tp), (MeshDim("tp", tp), MeshDim("dp", dp)))
    specs = [
        InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)),
        InputSpec("v", (4, 8), placements=(("dp", VARYING),)),
        InputSpec("w", (8,), recipe=Recipe("norm_weight")),
    ]

    def build(graph: GraphBuilder) -> Any:
        b = Builder(graph, ["x", "v", "w"])
        return b.add_rms_norm(b.all_reduce(b["x"]), b["v"])

    original = spmd_program(mesh, specs, build)
    assert findings(original, SequenceParallel()) == set()
    assert apply(original, SequenceParallel())[1] == 0


@pytest.mark.parametrize("lost", ["x", "r", "w", "all_reduce", "add_rms_norm"])
def test_missing_metadata_leaves_the_graph_alone(lost: str) -> None:
    gm = program(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"])).graph_module(0)
    del next(node for node in gm.graph.nodes if node.name == lost).meta["val"]
    pass_ = SequenceParallel()
    pass_(gm)
    assert pass_.rewrites == {"P1": 0}


@pytest.mark.parametrize("lost", ["r", "w"])
def test_a_missing_placement_means_varying(lost: str) -> None:
    gm = program(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"])).graph_module(0)
    del next(node for node in gm.graph.nodes if node.name == lost).meta["placement"]
    pass_ = SequenceParallel()
    pass_(gm)
    assert pass_.rewrites == {"P1": 0}


def test_a_norm_that_nobody_reads_is_still_gathered() -> None:
    """An unused collective is one that other ranks may wait for: ranks that differ in dead code stay matched."""
    original = program(lambda b: b.rms_norm(b.all_reduce(b["x"])))
    graphs = []
    for rank in (0, 1):
        gm = original.graph_module(rank)
        if rank == 1:
            output = next(iter(reversed(gm.graph.nodes)))
            output.args = (next(iter(gm.graph.nodes)),)
        graphs.append(SequenceParallel()(gm).graph)
    assert Lockstep().run(original.with_graphs(graphs)).finished


def test_an_all_reduce_that_was_unused_before_stays() -> None:
    def unused(gm: Any) -> Any:
        graph = gm.graph
        reduced = next(node for node in graph.nodes if node.name == "all_reduce")
        with graph.inserting_after(reduced):
            graph.node_copy(reduced, lambda node: node)
        return gm

    original = program(lambda b: b.rms_norm(b.all_reduce(b["x"])))
    gm = SequenceParallel()(unused(original.graph_module(0)))
    assert sum(node.name.startswith("all_reduce") for node in gm.graph.nodes) == 1


# ----------------------------------------------------------------------------------------------------- planted defects


def with_residual(b: Builder) -> Any:
    return b.add_rms_norm(b.all_reduce(b["x"]), b["r"])


def norm_only(b: Builder) -> Any:
    return b.rms_norm(b.all_reduce(b["x"]))


def norm_and_reader(b: Builder) -> Any:
    reduced = b.all_reduce(b["x"])
    return b.rms_norm(reduced), b.call("aten::add.Tensor", reduced, b["r"])


def two_groups(b: Builder) -> Any:
    return b.rms_norm(b.all_reduce(b["x"], "tp")), b.rms_norm(b.all_reduce(b["x"], "dp"))


SHOWN_BY: dict[str, tuple[Build, tuple[int, ...], Mesh]] = {
    "ResidualNotSliced": (with_residual, (12, 8), TP2),
    "RankNumberPicksShard": (with_residual, (12, 8), STRIDED),
    "FirstChunkForAll": (with_residual, (12, 8), TP2),
    "BatchScattered": (norm_only, (2, 4, 8), TP2),
    "OutputNotGathered": (norm_only, (12, 8), TP2),
    "GatherOrderLost": (norm_only, (12, 8), REVERSED),
    "GatherSkippedOnFirstRank": (norm_only, (12, 8), TP2),
    "AllReduceErasedOnFirstRank": (norm_only, (12, 8), TP2),
    "OtherReadersTakeShard": (norm_and_reader, (12, 8), TP2),
    "MarkerMovesAlone": (marker_with_other_reader, (12, 8), TP2),
    "VaryingAddendSliced": (LEFT_ALONE["a varying residual"][0], (12, 8), TP2),
    "VaryingWeightAccepted": (LEFT_ALONE["a varying weight"][0], (12, 8), TP2),
    "StaleMetadata": (norm_only, (12, 8), TP2),
    "ViewKeepsAllTokens": (lambda b: b.rms_norm(b.view(b.all_reduce(b["x"]), 1, 12, 8)), (12, 8), TP2),
    "IndivisibleTokensAccepted": (norm_only, (5, 8), TP2),
    "OneScatterForAllGroups": (two_groups, (12, 8), GRID),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refuted(name: str) -> None:
    found = findings(program(*SHOWN_BY[name]), MUTANTS[name]())
    assert found & EXPECTED[name], f"found {found}"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_sound_pass_is_not_refuted_where_a_mutant_is(name: str) -> None:
    assert findings(program(*SHOWN_BY[name]), SequenceParallel()) == set()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("FirstChunkForAll", {"wrong-value"}),
        ("GatherSkippedOnFirstRank", {"deadlock"}),
        ("AllReduceErasedOnFirstRank", {"collective-mismatch"}),
        ("StaleMetadata", {"stale-metadata"}),
        ("IndivisibleTokensAccepted", {"pass-raised"}),
    ],
)
def test_each_check_refutes_a_mutant_alone(name: str, kinds: set[str]) -> None:
    assert findings(program(*SHOWN_BY[name]), MUTANTS[name]()) == kinds


def test_mutants_carry_their_own_names() -> None:
    assert {mutant.name for mutant in MUTANTS.values()} == set(MUTANTS)
    assert SequenceParallel.name == "sequence_parallel"
