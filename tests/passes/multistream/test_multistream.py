"""Multistream scheduling on hand-built programs: what it makes is sound, by a plain judge and by the whole verifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tcverify.ops import resolve
from tcverify.passes import Multistream
from tcverify.passes.editing import has_exact_metadata
from tcverify.program import StreamSettings
from tests.sizes import by_night
from tests.support.stream_programs import (
    GRID,
    US,
    Builder,
    Op,
    check,
    findings,
    is_lowered,
    judge,
    lowered,
    node,
    program,
)


def overlapping(b: Builder) -> Any:
    """A collective that three products can hide."""
    return b.add(b.all_reduce(b["x"]), b.mm(b.mm(b.mm(b["v"]))))


def issued(graph: fx.Graph) -> dict[str, Op]:
    """The ops of a lowered graph by name, in order of issue."""
    return {op.node.name: op for op in judge(program(overlapping), graph).ops}


# ----------------------------------------------------------------------------------------------------------- the schedule


def test_a_collective_runs_beside_compute() -> None:
    original = program(overlapping)
    graph = check(original).graph(0)
    judged = judge(original, graph)
    assert {op.node.name: op.stream for op in judged.ops} == {
        "all_reduce": 1, "mm": 0, "mm_1": 0, "mm_2": 0, "add": 0,
    }  # fmt: skip
    assert judged.makespan == pytest.approx(40 * US)
    assert judged.serial == pytest.approx(70 * US)


def test_ops_are_issued_by_decreasing_rank() -> None:
    def build(b: Builder) -> Any:
        aside = b.mm(b["r"])
        return b.add(b.all_reduce(b["x"]), b["v"]), aside

    original = program(build)
    graph = check(original).graph(0)
    assert [op.node.name for op in judge(original, graph).ops] == ["all_reduce", "mm", "add"]


def test_ops_of_equal_rank_keep_their_order() -> None:
    def build(b: Builder) -> Any:
        return [b.all_reduce(b["x"], cost=10), *(b.mm(b["r"]) for _ in range(4))]

    original = program(build)
    assert [op.node.name for op in judge(original, check(original).graph(0)).ops] == [
        "all_reduce", "mm", "mm_1", "mm_2", "mm_3",
    ]  # fmt: skip


def test_the_overhead_counts_between_streams_and_only_there() -> None:
    original = program(overlapping, streams=StreamSettings(sync_overhead_s=7 * US))
    graph = check(original).graph(0)
    judged = judge(original, graph)
    add = judged.op("add")
    assert add.start == pytest.approx(37 * US)
    assert judged.op("mm_1").start == pytest.approx(10 * US)
    said = node(graph, "output").meta["schedule"]
    assert said["sync_overhead_s"] == 7 * US
    assert said["critical_path_s"] == pytest.approx(40 * US)


def test_a_large_overhead_leaves_the_graph_alone() -> None:
    original = program(overlapping, streams=StreamSettings(sync_overhead_s=1.0))
    gm = original.graph_module(0)
    before = [dict(n.meta) for n in gm.graph.nodes]
    code = gm.code
    pass_ = Multistream()
    assert pass_(gm) is gm
    assert (gm.code, pass_.rewrites["lowered"], pass_.schedule) == (code, 0, None)
    assert [dict(n.meta) for n in gm.graph.nodes] == before


def test_without_anything_to_overlap_the_graph_is_left_alone() -> None:
    original = program(lambda b: b.mm(b.all_reduce(b.mm(b["x"]))))
    assert not is_lowered(lowered(original))
    assert findings(original) == set()


def test_one_stream_for_both_roles_gains_nothing() -> None:
    assert not is_lowered(lowered(program(overlapping, streams=StreamSettings((0,), (0,)))))


@pytest.mark.parametrize(
    ("compute", "comm"), [((2,), (5,)), ((0,), (1, 2)), ((3, 0), (7,)), ((1,), (0,)), ((0, 4), (4, 9))]
)
def test_any_streams_will_do(compute: tuple[int, ...], comm: tuple[int, ...]) -> None:
    def build(b: Builder) -> Any:
        first, second = b.all_reduce(b["x"]), b.all_reduce(b["r"])
        return b.add(first, b.mm(b["v"])), b.add(second, b.mm(b["r"]))

    original = program(build, streams=StreamSettings(compute, comm))
    for op in judge(original, check(original).graph(0)).ops:
        assert op.stream in (comm if op.resources == ("comm",) else compute)


@pytest.mark.parametrize("op", ["matmul_all_reduce", "fp8_linear_all_reduce"])
def test_fused_ops_take_both_resources_on_a_compute_stream(op: str) -> None:
    def build(b: Builder) -> Any:
        rest: tuple[Any, ...] = (None,)
        if op != "matmul_all_reduce":
            scale = b.call("aten::mean", b["w"], cost=1)
            rest = scale, scale, None, torch.float32
        fused = b.call(op, b["v"], b["w"], *rest, b.graph.rank, b.graph.group("tp"), cost=20)
        return b.all_reduce(b["x"]), fused, b.mm(b["r"])

    original = program(build)
    judged = judge(original, check(original).graph(0))
    fused = judged.op(op)
    assert fused.stream == 0
    for other in judged.ops:
        assert other is fused or other.end <= fused.start or fused.end <= other.start


def test_costs_below_a_microsecond_count_as_one() -> None:
    def build(b: Builder) -> Any:
        return b.all_reduce(b["x"], cost=30), b.mm(b["r"], cost=0.0), b.mm(b["v"], cost=-4.0)

    graph = check(program(build)).graph(0)
    assert [node(graph, name).meta["cost_s"] for name in ("all_reduce", "mm", "mm_1")] == [30 * US, US, US]


def test_the_pass_says_what_it_gained() -> None:
    pass_ = Multistream()
    pass_(program(overlapping).graph_module(0))
    assert pass_.schedule is not None
    assert pass_.schedule.gain == pytest.approx(70 / 40)
    assert pass_.rewrites == {"lowered": 1, "moved": 0, "waits": 2}


# -------------------------------------------------------------------------------------------------------- collectives


def test_collectives_stay_in_order_whatever_their_group() -> None:
    def build(b: Builder) -> Any:
        late = b.mm(b.mm(b.mm(b["v"])))
        first = b.all_reduce(late, "dp", cost=1)
        second = b.all_reduce(b["x"], "tp", cost=50)
        return first, b.mm(second, cost=90), b.mm(b["r"])

    original = program(build, mesh=GRID)
    order = [op.node.name for op in judge(original, check(original).graph(3)).ops if "comm" in op.resources]
    assert order == ["all_reduce", "all_reduce_1"]


def test_collectives_on_several_streams_are_ordered_by_tokens() -> None:
    """Only the resource keeps them apart in time; it is the tokens that order them."""

    def build(b: Builder) -> Any:
        return [b.all_reduce(b[name], cost=cost) for name, cost in (("x", 9), ("r", 5), ("v", 7))] + [b.mm(b["r"])]

    check(program(build, streams=StreamSettings((0,), (1, 2))))


def test_a_collective_that_nobody_reads_stays() -> None:
    original = program(overlapping)
    gm = original.graph_module(0)
    add = node(gm.graph, "add")
    with gm.graph.inserting_before(add):
        dead = gm.graph.call_function(resolve("tensor_cast::all_reduce"), (add.args[1], 0, [0, 1]))
        dead.meta.update(val=add.args[1].meta["val"].new_empty((8, 8)), cost_s=9 * US)
    Multistream()(gm)
    assert dead in gm.graph.nodes
    assert judge(original, gm.graph).problems == []
    assert [op.node.name for op in judge(original, gm.graph).ops if "comm" in op.resources] == ["all_reduce", dead.name]


def test_ranks_with_other_costs_agree_on_the_order_of_collectives() -> None:
    def build(b: Builder) -> Any:
        return b.mm(b.all_reduce(b["x"])), b.mm(b.all_reduce(b["r"])), b.mm(b["v"])

    original = program(build)
    graphs = [original.graph(0), original.graph(1)]
    for name, cost in (("mm", 2.0), ("mm_1", 200.0)):
        node(graphs[1], name).meta["cost_s"] = cost * US
    uneven = original.with_graphs(graphs)
    assert len(uneven.graphs) == 2
    check(uneven)


# ------------------------------------------------------------------------------------------------------- dependencies


def test_items_of_tuples_and_views_of_them() -> None:
    def build(b: Builder) -> Any:
        both = b.pair(b.all_reduce(b["x"]), b.mm(b["v"]))
        norm, total = b.item(both, 0), b.item(both, -1)
        reduced = b.all_reduce(b.view(norm, 4, 16))
        return b.add(b.view(reduced, 8, 8), b.mm(b.mm(total))), norm

    original = program(build)
    graph = check(original).graph(0)
    record = node(graph, "add_rms_norm2_record")
    assert record.args[0] is node(graph, "getitem")
    assert record.prev is node(graph, "getitem")


def test_a_tuple_of_which_only_the_second_item_is_read_is_recorded_through_it() -> None:
    def build(b: Builder) -> Any:
        both = b.pair(b["v"], b.all_reduce(b["x"]))
        return b.mm(b.all_reduce(b.item(both, 1))), b.mm(b.mm(b["r"]))

    assert node(check(program(build)).graph(0), "add_rms_norm2_record").args[0].args[1] == 1


def test_a_tuple_that_is_returned_whole_is_recorded_through_an_item_of_its_own() -> None:
    def build(b: Builder) -> Any:
        return b.pair(b["v"], b["r"]), b.mm(b.all_reduce(b["x"])), b.mm(b["r"])

    graph = check(program(build)).graph(0)
    record = node(graph, "add_rms_norm2_record")
    assert record.args[0].name == "add_rms_norm2_item"
    assert graph.find_nodes(op="output")[0].args[0][0] is node(graph, "add_rms_norm2")


def test_operands_in_lists() -> None:
    def build(b: Builder) -> Any:
        parts = [b.mm(b["v"]), b.all_reduce(b["x"]), b.mm(b["r"])]
        return b.call("cat", parts, 1), b.call("aten::cat", parts, 0)

    check(program(build))


def test_region_markers_and_barriers_are_work() -> None:
    def build(b: Builder) -> Any:
        begin = b.call("_internal_mark_region_begin", b.all_reduce(b["x"]), 1)
        end = b.call("_internal_mark_region_end", b.mm(begin), 1)
        other = b.mm(b.mm(b["v"]))
        return b.call("_internal_order_barrier", end, other), b.call("_internal_copy_region", other, 1)

    original = program(build)
    names = {op.node.name for op in judge(original, check(original).graph(0)).ops}
    assert {"_internal_mark_region_begin", "_internal_mark_region_end", "_internal_order_barrier"} <= names


def test_python_operators() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        total = b.call("python::add", reduced, b.mm(b["v"]))
        half = b.call("python::mul", b.call("python::getitem", total, 0), 0.5)
        return b.call("python::matmul", total, b["w"]), half

    check(program(build))


def test_ops_that_may_return_a_view_are_one_where_they_do() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        flat = b.call("aten::reshape", reduced, [64])  # a view
        turned = b.call("aten::t", b.mm(b["v"]))
        copied = b.call("aten::reshape", turned, [64])  # a copy
        same = b.call("aten::contiguous", flat)
        return b.add(same, copied), b.call("aten::flatten.using_ints", b.mm(b["r"]))

    original = program(build)
    names = {op.node.name for op in judge(original, check(original).graph(0)).ops}
    assert "reshape_1" in names
    assert names.isdisjoint({"reshape", "t", "contiguous", "flatten"})


def test_strided_operands_are_gated_only_where_a_copy_does_as_well() -> None:
    """A copy of a slice is dense, so that the sum would have other strides and its flattening would be another thing."""

    def build(b: Builder) -> Any:
        turned = b.call("aten::t", b.call("aten::slice.Tensor", b.all_reduce(b["x"]), 1, 0, 4))
        both = b.add(turned, turned)
        return b.call("aten::reshape", both, [32]), b.mm(b.mm(b["v"]))

    original = program(build)
    for rank in (0, 1):
        graph = lowered(original, rank=rank)
        assert not is_lowered(graph) or judge(original, graph, rank).problems == []
    assert findings(original) == set()


def test_a_copy_that_would_become_a_view_of_its_gate_is_not_gated() -> None:
    """Reshaping an expanded tensor copies; reshaping a copy of it does not."""

    def build(b: Builder) -> Any:
        row = b.call("aten::slice.Tensor", b.all_reduce(b["x"]), 0, 0, 1)
        return b.call("aten::reshape", b.call("aten::expand", row, [8, 8]), [4, 16]), b.mm(b["v"])

    original = program(build)
    graph = lowered(original)
    assert not is_lowered(graph) or judge(original, graph).problems == []
    assert findings(original) == set()


def test_a_view_that_needs_another_value_for_its_shape() -> None:
    def build(b: Builder) -> Any:
        late = b.mm(b.mm(b.mm(b["v"])))
        viewed = b.call("aten::view_as", b.call("aten::relu", b["r"]), late)
        return b.mm(viewed), b.all_reduce(b["x"]), late

    check(program(build))


def test_ops_without_tensor_operands() -> None:
    def build(b: Builder) -> Any:
        ones = b.call("aten::ones", [8, 8])
        return b.add(b.all_reduce(b["x"]), b.mm(ones)), b.all_reduce(b.call("aten::full", [8, 8], 2.0))

    graph = check(program(build)).graph(0)
    assert node(graph, "ones_record").args[1] == 0


def test_numbers_are_no_work() -> None:
    def build(b: Builder) -> Any:
        rows = b.call("aten::sym_size.int", b.mm(b["v"]), 0)
        half = b.call("python::floordiv", rows, 2)
        return b.add(b.all_reduce(b["x"]), b.call("aten::slice.Tensor", b.mm(b["r"]), 0, 0, 1)), half

    original = program(build)
    graph = lowered(original)
    assert is_lowered(graph)
    assert judge(original, graph).problems == []
    assert findings(original) == set()


# ------------------------------------------------------------------------------------------------------------ writing


def test_a_write_waits_for_readers_of_other_streams() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["v"])
        reduced = b.all_reduce(value)
        written = b.call("aten::add_.Tensor", value, b["r"])
        return b.mm(written), b.add(reduced, b["r"]), b.mm(b.mm(b["r"]))

    original = program(build)
    judged = judge(original, check(original).graph(0))
    assert id(judged.op("all_reduce")) in judged.op("add_").before


def test_a_write_through_a_view() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["v"])
        flat = b.view(value, 64)
        reduced = b.all_reduce(b.view(value, 4, 16))
        b.call("aten::add_.Tensor", flat, b.view(b["r"], 64))
        return b.mm(value), reduced, b.mm(b.mm(b["r"]))

    original = program(build)
    judged = judge(original, check(original).graph(0))
    assert id(judged.op("add_")) in judged.op("mm_1").before or id(judged.op("add_")) in judged.op("mm_3").before


def test_ops_that_read_beyond_their_operand_are_not_given_a_copy() -> None:
    """They address its storage: behind a copy of a part they would find nothing."""

    def build(b: Builder) -> Any:
        middle = b.call("aten::slice.Tensor", b.all_reduce(b["x"]), 0, 2, 6)
        top = b.call("aten::as_strided_copy", middle, [4, 4], [8, 1], 0)
        rows = b.call("aten::slice.Tensor", b["r"], 0, 0, 2)
        put = b.call("aten::as_strided_scatter", middle, rows, [2, 8], [8, 1], 16)
        return [top, put, b.mm(b.mm(b["v"]))]

    original = program(build)
    assert not is_lowered(lowered(original))
    assert findings(original) == set()


def test_an_operand_that_is_written_into_is_never_gated() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["v"])
        b.call("aten::add_.Tensor", value, b.all_reduce(b["x"]))
        return value, b.mm(b.mm(b["r"]))

    graph = check(program(build)).graph(0)
    target, addend = node(graph, "add_").args[:2]
    assert target is node(graph, "mm")
    assert addend.name == "add__wait"


def test_a_write_that_cannot_wait_leaves_the_graph_alone() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["v"])
        reduced = b.all_reduce(value)
        b.call("aten::add_.Scalar", value, 1.0)
        return value, reduced, b.mm(b.mm(b["r"]))

    original = program(build)
    assert not is_lowered(lowered(original))
    assert findings(original) == set()


def test_a_write_that_need_not_wait_does_not_hinder() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["v"])
        b.call("aten::mul_.Scalar", value, 2.0)
        return b.add(value, b.all_reduce(b["x"]))

    check(program(build))


def test_a_write_into_a_value_of_the_other_stream_leaves_the_graph_alone() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        b.call("aten::add_.Tensor", reduced, b["r"])
        return reduced, b.mm(b.mm(b["v"]))

    original = program(build)
    assert not is_lowered(lowered(original))
    assert is_lowered(lowered(program(build, streams=StreamSettings((0, 1), (1,)))))
    check(program(build, streams=StreamSettings((0, 1), (1,))))


def test_ops_that_change_a_shape_in_place_leave_the_graph_alone() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["v"])
        return b.call("aten::t_", value), b.all_reduce(b["x"])

    assert not is_lowered(lowered(program(build)))


def test_inputs_that_are_written_into_are_joined() -> None:
    """On compute streams other than the main one, the write is done when the graph ends only since the output waits for it."""

    def build(b: Builder) -> Any:
        written = b.call("aten::add_.Tensor", b["v"], b.mm(b["r"]))
        return b.all_reduce(b["x"], cost=15), b.mm(written, cost=1)

    original = program(build, streams=StreamSettings((3,), (1,)))
    judged = judge(original, check(original).graph(0))
    assert judged.op("add_").stream == 3


# ------------------------------------------------------------------------------------------------------------ outputs


def test_outputs_wait_for_other_streams() -> None:
    original = program(lambda b: (b.all_reduce(b["x"]), b.mm(b["v"]), {"again": b.mm(b["r"])}))
    graph = check(original).graph(0)
    result = graph.find_nodes(op="output")[0].args[0]
    assert result[0].name == "all_reduce_1" or result[0].args[1] == 0
    assert result[1] is node(graph, "mm")
    assert result[2]["again"] is node(graph, "mm_1")


def test_an_output_returned_twice_stays_one() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return reduced, [reduced], b.mm(b["v"])

    graph = check(program(build)).graph(0)
    result = graph.find_nodes(op="output")[0].args[0]
    assert result[0] is result[1][0]


def test_outputs_that_share_storage_are_not_replaced_by_copies() -> None:
    """Another output waits for them."""

    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return reduced, b.view(reduced, 64), b.mm(b["v"])

    graph = check(program(build)).graph(0)
    result = graph.find_nodes(op="output")[0].args[0]
    assert result[1].args[0] is result[0] is node(graph, "all_reduce")
    assert "output_wait" in result[2].name or result[2].name.endswith("_wait")


def test_outputs_none_of_which_may_be_a_copy_leave_the_graph_alone() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        product = b.mm(b["v"])
        return reduced, b.view(reduced, 64), product, b.view(product, 64)

    original = program(build)
    assert not is_lowered(lowered(original))
    assert findings(original) == set()


# --------------------------------------------------------------------------------------------------- what it inserts


def test_everything_inserted_says_what_it_is() -> None:
    def build(b: Builder) -> Any:
        wide = b.call("aten::expand", b.all_reduce(b.call("aten::slice.Tensor", b["x"], 0, 0, 1)), [8, 8])
        return b.add(wide, b.mm(b["v"])), b.mm(b["r"])

    graph = check(program(build)).graph(0)
    seen: set[int] = set()
    for n in graph.nodes:
        if n.name.endswith(("_wait", "_record")):
            assert has_exact_metadata(n)
            storage = n.meta["val"].untyped_storage()._cdata
            assert storage not in seen
            seen.add(storage)


def test_every_op_is_recorded_at_once() -> None:
    original = program(overlapping)
    graph = check(original).graph(0)
    assert {op.node.next.name for op in judge(original, graph).ops} == {
        "all_reduce_record", "mm_record", "mm_1_record", "mm_2_record", "add_record",
    }  # fmt: skip


def test_dependencies_that_are_covered_need_no_token() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        first = b.mm(reduced)
        return b.add(b.add(first, reduced), reduced), b.mm(b.mm(b["v"]))

    graph = check(program(build)).graph(0)
    tokens = [n for n in graph.nodes if n.name.endswith("_wait") and n.args[2]]
    assert [n.name for n in tokens] == ["mm_wait"]


def test_a_graph_of_thousands_of_nodes() -> None:
    def build(b: Builder) -> Any:
        value = other = b["v"]
        for number in range(by_night(10_000, 2_000)):
            if number % 5 == 0:
                other = b.all_reduce(value)
            else:
                value = b.add(value, other) if number % 5 == 4 else b.mm(value)
        return value, other

    gm = program(build).graph_module(0)
    pass_ = Multistream()
    pass_(gm)
    assert pass_.rewrites["lowered"] == 1
    gm.graph.lint()
