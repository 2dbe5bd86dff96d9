"""The dependency graph of overlap passes: edges, collectives, kinds of nodes, orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tcverify.passes.overlap import CommGraph, comm_graph, is_gemm_like, is_valid_order, put_in_order
from tests.support.overlap_orders import movable
from tests.support.overlap_programs import GRID, TP2, Builder, names, program


def read(build: Any, mesh: Any = TP2, rank: int = 0) -> tuple[CommGraph, dict[str, fx.Node]]:
    graph = program(build, mesh).graph_module(rank).graph
    found = comm_graph(graph)
    return found, {node.name: node for node in found.nodes}


def before(found: CommGraph, node: fx.Node) -> set[str]:
    """The calls that a node directly follows."""
    return {earlier.name for earlier in found.predecessors[node] if earlier.op != "placeholder"}


def test_a_write_into_the_operand_of_a_start_follows_its_wait() -> None:
    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"]))
        return b.add_(b["x"], b["y"]), arrived

    found, node = read(build)
    assert before(found, node["add_"]) == {"all_reduce", "wait_tensor"}


def test_so_does_a_write_through_a_view_of_it() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["x"])
        arrived = b.wait(b.start(b.view(value)))
        return b.add_(b.view(value), b["y"]), arrived

    found, node = read(build)
    assert {"all_reduce", "wait_tensor"} <= before(found, node["add_"])


def test_reads_of_the_operand_are_free_to_pass_the_wait() -> None:
    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"]))
        return b.mm(b["x"]), arrived

    found, node = read(build)
    assert before(found, node["mm"]) == set()


def test_a_start_in_place_writes_its_operand_until_its_wait() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["x"])
        b.wait(b.start_in_place(value))
        return b.relu(value)

    found, node = read(build)
    assert before(found, node["relu"]) == {"mm", "wait_tensor"}
    assert found.starts[0].reads == found.starts[0].writes == found.accesses.results[node["mm"]]


def test_metadata_that_does_not_show_what_is_shared_changes_nothing() -> None:
    """As captured graphs often have it: a new storage for what an in-place op or a wait returns."""

    def build(b: Builder) -> Any:
        value = b.mm(b["x"])
        arrived = b.wait(b.start_in_place(value))
        return b.add_(arrived, b["y"]), b.relu(value)

    graph = program(build).graph_module(0).graph
    expected = {node.name: before(comm_graph(graph), node) for node in graph.nodes}
    for change in ("new storages", "no metadata"):
        for node in graph.nodes:
            if node.op == "call_function" and change == "new storages":
                node.meta["val"] = torch.empty_like(node.meta["val"])
            elif node.op == "call_function":
                del node.meta["val"]
        assert {node.name: before(comm_graph(graph), node) for node in graph.nodes} == expected


def test_inputs_that_share_a_storage_are_told_by_their_metadata() -> None:
    def build(b: Builder) -> Any:
        written = b.add_(b["x"], b["w"])
        return b.mm(b["y"]), written

    graph = program(build).graph_module(0).graph
    x, y, _ = (node for node in graph.nodes if node.op == "placeholder")
    y.meta["val"] = x.meta["val"].view(4, 4)
    found = comm_graph(graph)
    mm = next(node for node in graph.nodes if node.name == "mm")
    assert before(found, mm) == {"add_"}


def test_buffers_that_overlap_in_the_arena_keep_out_of_each_others_time() -> None:
    def build(b: Builder) -> Any:
        first, second, apart = b.mm(b["x"]), b.mm(b["y"]), b.mm(b["w"])
        for value, offset in ((first, 0), (second, 32), (apart, 96)):
            value.meta["comm_buffer"] = {"group": "tp", "offset": offset, "nbytes": 64}
        arrived = b.wait(b.start(first))
        return arrived, b.relu(b.view(first)), b.wait(b.start(second)), b.wait(b.start(apart))

    gm = program(build).graph_module(0)
    node = {node.name: node for node in gm.graph.nodes}
    node["relu"].append(node["mm_1"])  # made when all that uses the first one is over
    found = comm_graph(gm.graph)
    assert before(found, node["mm_1"]) == {"mm", "all_reduce", "wait_tensor", "view", "relu"}
    assert before(found, node["mm_2"]) == set()
    del node["mm"].meta["comm_buffer"]
    found = comm_graph(gm.graph)
    assert before(found, node["mm_1"]) == set()


def test_an_attribute_that_is_named_twice_is_one_tensor() -> None:
    gm = program(lambda b: b.relu(b["x"])).graph_module(0)
    gm.register_buffer("kept", torch.ones(4, 4))
    relu = next(node for node in gm.graph.nodes if node.name == "relu")
    with gm.graph.inserting_before(relu):
        first, second = gm.graph.get_attr("kept"), gm.graph.get_attr("kept")
        written = gm.graph.call_function(torch.ops.aten.add_.Tensor, (first, 1))
        read_again = gm.graph.call_function(torch.ops.aten.relu.default, (second,))
    assert written in comm_graph(gm.graph).predecessors[read_again]


def test_communication_keeps_its_order_whatever_the_group() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b["x"], "tp")
        second = b.start(b["y"], "dp")
        third = b.call("tensor_cast::all_reduce", b["w"], b.graph.rank, b.graph.group("tp"))
        b.call("p2p::barrier", "dp")
        return b.wait(second), b.wait(first), third

    found, node = read(build, GRID, rank=3)
    assert before(found, node["all_reduce_1"]) == {"all_reduce"}
    assert before(found, node["all_reduce_2"]) == {"all_reduce_1"}
    assert before(found, node["barrier"]) == {"all_reduce_2"}
    assert before(found, node["wait_tensor"]) == {"all_reduce_1", "barrier"}
    assert [each.group_name for each in found.starts] == ["tp", "dp"]
    assert [each.ranks for each in found.starts] == [(2, 3), (1, 3)]


def test_a_start_may_pass_waits_and_a_wait_may_sink_below_starts() -> None:
    def build(b: Builder) -> Any:
        first = b.wait(b.start(b["x"]))
        second = b.start(b["y"])
        return first, b.wait(second)

    found, node = read(build)
    assert before(found, node["all_reduce_1"]) == {"all_reduce"}


def test_unsafe_reordering_leaves_effects_where_they_are() -> None:
    def build(b: Builder) -> Any:
        first, second = b.start(b["x"]), b.start(b["y"])
        b.call("p2p::barrier", "tp")
        third = b.start(b["w"])
        return b.wait(first), b.wait(second), b.wait(third)

    graph = program(build).graph_module(0).graph
    found = comm_graph(graph, unsafe_collectives_reorder=True)
    edges = {node.name: before(found, node) for node in movable(found)}
    assert edges["all_reduce_1"] == set()
    assert edges["barrier"] == {"all_reduce", "all_reduce_1"}
    assert edges["all_reduce_2"] == {"barrier"}


def test_calls_without_a_meaning_are_effects_that_write_what_they_take() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b["x"])
        value = b.mm(b["y"])
        return b.relu(value), b.wait(first), b.wait(b.start(b["w"]))

    gm = program(build).graph_module(0)
    node = {node.name: node for node in gm.graph.nodes}
    with gm.graph.inserting_after(node["mm"]):
        called = gm.graph.call_method("frobnicate", (node["mm"],))
    found = comm_graph(gm.graph)
    assert found.kind(called) == "effect"
    assert before(found, called) == {"mm", "all_reduce"}
    assert before(found, node["relu"]) == {"mm", "frobnicate"}
    assert before(found, node["all_reduce_1"]) == {"frobnicate"}


def test_declared_orders_are_kept() -> None:
    def build(b: Builder) -> Any:
        first, second = b.mm(b["x"]), b.relu(b["y"])
        second.meta["after"] = ["mm", "no_such_node"]
        first.meta["after"] = ["relu"]  # stands behind: says nothing
        return first, second

    found, node = read(build)
    assert before(found, node["relu"]) == {"mm"}
    assert before(found, node["mm"]) == set()


def test_the_waits_of_a_collective() -> None:
    def build(b: Builder) -> Any:
        both = b.call("_c10d_functional::all_reduce_coalesced", [b["x"], b["y"]], "sum", "tp")
        first, second = b.graph.getitem(both, 0), b.graph.getitem(both, 1)
        arrived = b.wait(second)
        return b.wait(first), arrived, b.wait(second), b.wait(b["w"])

    found, node = read(build)
    (both,) = found.starts
    assert [wait.name for wait in both.waits] == ["wait_tensor", "wait_tensor_1", "wait_tensor_2"]
    assert found.communication_of[both.start] is found.communication_of[node["wait_tensor_1"]] is both
    assert found.completes[node["wait_tensor_3"]] == ()
    assert node["wait_tensor_3"] not in found.communication_of
    assert set(both.writes).isdisjoint(both.reads)
    assert len(both.writes) == len(both.reads) == 2
    assert before(found, node["wait_tensor_2"]) == {"all_reduce_coalesced", "getitem_1", "wait_tensor"}


def test_one_wait_for_several_collectives_on_one_storage() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["x"])
        b.start_in_place(value)
        return b.wait(b.start_in_place(value))

    found, node = read(build)
    assert found.completes[node["wait_tensor"]] == found.starts
    assert found.communication_of[node["wait_tensor"]] is found.starts[1]


def test_a_collective_without_a_wait() -> None:
    def build(b: Builder) -> Any:
        return b.start(b["x"])

    found, _ = read(build)
    assert found.starts[0].waits == ()


def test_kinds() -> None:
    def build(b: Builder) -> Any:
        value = b.view(b.mm(b["x"]))
        turned = b.call("aten::t", value)
        copied = b.call("aten::reshape", turned, [16])
        kept = b.call("aten::reshape", value, [16])
        b.call("p2p::send", value, 1)
        return b.wait(b.start(value)), copied, kept, b.add_(value, b["y"])

    found, node = read(build)
    assert {name: found.kind(each) for name, each in node.items() if each.op == "call_function"} == {
        "mm": "compute", "view": "free", "t": "free", "reshape": "compute", "reshape_1": "free", "send": "effect",
        "all_reduce": "start", "wait_tensor": "wait", "add_": "compute",
    }  # fmt: skip
    assert [name for name, each in node.items() if is_gemm_like(each)] == ["mm"]


def test_orders_are_judged_and_put_in_place() -> None:
    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"]))
        return b.add(arrived, b.mm(b["y"]))

    graph = program(build).graph_module(0).graph
    found = comm_graph(graph)
    x, y, w, start, wait, mm, add, output = found.nodes
    assert put_in_order(graph, found.nodes) == 0
    better = [x, y, w, start, mm, wait, add, output]
    assert is_valid_order(found, better)
    assert put_in_order(graph, better) == 2
    assert names(graph) == ["all_reduce", "mm", "wait_tensor", "add"]
    graph.lint()
    for wrong in (
        better[:-1],
        [*better[:-1], better[0]],
        [x, y, w, wait, start, mm, add, output],
        [y, x, w, *better[3:]],
        [x, y, start, w, *better[4:]],
        [x, y, w, start, mm, wait, output, add],
    ):
        assert not is_valid_order(found, wrong)


@pytest.mark.parametrize("nodes", [10_000])
def test_long_chains(nodes: int) -> None:
    def build(b: Builder) -> Any:
        value = b["x"]
        for number in range(nodes // 4):
            value = b.wait(b.start(b.view(b.relu(value)))) if number % 2 else b.add_(value, b["y"])
        return value

    found, _ = read(build)
    edges = sum(map(len, found.predecessors.values()))
    assert edges < 4 * len(found.nodes)
