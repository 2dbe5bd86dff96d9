"""What passes over asynchronous collectives do with graphs that are odd: nothing known of values, names that stand for nothing,
attributes with two names, symbolic sizes, collectives for which nobody waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tcverify import verify
from tcverify.errors import UsageError
from tcverify.ops import resolve
from tcverify.passes import OVERLAP_PASSES, CommBuffers, ReorderForComputeCommOverlap
from tcverify.passes.overlap.graph import comm_graph
from tcverify.passes.overlap.runtimes import align_runtimes, runtimes
from tcverify.program import Program
from tests.support.async_programs import Functional, edited, kinds, program

REORDERING = (
    "sink_waits", "raise_comms", "reorder_compute_for_overlap", "reorder_communication_preserving_peak_memory",
    "sink_waits_iterative",
)  # fmt: skip
ITERATIVE = REORDERING[3:]
START = "_c10d_functional::all_reduce"
WAIT = "_c10d_functional::wait_tensor"


def two_collectives(b: Functional) -> Any:
    start = b.start(b.relu(b.x, 1e-6), cost_s=3e-6)
    product = b.mm(b.mm(b.y, cost_s=1e-6), cost_s=2e-6)
    first = b.wait(start)
    return b.add(first, b.wait(b.start(product, cost_s=2e-6)), 1e-6), product


def coalesced(b: Functional) -> Any:
    first, second = b.relu(b.x), b.relu(b.y)
    start = b.call("_c10d_functional::all_reduce_coalesced", [first, second], "sum", "dp")
    one, other = b.getitem(start, 0), b.getitem(start, 1)
    arrived = b.wait(one)
    b.wait(other)
    b.call("aten::mul_.Scalar", second, 2.0)  # behind the second wait alone may it be written
    read = b.relu(other)  # and this be read
    return b.wait(b.start(b.relu(arrived))), b.wait(b.start(read)), second


def without_values(made: Program, *names: str) -> Program:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        for name in names or [node.name for node in graph.nodes if node.op == "call_function"]:
            del nodes[name].meta["val"]

    return edited(made, edit)


def declaring(made: Program, name: str, value: Any, key: str = "after") -> Program:
    return edited(made, lambda graph, nodes: nodes[name].meta.update({key: value}))


@pytest.mark.parametrize("name", REORDERING)
@pytest.mark.parametrize("which", [(), ("all_reduce_coalesced",)])
def test_results_that_nothing_tells_apart_are_waited_for_one_by_one(name: str, which: tuple[str, ...]) -> None:
    verdict = verify(OVERLAP_PASSES[name](), without_values(program(coalesced), *which))
    assert verdict.status == "passed", verdict.findings


@pytest.mark.parametrize("name", ITERATIVE)
def test_where_sizes_are_not_known_no_promise_about_memory_is_made(name: str) -> None:
    known = program(two_collectives)
    assert verify(OVERLAP_PASSES[name](memory_budget=1), known).changed
    for unknown in (without_values(known), without_values(known, "relu")):
        verdict = verify(OVERLAP_PASSES[name](memory_budget=1), unknown)
        assert verdict.status == "passed"
        assert not verdict.changed


@pytest.mark.parametrize("name", ITERATIVE)
def test_what_returns_nothing_needs_no_value(name: str) -> None:
    def build(b: Functional) -> Any:
        start = b.start(b.relu(b.x, 1e-6), cost_s=3e-6)
        b.work("p2p::barrier", "dp", cost_s=1e-6)
        one = b.wait(start)
        return one, b.wait(b.start(b.mm(b.y, cost_s=1e-6), cost_s=1e-6)), b.mm(b.y, cost_s=3e-6)

    made = without_values(program(build), "barrier")
    assert verify(OVERLAP_PASSES[name](memory_budget=1), made).changed


@pytest.mark.parametrize("cost", [1e300, math.nan, math.inf, "3", -1.0])
def test_costs_that_are_no_times(cost: Any) -> None:
    made = declaring(program(two_collectives), "mm", cost, "cost_s")
    for name in (*ITERATIVE, "visualize_overlap"):
        OVERLAP_PASSES[name]()(made.graph_module(0))
    assert verify(OVERLAP_PASSES[ITERATIVE[0]](), made).status == "passed"


@pytest.mark.parametrize("after", [None, "mm", [3, ["mm"]], ["nobody"], ["add"]])
def test_declared_orders_that_nobody_can_keep(after: Any) -> None:
    made = declaring(program(two_collectives), "all_reduce_1", after)
    for pass_ in (CommBuffers(), *(make() for make in OVERLAP_PASSES.values())):
        before = [node.name for node in made.graphs[0].nodes]
        graph = pass_(made.graph_module(0)).graph
        assert pass_.name == "comm_buffers" or sorted(node.name for node in graph.nodes) == sorted(before)
    assert verify(OVERLAP_PASSES["raise_comms"](), made).status == "passed"


def test_only_names_are_declared() -> None:
    made = declaring(program(two_collectives), "all_reduce_1", "mm")
    gm = OVERLAP_PASSES["decide_global_ordering_of_comms"]()(made.graph_module(0))
    later = next(node for node in gm.graph.nodes if node.name == "all_reduce_1")
    assert later.meta["after"] == ["all_reduce"]


def test_an_edge_that_the_original_breaks_is_not_held_against_the_pass() -> None:
    made = declaring(program(two_collectives), "mm", ["add"])
    swapped = edited(made, lambda graph, nodes: nodes["relu"].prepend(nodes["mm"]))
    assert kinds("order", made, swapped, order=True) == []
    declared_now = declaring(program(two_collectives), "mm_1", ["add"])
    assert kinds("order", program(two_collectives), declared_now, order=True) == ["broken-order"]


@pytest.mark.parametrize("name", REORDERING)
def test_an_attribute_of_two_names_is_one_tensor(name: str) -> None:
    owner = torch.nn.Module()
    owner.one = torch.nn.Parameter(torch.ones(4, 4))
    owner.other = owner.one
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(resolve(START), (x, "sum", "dp"))
    one, other = graph.get_attr("one"), graph.get_attr("other")
    waited = graph.call_function(resolve(WAIT), (start,))
    write = graph.call_function(resolve("aten::add_.Tensor"), (one, x))
    read = graph.call_function(resolve("aten::mul.Tensor"), (other, other))
    second = graph.call_function(resolve(WAIT), (graph.call_function(resolve(START), (read, "sum", "dp")),))
    graph.output((waited, second))
    order = list(OVERLAP_PASSES[name]()(fx.GraphModule(owner, graph)).graph.nodes)
    assert [node.name for node in order if node.name in (write.name, read.name)] == [write.name, read.name]


@pytest.mark.parametrize("name", [*REORDERING, "comm_buffers"])
def test_a_placeholder_behind_a_call(name: str) -> None:
    made = edited(program(two_collectives), lambda graph, nodes: nodes["relu"].append(nodes["y"]))
    verdict = verify(CommBuffers() if name == "comm_buffers" else OVERLAP_PASSES[name](), made)
    assert verdict.status == "passed", verdict.findings


def test_what_is_under_way_when_the_next_iteration_begins_lives_in_no_buffer() -> None:
    def build(b: Functional) -> Any:
        start = b.start(b.relu(b.x))
        b.start(b.relu(b.y))
        return b.relu(b.wait(start))

    pass_ = CommBuffers(unsafe_alike=True)
    gm = pass_(program(build).graph_module(0))
    assert [buffer.node for buffer in pass_.plan.buffers] == ["relu"]
    assert [node.name for node in gm.graph.nodes if "comm_buffer" in node.meta] == ["relu"]
    verdict = verify(CommBuffers(unsafe_alike=True), program(build))
    assert verdict.status == "passed"
    assert verdict.changed


def test_buffers_leave_symbolic_sizes_symbolic() -> None:
    traced = make_fx(torch.relu, tracing_mode="symbolic")(torch.ones(4, 4))
    fake = next(iter(traced.graph.nodes)).meta["val"]
    env = fake.fake_mode.shape_env
    assert any(type(size) is not int for size in fake.shape)
    graph = fx.Graph()
    x = graph.placeholder("x")
    small = graph.call_function(resolve("aten::relu"), (x,))
    start = graph.call_function(resolve(START), (small, "sum", "dp"))
    graph.output(graph.call_function(resolve(WAIT), (start,)))
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = fake
    gm = fx.GraphModule({}, graph)
    pass_ = CommBuffers(unsafe_alike=True)
    pass_(gm)
    assert not any(pass_.rewrites.values())
    assert not env.guards, "the size has been fixed"


def test_what_a_dropped_wait_declared_is_declared_by_what_follows_it() -> None:
    def build(b: Functional) -> Any:
        start = b.start(b.relu(b.x))
        product = b.mm(b.y)
        sum_ = b.add(b.wait(start), b.y)
        return sum_, product

    made = declaring(declaring(program(build), "wait_tensor", ["mm"]), "add", ["wait_tensor"])
    gm = CommBuffers(unsafe_alike=True)(made.graph_module(0))
    nodes = {node.name: node for node in gm.graph.nodes}
    assert "wait_tensor" not in nodes
    assert nodes["add"].meta["after"] == ["all_reduce", "mm"]


def test_budgets_beyond_all_memory() -> None:
    verdict = verify(OVERLAP_PASSES["sink_waits_iterative"](memory_budget=1e308), program(two_collectives))
    assert verdict.status == "passed"


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (OVERLAP_PASSES["sink_waits_iterative"], {"limit": "2.5"}),
        (CommBuffers, {"symm_mem": None}),
        (CommBuffers, {"symm_mem": [1]}),
        (ReorderForComputeCommOverlap, {"passes": None}),
    ],
)
def test_options_that_cannot_be(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"option {next(iter(options))} of pass"):
        make(**options)


@pytest.mark.parametrize("name", REORDERING)
def test_ranks_that_decide_by_times_of_their_own_may_come_to_other_graphs(name: str) -> None:
    gm = program(two_collectives).graph_module(0)
    gm.meta["alike"] = ("dp",)
    OVERLAP_PASSES[name]()(gm)
    by_time = name not in ("sink_waits", "raise_comms")
    assert gm.meta["alike"] == (() if by_time else ("dp",))
    if by_time:
        pass_: Any = OVERLAP_PASSES[name](align_runtimes=True)
        pass_.gather = lambda own: [own, own]
        gm.meta["alike"] = ("dp",)
        pass_(gm)
        assert gm.meta["alike"] == ("dp",)


def test_times_are_aligned_by_ranks_that_know_none() -> None:
    asked: list[list[float]] = []

    def gather(own: list[float]) -> list[list[float]]:
        asked.append(own)
        return [own, [1e-6] * 9]

    known = comm_graph(program(two_collectives).graph_module(0).graph)
    times = runtimes(known)
    assert times is not None
    assert align_runtimes(None, gather) is None
    assert align_runtimes(times, lambda own: [own, []]) is None
    assert asked == [[]]


@pytest.mark.parametrize("right", [True, False])
def test_a_slice_at_the_place_of_another_rank_is_not_gathered_in_place(right: bool) -> None:
    def of(place: int) -> Any:
        def build(b: Functional) -> Any:
            buffer = b.call("aten::view", b.call("aten::empty.memory_format", [8, 4]), [32])
            shard = b.call("aten::view", b.relu(b.x), [16])
            copied = b.call("fsdp::all_gather_copy_in", [shard], buffer, [16], 16, place)
            gathered = b.call("_c10d_functional::all_gather_into_tensor", b.getitem(copied, 0), 2, "dp")
            return b.relu(b.wait(gathered))

        return build

    made = program(of(0), of(1)) if right else program(of(1), of(0))
    verdict = verify(OVERLAP_PASSES["reinplace_fsdp_all_gather"](), made)
    assert verdict.status == "passed"
    assert verdict.changed == right
