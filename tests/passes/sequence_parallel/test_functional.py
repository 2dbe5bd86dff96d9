"""Sequence parallelism on functional collectives: it fires where it may, and what it makes is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tcverify.passes import SequenceParallel
from tcverify.passes.editing import named_arguments, op_name
from tcverify.program import Mesh, MeshDim, Program, compute_nodes
from tests.support.rows_programs import ADD, C10D, MUL, NORMS, apart, cast, fused, gathered, started, summed, waited
from tests.support.sequence_programs import (
    ALL_MESHES,
    GRID,
    LAYOUTS,
    REVERSED,
    STRIDED,
    TP2,
    TP4,
    Build,
    Builder,
    apply,
    check,
    findings,
    ops,
    program,
)

SCATTER, GATHER, REDUCE = "reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce"


def collectives(rewritten: Program, rank: int = 0) -> list[str]:
    """The collectives that a rank starts, in order."""
    return [op for op in ops(rewritten, rank) if op in (SCATTER, GATHER, REDUCE)]


# ------------------------------------------------------------------------------------------------------------ it fires


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_residuals_stay_local_from_layer_to_layer(mesh: Mesh, shape: tuple[int, ...]) -> None:
    def build(b: Builder) -> Any:
        first = b.call(ADD, b["r"], summed(b, b["x"]))
        second = b.call(ADD, first, summed(b, b.call(MUL, apart(b, first), b["v"])))
        third = b.call(ADD, summed(b, b.call(MUL, fused(b, second), b["v"])), second)
        return apart(b, third)

    rewritten = check(build, {"P3": 3}, shape, mesh)
    busy = next(rank for rank in range(mesh.world_size) if len(mesh.dim("tp").group(rank)) > 1)
    assert collectives(rewritten, busy) == [SCATTER, GATHER] * 3


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(12, 8), (3, 4, 8)], ids=str)
def test_every_norm_moves(norm: str, shape: tuple[int, ...]) -> None:
    rewritten = check(lambda b: NORMS[norm](b, b.call(ADD, summed(b, b["x"]), b["r"])), {"P3": 1}, shape, REVERSED)
    assert collectives(rewritten) == [SCATTER, GATHER]


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_moves_without_a_residual(norm: str) -> None:
    rewritten = check(lambda b: NORMS[norm](b, summed(b, b["x"])), 1, (3, 4, 8))
    assert collectives(rewritten) == [SCATTER, GATHER]


@pytest.mark.parametrize("shape", [(3, 5, 8), (4, 1, 8), (2, 3, 8)], ids=str)
def test_the_group_divides_the_tokens_of_all_batches(shape: tuple[int, ...]) -> None:
    """No dim of these but the batch, if any, can be divided by 2 or 3 ranks; all tokens together can."""
    mesh = Mesh.grid({"tp": 3 if shape[0] == 3 else 2})
    check(lambda b: apart(b, b.call(ADD, summed(b, b["x"]), b["r"])), {"P3": 1}, shape, mesh)


def test_fused_norms_of_tensor_cast_move_too() -> None:
    def build(b: Builder) -> Any:
        normed, residual = b.fused(summed(b, b["x"]), b["r"])
        return b.add_rms_norm(summed(b, b["y"]), residual), normed

    rewritten = check(build, {"P2": 1, "P3": 1}, (2, 6, 8))
    assert collectives(rewritten) == [SCATTER, GATHER, SCATTER, GATHER]


def test_views_casts_and_detached_values_stand_between() -> None:
    def build(b: Builder) -> Any:
        value = b.call("aten::detach", b.view(summed(b, b["x"]), 12, 8))
        return apart(b, b.call(ADD, cast(b, cast(b, value, torch.float64), torch.float32), b.view(b["r"], 12, 8)))

    rewritten = check(build, {"P3": 1}, (2, 6, 8))
    assert ops(rewritten).count("_to_copy") == 2


def test_what_is_multiplied_row_by_row_stays_behind_the_gather() -> None:
    rewritten = check(norm_with("rows"), {"P3": 1}, (2, 6, 8))
    assert ops(rewritten)[-2:] == ["mul", "neg"]
    assert collectives(rewritten) == [SCATTER, GATHER, GATHER]


def test_two_sums_are_added_as_shards() -> None:
    rewritten = check(lambda b: apart(b, b.call(ADD, summed(b, b["x"]), summed(b, b["y"]))), {"P3": 1})
    assert collectives(rewritten) == [SCATTER, SCATTER, GATHER]


def test_two_groups_in_one_graph() -> None:
    def build(b: Builder) -> Any:
        first = apart(b, b.call(ADD, b["r"], summed(b, b["x"])))
        return first, b.call("rms_norm", summed(b, b["v"], "dp"), b["w"], 1e-6)

    rewritten = check(build, {"P1": 1, "P3": 1}, (4, 3, 8), GRID)
    groups = [named_arguments(n)["group_name"] for n in compute_nodes(rewritten.graph(0)) if SCATTER in op_name(n)]
    assert groups == ["tp", "dp"]


def test_a_statistic_is_gathered_for_who_reads_it() -> None:
    def build(b: Builder) -> Any:
        both = b.call("aten::_fused_rms_norm", b.call(ADD, b["r"], summed(b, b["x"])), [8], b["w"], 1e-5)
        return b.graph.getitem(both, 0), b.graph.getitem(both, 1), b.graph.getitem(both, -1)

    rewritten = check(build, {"P3": 1}, (2, 6, 8))
    assert collectives(rewritten) == [SCATTER, GATHER, GATHER]


# ------------------------------------------------------------------------------------------------- what it puts there


def test_what_is_inserted_and_where() -> None:
    rewritten = check(lambda b: apart(b, b.call(ADD, b["r"], summed(b, b["x"]))), {"P3": 1}, (2, 6, 8))
    assert ops(rewritten) == [
        "view", SCATTER, "wait_tensor", "view", "slice", "add", "pow", "mean", "add", "rsqrt", "mul", "mul", GATHER,
        "wait_tensor", "view",
    ]  # fmt: skip


def test_two_dims_take_no_views() -> None:
    rewritten = check(lambda b: apart(b, b.call(ADD, b["r"], summed(b, b["x"]))), {"P3": 1})
    assert "view" not in ops(rewritten)


@pytest.mark.parametrize(("mesh", "starts"), [(REVERSED, [6, 0]), (STRIDED, [0, 6, 6, 0])], ids=["reversed", "strided"])
def test_a_residual_is_sliced_at_the_position_in_the_group(mesh: Mesh, starts: list[int]) -> None:
    rewritten = check(lambda b: apart(b, b.call(ADD, b["r"], summed(b, b["x"]))), {"P3": 1}, mesh=mesh)
    slices = [
        n for rank in range(mesh.world_size) for n in compute_nodes(rewritten.graph(rank)) if "slice" in op_name(n)
    ]
    assert [n.args[2] for n in slices] == starts


def test_a_residual_that_was_gathered_is_taken_from_its_part() -> None:
    def build(b: Builder) -> Any:
        whole = b.view(gathered(b, b["s"]), 2, 6, 8)
        return apart(b, b.call(ADD, b.view(summed(b, b["x"]), 2, 6, 8), whole))

    assert collectives(check(build, {"P3": 1}, mesh=REVERSED)) == [SCATTER, GATHER]


def test_a_residual_gathered_from_another_group_is_sliced() -> None:
    def build(b: Builder) -> Any:
        part = b.call("aten::slice.Tensor", b["r"], 0, 0, 6)
        whole = gathered(b, part, dim="dp")
        return apart(b, b.call(ADD, summed(b, b["x"]), b.call(ADD, b.call(MUL, whole, 0.0), b["r"]))), whole

    crossing = Mesh(2, (MeshDim("tp", ((0, 1),)), MeshDim("dp", ((1, 0),))))
    rewritten = check(build, {"P3": 1}, mesh=crossing)
    assert "slice" in ops(rewritten)


def test_other_readers_of_a_sum_keep_the_all_reduce() -> None:
    def build(b: Builder) -> Any:
        reduced = summed(b, b["x"])
        return apart(b, reduced), b.call("aten::relu", reduced)

    assert collectives(check(build, 1)) == [REDUCE, SCATTER, GATHER]


def test_a_residual_that_is_returned_is_gathered() -> None:
    def build(b: Builder) -> Any:
        total = b.call(ADD, b["r"], summed(b, b["x"]))
        return apart(b, total), total

    assert collectives(check(build, {"P3": 1}, (2, 6, 8))) == [SCATTER, GATHER, GATHER]


def test_the_scatter_is_waited_for_where_the_sum_was_first() -> None:
    def build(b: Builder) -> Any:
        own = b.call("aten::mul.Tensor", b["x"], b["v"])
        start = started(b, own)
        waited(b, start)
        b.call("aten::mul_.Tensor", own, 0.5)
        return apart(b, b.call(ADD, waited(b, start), b["r"])), own

    names = ops(apply(program(build), SequenceParallel())[0])
    assert names.index("wait_tensor") < names.index("mul_")
    assert REDUCE not in names
    assert findings(program(build), SequenceParallel()) == set()


def test_a_sum_that_stays_keeps_all_its_waits() -> None:
    def build(b: Builder) -> Any:
        own = b.call("aten::mul.Tensor", b["x"], b["v"])
        start = started(b, own)
        waited(b, start)
        b.call("aten::mul_.Tensor", own, 0.5)
        again = waited(b, start)
        return apart(b, again), b.call("aten::relu", again), own

    rewritten, _ = apply(program(build), SequenceParallel())
    assert ops(rewritten).count("wait_tensor") == 4
    assert findings(program(build), SequenceParallel()) == set()


def test_starts_keep_their_order() -> None:
    """Two sums under way, the later one waited for first."""

    def build(b: Builder) -> Any:
        first, second = started(b, b["x"]), started(b, b["y"])
        late = b.call(ADD, waited(b, second), b["r"])
        early = b.call(ADD, waited(b, first), b["r"])
        return apart(b, late), apart(b, early)

    rewritten = check(build, {"P3": 2}, (2, 6, 8))
    assert collectives(rewritten) == [SCATTER, SCATTER, GATHER, GATHER]
    scattered = [n for n in compute_nodes(rewritten.graph(0)) if SCATTER in op_name(n)]
    assert [n.args[0].args[0].name for n in scattered] == ["x", "y"]


def test_what_is_sequence_parallel_already_stays() -> None:
    def build(b: Builder) -> Any:
        mine = waited(b, b.call(f"{C10D}reduce_scatter_tensor", b["x"], "sum", 2, "tp"))
        total = b.call(ADD, b["s"], mine)
        return gathered(b, apart(b, total)), total

    original = program(build)
    rewritten, fired = apply(original, SequenceParallel())
    assert fired == 0
    assert ops(rewritten) == ops(original)


def test_both_dialects_in_one_graph() -> None:
    def build(b: Builder) -> Any:
        first = b.call(ADD, b["r"], summed(b, b["x"]))
        second = b.add(b.all_reduce(b["y"]), first)
        return apart(b, first), b.rms_norm(second)

    rewritten = check(build, {"P3": 2}, (2, 6, 8))
    assert "reduce_scatter" in ops(rewritten)  # tensor_cast's
    assert SCATTER in ops(rewritten)


def test_the_metadata_of_what_is_inserted_shares_storage_as_it_does() -> None:
    original = program(lambda b: apart(b, b.call(ADD, b["r"], summed(b, b["x"]))), (2, 6, 8))
    gm = SequenceParallel()(original.graph_module(0))
    nodes: dict[str, fx.Node] = {node.name: node for node in gm.graph.nodes}
    storages = [
        nodes[name].meta["val"].untyped_storage()._cdata
        for name in ("all_gather", "all_gather_wait", "all_gather_view")
    ]
    assert len(set(storages)) == 1
    assert nodes["add"].meta["val"].untyped_storage()._cdata not in storages


# ---------------------------------------------------------------------------------------------------- it leaves alone


def norm_with(change: str) -> Build:
    """A norm behind a sum and a residual, in one respect not what it looks like."""

    def build(b: Builder) -> Any:
        total = b.call(ADD, b["r"], summed(b, b["x"]))
        power = b.graph.constant("power", lambda rank: 2 + 2 * rank) if change == "exponent" else 2
        square = b.call("aten::pow.Tensor_Scalar", total, power)
        mean = b.call("aten::mean.dim", square, [0] if change == "tokens" else [-1], change != "keepdim")
        if change == "keepdim":
            mean = b.call("aten::unsqueeze", mean, -1)
        shifted = b.call("aten::add_.Tensor", mean, 1e-5) if change == "eps" else b.call(ADD, mean, 1e-5)
        scale = b.call("aten::rsqrt", shifted)
        scaled = b.call(MUL, total, scale)
        weight = {"weight": b["u"], "rows": b["q"]}.get(change, b["w"])
        extra = {"square": square, "scale": scale}.get(change, total)
        return b.call(MUL, scaled, weight), b.call("aten::neg", extra)

    return build


def with_residual(value: Any) -> Build:
    return lambda b: apart(b, b.call(ADD, summed(b, b["x"]), value(b)))


def by_rank(b: Builder) -> Any:
    start = b.graph.constant("start", lambda rank: rank)
    stop = b.graph.constant("stop", lambda rank: 12 + rank)
    return b.call("aten::slice.Tensor", b.call("aten::cat", [b["r"], b["q"]], 0), 0, start, stop)


def residual_written(b: Builder) -> Any:
    own = b.call("aten::clone", b["r"])
    normed = apart(b, b.call(ADD, summed(b, b["x"]), own))
    return normed, b.call("aten::mul_.Tensor", own, b["v"])


def sum_written(b: Builder) -> Any:
    total = b.call(ADD, b["r"], summed(b, b["x"]))
    return apart(b, total), b.call("aten::mul_.Tensor", total, b["v"])


def coalesced(b: Builder) -> Any:
    both = b.call(f"{C10D}all_reduce_coalesced", [b["x"], b["y"]], "sum", "tp")
    return apart(b, b.call(ADD, b["r"], waited(b, b.graph.getitem(both, 0))))


def in_place(b: Builder) -> Any:
    own = b.call(f"{C10D}all_reduce_", b.call("aten::clone", b["x"]), "sum", "tp")
    return apart(b, b.call(ADD, b["r"], waited(b, own)))


def of_columns(b: Builder) -> Any:
    turned = b.call("aten::transpose.int", b["x"], 0, 1)
    return apart(b, b.call(ADD, b["r"], summed(b, turned)))


def with_a_send(b: Builder) -> Any:
    sent = b.call("pipeline_send_recv", b["v"], 0, 1, 0, 1)
    return apart(b, b.call(ADD, b["r"], summed(b, b["x"]))), sent


def halved(b: Builder) -> Any:
    total = b.view(b.call(ADD, b["r"], summed(b, b["x"])), 24, 4)
    return b.call("aten::rms_norm", total, [4], b.call("aten::slice.Tensor", b["w"], 0, 0, 4), 1e-5)


LEFT_ALONE: dict[str, tuple[Build, tuple[int, ...], Mesh]] = {
    **{
        f"a reduction by {op}": (
            lambda b, op=op: apart(b, b.call(ADD, b["r"], summed(b, b["x"], op=op))), (12, 8), TP2,
        )
        for op in ("avg", "max", "min", "product")
    },
    "coalesced": (coalesced, (12, 8), TP2),
    "in place": (in_place, (12, 8), TP2),
    "operands in another order, of three dims": (of_columns, (6, 6, 8), TP2),
    "operands in another order, of two dims": (of_columns, (8, 8), TP2),
    "a residual in another order": (with_residual(lambda b: b.call("aten::transpose.int", b["r"], 0, 1)), (8, 8), TP2),
    "tokens that the group does not divide": (with_residual(lambda b: b["r"]), (3, 5, 8), TP2),
    "fewer tokens than ranks": (with_residual(lambda b: b["r"]), (2, 8), TP4),
    "no tokens": (with_residual(lambda b: b["r"]), (0, 8), TP2),
    "a group of one": (with_residual(lambda b: b["r"]), (12, 8), Mesh(2, (MeshDim("tp", ((0,), (1,))),))),
    "one dim": (lambda b: b.call("aten::rms_norm", summed(b, b["w"]), [8], b["w"], 1e-5), (12, 8), TP2),
    "a varying residual": (with_residual(lambda b: b["v"]), (12, 8), TP2),
    "a partial residual": (with_residual(lambda b: b["y"]), (12, 8), TP2),
    "a residual reduced over another group": (with_residual(lambda b: summed(b, b["v"], "dp")), (12, 8), GRID),
    "a broadcast residual": (with_residual(lambda b: b["w"]), (12, 8), TP2),
    "a residual sliced by rank": (with_residual(by_rank), (12, 8), TP2),
    "a residual that is written": (residual_written, (12, 8), TP2),
    "a sum that is written": (sum_written, (12, 8), TP2),
    "a sum that others multiply": (
        lambda b: apart(b, b.call(ADD, b["r"], summed(b, b["x"]), alpha=2)), (12, 8), TP2,
    ),
    "a view that halves rows": (halved, (12, 8), TP2),
    "ranks that meet by number": (with_a_send, (12, 8), TP2),
    "eps added in place": (norm_with("eps"), (12, 8), TP2),
    "a varying weight": (norm_with("weight"), (12, 8), TP2),
    "a mean over the tokens": (norm_with("tokens"), (12, 8), TP2),
    "a mean of square values over the tokens": (norm_with("tokens"), (8, 8), TP2),
    "a mean that loses its dim": (norm_with("keepdim"), (12, 8), TP2),
    "an exponent by rank": (norm_with("exponent"), (12, 8), TP2),
    "squares that others read": (norm_with("square"), (12, 8), TP2),
    "a scale that others read": (norm_with("scale"), (12, 8), TP2),
    "an op between sum and norm": (
        lambda b: apart(b, b.call("aten::relu", b.call(ADD, b["r"], summed(b, b["x"])))), (12, 8), TP2,
    ),
    "no norm": (lambda b: b.call(ADD, b["r"], summed(b, b["x"])), (12, 8), TP2),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    build, shape, mesh = LEFT_ALONE[case]
    original = program(build, shape, mesh)
    before = ops(original)
    rewritten, fired = apply(original, SequenceParallel())
    assert fired == 0
    assert ops(rewritten) == before
    assert findings(original, SequenceParallel()) == set()


SOUND = with_residual(lambda b: b["r"])


def counted(gm: fx.GraphModule) -> int:
    pass_ = SequenceParallel()
    pass_(gm)
    return sum(pass_.rewrites.values())


@pytest.mark.parametrize("fact", ["rank", "groups", "alike"])
def test_without_facts_beside_the_graph_nothing_is_rewritten(fact: str) -> None:
    gm = program(SOUND).graph_module(0)
    del gm.meta[fact]
    assert counted(gm) == 0
    assert counted(program(SOUND).graph_module(0)) == 1


def test_without_known_numbers_an_exponent_may_be_another_one() -> None:
    gm = program(SOUND).graph_module(0)
    del gm.meta["same_numbers"]
    assert counted(gm) == 0
    fused_norm = program(lambda b: fused(b, b.call(ADD, b["r"], summed(b, b["x"])))).graph_module(0)
    del fused_norm.meta["same_numbers"]
    assert counted(fused_norm) == 1


def test_ranks_of_other_graphs_in_any_group_forbid_it() -> None:
    """A new wait could close a circle through the other group."""
    gm = program(SOUND, mesh=GRID).graph_module(0)
    assert gm.meta["alike"] == ("dp", "tp")
    gm.meta["alike"] = ("tp",)
    assert counted(gm) == 0


def test_graphs_that_differ_between_ranks_are_left_alone() -> None:
    original = program(SOUND)
    other = program(lambda b: b.call("aten::neg", apart(b, b.call(ADD, summed(b, b["x"]), b["r"]))))
    mixed = original.with_graphs([original.graph(0), other.graph(1)])
    assert [counted(mixed.graph_module(rank)) for rank in (0, 1)] == [0, 0]
    assert [counted(original.graph_module(rank)) for rank in (0, 1)] == [1, 1]


def test_a_group_that_nobody_knows_is_left_alone() -> None:
    gm = program(SOUND, mesh=GRID).graph_module(0)
    gm.meta["groups"] = {"dp": gm.meta["groups"]["dp"]}
    assert counted(gm) == 0


def test_missing_metadata_is_left_alone() -> None:
    gm = program(SOUND).graph_module(0)
    next(node for node in gm.graph.nodes if node.name == "mean").meta.pop("val")
    assert counted(gm) == 0


def test_missing_metadata_of_a_tuple_is_left_alone() -> None:
    gm = program(lambda b: fused(b, b.call(ADD, b["r"], summed(b, b["x"])))).graph_module(0)
    next(node for node in gm.graph.nodes if "fused" in node.name).meta.pop("val")
    assert counted(gm) == 0


def test_ops_without_an_overload_are_left_alone() -> None:
    gm = program(SOUND).graph_module(0)
    reduce = next(node for node in gm.graph.nodes if op_name(node) == f"{C10D}all_reduce")
    reduce.target = torch.ops._c10d_functional.all_reduce
    assert counted(gm) == 0


def test_patterns_can_be_switched_off() -> None:
    build: Build = lambda b: (apart(b, b.call(ADD, b["r"], summed(b, b["x"]))), apart(b, summed(b, b["y"])))  # noqa: E731
    for patterns, expected in (("P1", {"P1": 1, "P3": 0}), ("P3", {"P1": 0, "P3": 1})):
        pass_ = SequenceParallel(patterns=patterns)
        pass_(program(build).graph_module(0))
        assert {name: pass_.rewrites[name] for name in expected} == expected


# -------------------------------------------------------------------------------------------- numbers that are the same


def test_calls_whose_numbers_are_the_same_are_named() -> None:
    original = program(with_residual(by_rank))
    gm = original.graph_module(0)
    calls = {node.name for node in gm.graph.nodes if node.op == "call_function"}
    assert calls - gm.meta["same_numbers"] == {"slice_1"}


def test_of_graphs_that_are_stored_apart_no_numbers_are_known() -> None:
    original = program(SOUND)
    other = program(SOUND).graph(1)
    for node in other.nodes:
        if node.op == "call_function":
            node.name = f"{node.name}_other"
    apart_stored = original.with_graphs([original.graph(0), other])
    assert len(apart_stored.graphs) == 2
    gm = apart_stored.graph_module(0)
    assert gm.meta["alike"] == ("tp",)
    assert gm.meta["same_numbers"] == frozenset()


# ----------------------------------------------------------------------------------------------- dims that differ by rank


def dim_by_rank(b: Builder) -> Any:
    """A dim of a square, another one on every other rank: shapes are the same."""
    return b.graph.constant("dim", lambda rank: rank % 2)


DIMS_BY_RANK: dict[str, Build] = {
    "softmax": lambda b: apart(b, b.call(ADD, summed(b, b["x"]), b.call("aten::softmax.int", b["r"], dim_by_rank(b)))),
    "sum": lambda b: apart(
        b,
        b.call(ADD, summed(b, b["x"]), b.call(ADD, b["q"], b.call("aten::sum.dim_IntList", b["r"], [dim_by_rank(b)]))),
    ),
    "weight": lambda b: b.call(
        "aten::rms_norm", summed(b, b["x"]), [8], b.call("aten::amax", b["r"], [dim_by_rank(b)])
    ),
    "transposed": lambda b: apart(
        b,
        b.call(
            ADD,
            summed(b, b["x"]),
            b.call("aten::mul.Tensor", b["q"], b.call("aten::transpose.int", b["r"], 0, dim_by_rank(b))),
        ),
    ),
    "mean of the norm": lambda b: b.call(
        MUL,
        summed(b, b["x"]),
        b.call("aten::rsqrt", b.call(ADD, b.call("aten::mean.dim", summed(b, b["x"]), [dim_by_rank(b)], True), 9.5)),
    ),
    "tensor_cast's residual": lambda b: b.rms_norm(
        b.add(b.all_reduce(b["x"]), b.call("aten::softmax.int", b["r"], dim_by_rank(b)))
    ),
    "tensor_cast's weight": lambda b: b.call(
        "rms_norm", b.all_reduce(b["x"]), b.call("aten::amax", b["r"], [dim_by_rank(b)]), 1e-6
    ),
}


@pytest.mark.parametrize("case", DIMS_BY_RANK)
def test_a_dim_that_differs_by_rank_makes_values_differ(case: str) -> None:
    check(DIMS_BY_RANK[case], 0, (8, 8))


def test_a_dim_that_is_the_same_keeps_values_equal() -> None:
    def build(b: Builder) -> Any:
        return apart(b, b.call(ADD, summed(b, b["x"]), b.call("aten::softmax.int", b["r"], 0)))

    check(build, {"P3": 1}, (8, 8))


@pytest.mark.parametrize("whole", [False, True], ids=["of the mean", "of the shape"])
def test_a_norm_over_other_dims_by_rank_stays(whole: bool) -> None:
    """Another rank would find no norm, and would not scatter."""

    def build(b: Builder) -> Any:
        value = b.call(ADD, summed(b, b["x"]), b["r"])
        if whole:
            return b.call("aten::rms_norm", value, b.graph.constant("shape", lambda rank: [8] if rank else [8, 8]))
        dim = b.graph.constant("dim", lambda rank: 1 - rank)
        mean = b.call("aten::mean.dim", b.call(MUL, value, value), [dim], True)
        return b.call(MUL, value, b.call("aten::rsqrt", b.call(ADD, mean, 1e-5)))

    original = program(build, (8, 8))
    for rank in range(2):
        pass_ = SequenceParallel()
        pass_(original.graph_module(rank))
        assert sum(pass_.rewrites.values()) == 0


@pytest.mark.parametrize("weighed", [False, True])
def test_a_cast_into_a_memory_format_is_no_part_of_a_norm(weighed: bool) -> None:
    """The format is one for values with four dims, and blocks of rows have two."""

    def build(b: Builder) -> Any:
        value = b.view(b.call(ADD, summed(b, b["x"]), b["r"]), 2, 1, 4, 8)
        normed = b.call("aten::rms_norm", value, [8])
        scale = b.call(
            "aten::rsqrt", b.call(ADD, b.call("aten::mean.dim", b.call(MUL, value, value), [-1], True), 1e-5)
        )
        scaled = b.call(MUL, value, scale)
        copied = b.call("aten::_to_copy", scaled, dtype=torch.float64, memory_format=torch.channels_last)
        return normed, b.call(MUL, copied, b["w"]) if weighed else copied

    check(build, {"P3": 1}, (2, 4, 8))
