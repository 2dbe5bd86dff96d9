"""The greedy overlap passes on programs written by hand: what moves, and what does not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tcverify.errors import UsageError
from tcverify.ops import WAIT, resolve
from tcverify.passes import BUILTIN, DEFAULT, DESCRIPTIONS
from tcverify.passes.overlap import (
    OVERLAP_PASSES,
    DecideGlobalOrderingOfComms,
    RaiseComms,
    ReorderComputeForOverlap,
    ReorderForComputeCommOverlap,
    SinkWaits,
)
from tcverify.verification.verifier import verify
from tests.support.overlap_programs import GRID, US, Builder, after, names, program

GREEDY = (SinkWaits, RaiseComms, ReorderComputeForOverlap)


def waited_for_at_once(b: Builder) -> Any:
    """A collective that two products could hide, and a second one behind them."""
    arrived = b.wait(b.start(b["x"]))
    used = b.relu(arrived)
    product = b.mm(b.mm(b["y"]))
    return used, b.wait(b.start(product))


# ---------------------------------------------------------------------------------------------------------- sink_waits


def test_waits_sink_to_where_they_are_needed() -> None:
    assert after(SinkWaits(), waited_for_at_once) == [
        "all_reduce", "mm", "mm_1", "all_reduce_1", "wait_tensor", "relu", "wait_tensor_1",
    ]  # fmt: skip


def test_views_and_items_sink_with_their_wait() -> None:
    def build(b: Builder) -> Any:
        both = b.call("_c10d_functional::all_reduce_coalesced", [b["x"], b["y"]], "sum", "tp")
        first, second = b.wait(b.graph.getitem(both, 0)), b.wait(b.graph.getitem(both, 1))
        turned = b.view(first)
        return b.mm(b["y"]), turned, b.relu(turned), second

    assert after(SinkWaits(), build) == [
        "all_reduce_coalesced", "getitem", "getitem_1", "mm", "wait_tensor", "view", "relu", "wait_tensor_1",
    ]  # fmt: skip


def test_a_wait_stays_before_a_write_into_what_is_sent() -> None:
    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"]))
        return b.add_(b["x"], b["y"]), b.mm(b["y"]), arrived

    assert after(SinkWaits(), build) == ["all_reduce", "mm", "wait_tensor", "add_"]


def test_waits_with_nothing_to_hide_stay() -> None:
    def build(b: Builder) -> Any:
        return b.mm(b.wait(b.start(b.relu(b.wait(b.start(b["x"]))))))

    for kind in GREEDY:
        gm = program(build).graph_module(0)
        before, nodes = gm.code, list(gm.graph.nodes)
        pass_ = kind()
        assert pass_(gm) is gm
        assert (gm.code, list(gm.graph.nodes), pass_.rewrites) == (before, nodes, {"moved": 0})


# --------------------------------------------------------------------------------------------------------- raise_comms


def test_starts_rise_with_what_they_need_and_nothing_else() -> None:
    def build(b: Builder) -> Any:
        unrelated = b.relu(b["w"])
        product = b.mm(b["y"])
        arrived = b.wait(b.start(b["x"]))
        return unrelated, arrived, b.wait(b.start(product))

    assert after(RaiseComms(), build) == ["all_reduce", "mm", "all_reduce_1", "relu", "wait_tensor", "wait_tensor_1"]


def test_starts_of_other_groups_rise_no_further_than_the_start_before() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b.mm(b["x"]), "tp")
        arrived = b.wait(first)
        return arrived, b.wait(b.start(b["y"], "dp"))

    assert after(RaiseComms(), build, GRID) == ["mm", "all_reduce", "all_reduce_1", "wait_tensor", "wait_tensor_1"]


def test_starts_do_not_pass_opaque_communication() -> None:
    def build(b: Builder) -> Any:
        value = b.mm(b["x"])
        b.call("p2p::barrier", "tp")
        received = b.call("p2p::recv", value, 1) if b.graph.representative == 0 else b.relu(value)
        arrived = b.wait(b.start(b["y"]))
        return received, arrived

    assert after(RaiseComms(), build) == ["mm", "barrier", "recv", "all_reduce", "wait_tensor"]


def test_only_when_told_to_starts_change_places() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b.mm(b.wait(b.start(b["x"]))))
        return b.wait(first), b.wait(b.start(b["y"]))

    safe, unsafe = RaiseComms(), RaiseComms(unsafe_collectives_reorder="true")
    assert after(safe, build) == [
        "all_reduce", "wait_tensor", "mm", "all_reduce_1", "all_reduce_2", "wait_tensor_1", "wait_tensor_2",
    ]  # fmt: skip
    moved = SinkWaits(unsafe_collectives_reorder="true")
    assert after(moved, build).index("all_reduce_2") < after(moved, build).index("all_reduce_1")
    assert safe.contract.collective_order
    assert not unsafe.contract.collective_order
    assert not moved.contract.collective_order
    assert RaiseComms.contract.collective_order


# -------------------------------------------------------------------------------------------- reorder_compute_for_overlap


def hidden(graph: fx.Graph, start: str, wait: str) -> list[str]:
    order = names(graph)
    return order[order.index(start) + 1 : order.index(wait)]


def test_a_collective_is_covered_for_as_long_as_it_takes() -> None:
    """Three products of 10 µs cover 30 µs; the fourth one is left for the second collective."""

    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"], cost=30))
        second = b.wait(b.start(b.relu(arrived), cost=10))
        return second, [b.mm(b["y"]) for _ in range(4)]

    graph = ReorderComputeForOverlap()(program(build).graph_module(0)).graph
    assert hidden(graph, "all_reduce", "wait_tensor") == ["mm", "mm_1", "mm_2"]
    assert hidden(graph, "all_reduce_1", "wait_tensor_1") == ["mm_3"]


def test_compute_that_the_next_collective_needs_goes_first() -> None:
    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"], cost=10))
        unrelated = b.mm(b["w"], cost=10)
        needed = b.mm(b["y"], cost=10)
        second = b.wait(b.start(b.add(needed, arrived), cost=10))
        return second, unrelated

    assert after(ReorderComputeForOverlap(), build) == [
        "all_reduce", "mm_1", "wait_tensor", "add", "all_reduce_1", "mm", "wait_tensor_1",
    ]  # fmt: skip


def test_a_start_that_is_ready_does_not_wait_for_long_compute() -> None:
    def build(b: Builder) -> Any:
        long = b.mm(b["w"], cost=100)
        return long, b.wait(b.start(b["x"], cost=10)), b.wait(b.start(b["y"], cost=10))

    assert after(ReorderComputeForOverlap(), build) == [
        "all_reduce",
        "all_reduce_1",
        "mm",
        "wait_tensor",
        "wait_tensor_1",
    ]


def test_without_costs_a_product_covers_a_collective() -> None:
    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"], cost=None))
        second = b.wait(b.start(b.relu(arrived, cost=None), cost=None))
        small = [b.add(b["y"], b["w"], cost=None) for _ in range(2)]
        return second, small, [b.mm(b["y"], cost=None) for _ in range(3)]

    graph = ReorderComputeForOverlap()(program(build).graph_module(0)).graph
    assert hidden(graph, "all_reduce", "wait_tensor") == ["add", "add_1", "mm"]
    assert hidden(graph, "all_reduce_1", "wait_tensor_1") == ["mm_1", "mm_2"]


def test_times_of_all_ranks_decide_where_that_is_asked_for() -> None:
    """This rank takes its products for slow; the others need three to cover the collective."""

    def build(b: Builder) -> Any:
        arrived = b.wait(b.start(b["x"], cost=30))
        return b.wait(b.start(b.relu(arrived))), [b.mm(b["y"], cost=40) for _ in range(3)]

    def gather(own: list[float]) -> list[list[float]]:
        fast = [min(seconds, 10 * US) if seconds > 35 * US else seconds for seconds in own]
        return [own, fast, fast]

    alone, together = ReorderComputeForOverlap(), ReorderComputeForOverlap(align_runtimes="true")
    together.gather = gather
    counts = [
        len(hidden(p(program(build).graph_module(0)).graph, "all_reduce", "wait_tensor")) for p in (alone, together)
    ]
    assert counts == [1, 3]


# -------------------------------------------------------------------------------------- decide_global_ordering_of_comms


def test_the_order_of_communication_is_declared() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b["x"])
        b.call("p2p::barrier", "tp")
        second = b.start(b["y"])
        second.meta["after"] = ["mm"]
        return b.mm(b["x"]), b.wait(first), b.wait(second)

    gm = program(build).graph_module(0)
    before = names(gm.graph)
    pass_ = DecideGlobalOrderingOfComms()
    pass_(gm)
    declared = {node.name: node.meta["after"] for node in gm.graph.nodes if "after" in node.meta}
    assert declared == {"barrier": ["all_reduce"], "all_reduce_1": ["mm", "barrier"]}
    assert (names(gm.graph), pass_.rewrites) == (before, {"declared": 2})
    pass_(gm)
    assert pass_.rewrites == {"declared": 0}


def test_what_is_declared_holds_for_passes_that_may_reorder_collectives() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b.mm(b.wait(b.start(b["x"]))))
        return b.wait(first), b.wait(b.start(b["y"]))

    gm = program(build).graph_module(0)
    DecideGlobalOrderingOfComms()(gm)
    RaiseComms(unsafe_collectives_reorder=True)(gm)
    starts = [name for name in names(gm.graph) if name.startswith("all_reduce")]
    assert starts == ["all_reduce", "all_reduce_1", "all_reduce_2"]


# ------------------------------------------------------------------------------------------------------- lists of passes


def test_a_list_of_passes_runs_in_order() -> None:
    ran: list[str] = []

    def own(gm: fx.GraphModule) -> None:
        ran.append(",".join(names(gm.graph)))

    pass_ = ReorderForComputeCommOverlap(passes=["raise_comms", own, SinkWaits, RaiseComms(enabled=False)])
    gm = program(waited_for_at_once).graph_module(0)
    pass_(gm)
    assert ran == [",".join(after(RaiseComms(), waited_for_at_once))]
    assert names(gm.graph) == after(SinkWaits(), waited_for_at_once)
    assert pass_.rewrites == {"raise_comms": 5, "own": 0, "sink_waits": 0}
    assert not pass_.contract.order  # nothing is known of the function


def test_stages_that_undo_each_other_have_rewritten_nothing() -> None:
    def swap(gm: fx.GraphModule) -> None:
        first, second = list(gm.graph.nodes)[:2]  # inputs
        second.append(first)

    def turn(gm: fx.GraphModule) -> None:
        swap(gm)

    gm = program(waited_for_at_once).graph_module(0)
    once, twice = ReorderForComputeCommOverlap(passes=[swap]), ReorderForComputeCommOverlap(passes=[swap, turn])
    twice(gm)
    assert twice.rewrites == {"swap": 0, "turn": 0}
    once(gm)
    assert once.rewrites == {"swap": 1}


def test_a_callable_may_return_another_module() -> None:
    def other(gm: fx.GraphModule) -> fx.GraphModule:
        return SinkWaits()(program(waited_for_at_once).graph_module(0))

    pass_ = ReorderForComputeCommOverlap(passes=[other])
    gm = program(waited_for_at_once).graph_module(0)
    assert pass_(gm) is gm
    assert names(gm.graph) == after(SinkWaits(), waited_for_at_once)
    assert pass_.rewrites == {"other": 1}


def test_a_list_may_be_an_option() -> None:
    pass_ = ReorderForComputeCommOverlap(passes="raise_comms, sink_waits,")
    assert [stage.name for stage in pass_.stages] == ["raise_comms", "sink_waits"]
    assert pass_.contract.order
    assert pass_.contract.collective_order


@pytest.mark.parametrize("passes", ["sink_wait", "raise_comms,reorder_for_compute_comm_overlap", [3]])
def test_what_is_no_pass_is_an_error(passes: Any) -> None:
    with pytest.raises(UsageError) as error:
        ReorderForComputeCommOverlap(passes=passes)
    if isinstance(passes, str):
        assert "sink_waits, raise_comms" in str(error.value.hint)
    else:
        assert "3" in error.value.message


# ----------------------------------------------------------------------------------------------------------------- all


def test_all_have_a_name_and_a_description() -> None:
    for name, make in {**OVERLAP_PASSES, "reorder_for_compute_comm_overlap": ReorderForComputeCommOverlap}.items():
        assert make().name == name
        assert BUILTIN[name] is make
        assert name in DEFAULT
    assert set(DESCRIPTIONS) == set(BUILTIN)


def test_captured_graphs_without_groups_and_costs() -> None:
    ops = torch.ops._c10d_functional

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(x, 2, "0"))
        used = gathered.relu()
        product = y @ y
        x.add_(1)
        return used, ops.wait_tensor(ops.reduce_scatter_tensor(product, "sum", 2, "0")), x.view(-1)

    gm = make_fx(step, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4))
    ReorderComputeForOverlap()(gm)
    assert names(gm.graph) == [
        "all_gather_into_tensor", "mm", "reduce_scatter_tensor", "wait_tensor", "relu", "add_", "view", "wait_tensor_1",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", GREEDY)
def test_graphs_that_are_lowered_to_streams_are_left_alone(kind: Any) -> None:
    gm = program(waited_for_at_once).graph_module(0)
    relu = next(node for node in gm.graph.nodes if node.name == "relu")
    with gm.graph.inserting_before(relu):
        gate = gm.graph.call_function(resolve(WAIT), (relu.args[0], 0, []))
    relu.replace_input_with(relu.args[0], gate)
    before = names(gm.graph)
    kind()(gm)
    assert names(gm.graph) == before


@pytest.mark.parametrize("kind", [*GREEDY, ReorderForComputeCommOverlap])
def test_programs_of_two_groups_pass_every_check(kind: Any) -> None:
    def build(b: Builder) -> Any:
        results = []
        for dim, value in itertools.product(("tp", "dp"), ("x", "y")):
            product = b.mm(b[value])
            results.append(b.relu(b.wait(b.start(product, dim))))
            b.call("p2p::barrier", dim)
        b.add_(b["x"], b["y"])
        return results

    verdict = verify(kind(), program(build, GRID), deep=True)
    assert verdict, (verdict.findings, verdict.doubts)
    assert verdict.changed
