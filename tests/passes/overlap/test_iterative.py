"""The iterative passes: what they move, what stops them, and what they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tcverify.errors import InternalError, UsageError
from tcverify.passes import BUILTIN
from tcverify.passes.overlap import (
    IterativePass,
    ReorderCommunicationPreservingPeakMemory,
    ReorderForComputeCommOverlap,
    SinkWaitsIterative,
    comm_graph,
    iterative_raising,
    runtimes,
)
from tcverify.passes.overlap.iterative import Round
from tcverify.passes.overlap.memory import OrderMemory
from tcverify.program import CollectiveStatistics, InputSpec, spmd_program
from tests.support.overlap_programs import GRID, TP2, US, Builder, names, program

Raise = ReorderCommunicationPreservingPeakMemory


def applied(pass_: IterativePass, build: Callable[[Builder], Any], mesh: Any = TP2) -> list[str]:
    """The calls of rank 0 after the pass, in order."""
    return names(pass_(program(build, mesh).graph_module(0)).graph)


def row(pass_: IterativePass, node: str) -> CollectiveStatistics:
    return next(each for each in pass_.statistics if node in (each.node, each.wait))


def late_start(b: Builder) -> Any:
    """Three products, then a collective that nothing covers."""
    made = [b.mm(b["y"], cost=10), b.mm(b["w"], cost=10), b.mm(b["y"], cost=10)]
    return b.wait(b.start(b["x"], cost=12)), *made


# ---------------------------------------------------------------------------------------------------------- starts rise


def test_a_start_rises_until_it_is_covered() -> None:
    pass_ = Raise(check_memory=True, memory_budget=1, extra_comm_comp_overlap=0)
    assert applied(pass_, late_start) == ["mm", "all_reduce", "mm_1", "mm_2", "wait_tensor"]
    assert pass_.rewrites["moved"]
    found = row(pass_, "all_reduce")
    assert (found.moves, found.grouped, found.limit) == (2, 0, "unexposed by runtime estimates")
    times = (found.communication_s, found.overlapped_s, found.initial_exposed_s, found.final_exposed_s)
    assert times == pytest.approx((12 * US, 12 * US, 12 * US, 0))
    assert (found.op, found.group, found.wait) == ("_c10d_functional::all_reduce", "tp", "")


def test_more_overlap_may_be_asked_for() -> None:
    pass_ = Raise(memory_budget=1, extra_comm_comp_overlap="1.5")
    assert applied(pass_, late_start)[0] == "all_reduce"


def test_memory_sets_the_limit_and_the_budget_moves_it() -> None:
    def build(b: Builder) -> Any:
        big = b.call("aten::cat", [b["y"]] * 6, cost=10)
        small = b.call("aten::sum", big, cost=10)
        return b.wait(b.start(b["x"], cost=40)), small

    tight, loose = Raise(check_memory=True), Raise(check_memory=True, memory_budget="0.5")
    assert applied(tight, build) == ["cat", "sum_1", "all_reduce", "wait_tensor"]
    assert row(tight, "all_reduce").limit.startswith("peak memory, ")
    assert row(tight, "all_reduce").moves == 0
    assert applied(loose, build)[0] == "all_reduce"
    assert (tight.contract.memory_budget, loose.contract.memory_budget) == (0.0, 0.5)


def test_collectives_keep_their_order() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b["y"], cost=10)
        made = b.mm(b["w"], cost=10)
        second = b.start(b["x"], "dp", cost=100)
        return b.wait(first), b.wait(second), made

    pass_ = Raise(memory_budget=1, group_with_collectives=False)
    assert applied(pass_, build, GRID)[:3] == ["all_reduce", "all_reduce_1", "mm"]
    assert row(pass_, "all_reduce_1").limit == "communication under way before it"
    untimed = Raise(memory_budget=1, group_with_collectives=False, use_runtime_estimates=False)
    applied(untimed, build, GRID)
    assert row(untimed, "all_reduce_1").limit == "collective ordering behind all_reduce"


@pytest.mark.parametrize("timed", [True, False])
def test_nothing_goes_past_an_effect(timed: bool) -> None:
    def build(b: Builder) -> Any:
        made = b.mm(b["y"], cost=10)
        b.call("p2p::barrier", "tp", cost=1)
        return b.wait(b.start(b["x"], cost=30)), made

    pass_ = Raise(memory_budget=1, use_runtime_estimates=timed)
    assert applied(pass_, build) == ["mm", "barrier", "all_reduce", "wait_tensor"]
    assert row(pass_, "all_reduce").limit == "collective ordering behind barrier"


def test_what_it_needs_is_taken_along() -> None:
    def build(b: Builder) -> Any:
        made = b.mm(b["y"], cost=30)
        sent = b.start(b.relu(b["x"]), cost=20)
        return b.wait(sent), made

    pass_ = Raise(memory_budget=1, check_memory=True)
    assert applied(pass_, build) == ["relu", "all_reduce", "mm", "wait_tensor"]
    assert (row(pass_, "all_reduce").moves, row(pass_, "all_reduce").grouped) == (1, 1)


def test_without_times_neither_products_nor_waits_are_taken_along() -> None:
    def product(b: Builder) -> Any:
        made = b.relu(b["y"])
        return b.wait(b.start(b.mm(b["x"]))), made

    pass_ = Raise(memory_budget=1, use_runtime_estimates=False)
    assert applied(pass_, product) == ["relu", "mm", "all_reduce", "wait_tensor"]
    assert row(pass_, "all_reduce").limit == "data dependency on mm"
    assert row(pass_, "all_reduce").final_exposed_s is None
    assert not pass_.contract.overlap
    assert applied(Raise(memory_budget=1), product) == ["mm", "all_reduce", "relu", "wait_tensor"]


def waits_between(cost: float) -> Callable[[Builder], Any]:
    """A collective that needs the one before it, which compute covers in part."""

    def build(b: Builder) -> Any:
        first = b.start(b["x"], cost=30)
        covering = b.mm(b["y"], cost=30)
        second = b.start(b.wait(first), cost=cost)
        return b.wait(second), covering

    return build


def test_a_wait_is_not_taken_along_where_that_exposes_more_than_it_hides() -> None:
    pass_ = Raise(memory_budget=1)
    assert applied(pass_, waits_between(20)) == ["all_reduce", "mm", "wait_tensor", "all_reduce_1", "wait_tensor_1"]
    assert row(pass_, "all_reduce_1").limit == "more exposed elsewhere, were it before mm"


def test_a_wait_is_taken_along_where_that_costs_nothing() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b["x"], cost=10)
        early, late = b.mm(b["y"], cost=10), b.mm(b["w"], cost=20)
        second = b.start(b.wait(first), cost=15)
        return b.wait(second), early, late

    pass_ = Raise(memory_budget=1, check_memory=True, extra_comm_comp_overlap=0, group_with_collectives=False)
    assert applied(pass_, build) == ["all_reduce", "mm", "wait_tensor", "all_reduce_1", "mm_1", "wait_tensor_1"]
    assert row(pass_, "all_reduce_1").final_exposed_s == 0


# ----------------------------------------------------------------------------------------------------------- waits sink


def early_wait(b: Builder) -> Any:
    """A collective that is waited for at once, although there is compute behind it."""
    done = b.wait(b.start(b["x"], cost=12))
    first, second = b.mm(b["y"], cost=10), b.mm(b["w"], cost=10)
    return done, b.mm(b["y"], cost=10), first, second


def test_a_wait_sinks_until_its_collective_is_covered() -> None:
    pass_ = SinkWaitsIterative(check_memory=True, memory_budget=1, extra_comm_comp_overlap=0)
    assert applied(pass_, early_wait) == ["all_reduce", "mm", "mm_1", "wait_tensor", "mm_2"]
    found = row(pass_, "wait_tensor")
    assert (found.node, found.moves, found.limit) == ("all_reduce", 2, "unexposed by runtime estimates")
    assert (found.initial_exposed_s, found.final_exposed_s) == pytest.approx((12 * US, 0))


def test_what_needs_a_wait_is_taken_along() -> None:
    def build(b: Builder) -> Any:
        done = b.relu(b.wait(b.start(b["x"], cost=12)))
        return done, b.mm(b["y"], cost=20)

    pass_ = SinkWaitsIterative(check_memory=True, memory_budget=1)
    assert applied(pass_, build) == ["all_reduce", "mm", "wait_tensor", "relu"]
    assert row(pass_, "wait_tensor").grouped == 1
    pass_ = SinkWaitsIterative(memory_budget=1, use_runtime_estimates=False)
    assert applied(pass_, build) == ["all_reduce", "mm", "wait_tensor", "relu"]


def test_a_wait_goes_behind_other_starts_unless_told_not_to() -> None:
    def build(b: Builder) -> Any:
        first = b.wait(b.start(b["x"], cost=12))
        second = b.start(b["y"], cost=12)
        made = b.mm(b["w"], cost=40)
        return first, b.wait(second), made

    free = SinkWaitsIterative(memory_budget=1, check_memory=True)
    assert applied(free, build)[:3] == ["all_reduce", "all_reduce_1", "mm"]
    bound = SinkWaitsIterative(memory_budget=1, swap_with_collectives="false")
    assert applied(bound, build)[:2] == ["all_reduce", "wait_tensor"]
    assert row(bound, "wait_tensor").limit == "collective all_reduce_1 behind it"


def test_memory_keeps_a_wait_where_it_is() -> None:
    def build(b: Builder) -> Any:
        sent = b.exchange(b.relu(b["x"]), cost=12)  # what is sent lives until the wait
        done = b.wait(sent)
        big = b.call("aten::cat", [b["y"]] * 6, cost=10)
        return done, b.call("aten::sum", big, cost=10)

    tight, loose = SinkWaitsIterative(check_memory=True), SinkWaitsIterative(check_memory=True, memory_budget=0.2)
    assert applied(tight, build)[:4] == ["relu", "all_to_all_single", "wait_tensor", "cat"]
    assert row(tight, "wait_tensor").limit.startswith("peak memory, ")
    assert applied(loose, build)[2] == "cat"


def test_aliases_of_a_wait_go_with_it() -> None:
    def build(b: Builder) -> Any:
        sent = b.start(b["x"], cost=12)
        first, again = b.wait(sent), b.wait(sent)
        return b.add(first, again), b.mm(b["y"], cost=20)

    pass_ = SinkWaitsIterative(check_memory=True, memory_budget=1)
    assert applied(pass_, build)[:2] == ["all_reduce", "mm"]


def test_a_wait_that_an_effect_follows_stays_before_what_reads_it() -> None:
    def build(b: Builder) -> Any:
        done = b.wait(b.start(b["x"], cost=12))
        b.call("p2p::send", done, 1, cost=1)
        return done, b.mm(b["y"], cost=20)

    pass_ = SinkWaitsIterative(memory_budget=1)
    assert applied(pass_, build) == ["all_reduce", "wait_tensor", "send", "mm"]
    assert row(pass_, "wait_tensor").limit == "data dependency of send"


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("kind", [Raise, SinkWaitsIterative])
def test_only_so_many_collectives_are_treated(kind: type[IterativePass]) -> None:
    def build(b: Builder) -> Any:
        sent = [b.wait(b.start(b[name], cost=10)) for name in ("x", "y", "w")]
        return *sent, b.mm(b["x"])

    pass_ = kind(limit="2", memory_budget=1)
    applied(pass_, build)
    assert len(pass_.statistics) == 2
    assert len(kind(limit=None).statistics) == 0


@pytest.mark.parametrize("kind", [Raise, SinkWaitsIterative])
def test_options_are_read_and_refused(kind: type[IterativePass]) -> None:
    assert BUILTIN[kind.name] is kind
    for option, value in (("memory_budget", "-1"), ("limit", "few"), ("extra_comm_comp_overlap", "inf")):
        with pytest.raises(UsageError, match=option):
            kind(**{option: value})
    assert kind().contract.order
    assert kind().contract.overlap
    unsafe = kind(unsafe_collectives_reorder=True)
    assert not unsafe.contract.order
    assert not unsafe.contract.collective_order


def test_unsafe_reordering_lets_starts_pass_each_other() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b["y"], cost=10)
        second = b.start(b["x"], cost=10)
        return b.wait(second), b.mm(b["w"], cost=10), b.wait(first)

    safe, unsafe = Raise(memory_budget=1), Raise(memory_budget=1, unsafe_collectives_reorder=True)
    assert applied(safe, build)[0] == "all_reduce"
    assert row(safe, "all_reduce_1").moves == 0
    untimed = Raise(memory_budget=1, unsafe_collectives_reorder=True, use_runtime_estimates=False)
    assert applied(untimed, build)[0] == "all_reduce_1"
    assert unsafe.unsafe


def test_wrong_memory_is_noticed_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect that incremental accounting is prone to: the last use of a storage stays with its old owner."""

    def build(b: Builder) -> Any:
        made = b.relu(b["y"])
        return b.mm(made, cost=10), b.wait(b.start(b.relu(made), cost=30))

    Raise(memory_budget=1, check_memory=True)(program(build).graph_module(0))
    monkeypatch.setattr(OrderMemory, "behind", lambda self, candidate, group: [])
    with pytest.raises(InternalError, match="incremental memory differs"):
        Raise(memory_budget=1, check_memory=True)(program(build).graph_module(0))


def test_a_device_tells_the_times_that_the_program_does_not() -> None:
    def build(b: Builder) -> Any:
        made = b.mm(b["y"], cost=None)
        return b.wait(b.start(b["x"], cost=None)), made

    known, unknown = Raise(memory_budget=1, device="h100-sxm"), Raise(memory_budget=1)
    assert unknown.contract.overlap
    assert not known.contract.overlap  # the device is not the program's
    applied(known, build)
    applied(unknown, build)
    assert row(known, "all_reduce").communication_s is not None
    assert row(unknown, "all_reduce").communication_s is None


def test_times_are_those_that_the_program_tells_but_of_what_takes_none() -> None:
    def build(b: Builder) -> Any:
        b.call("inductor::resize_storage_bytes_", b["y"], 64, cost=50)
        return b.wait(b.start(b["x"], cost=0.25))

    found = comm_graph(program(build).graph_module(0).graph)
    times = runtimes(found)
    assert times is not None
    told = {node.name: time for node, time in times.items() if node.op == "call_function"}
    assert told == {"resize_storage_bytes_": 0.0, "all_reduce": pytest.approx(0.25 * US), "wait_tensor": 0.0}


def test_a_list_of_passes_gives_the_statistics_of_all() -> None:
    both = ReorderForComputeCommOverlap(passes=["sink_waits_iterative", "reorder_communication_preserving_peak_memory"])
    both(program(early_wait).graph_module(0))
    assert [(each.node, each.wait) for each in both.statistics] == [("all_reduce", "wait_tensor"), ("all_reduce", "")]
    assert both.contract.memory_budget == 0.0
    assert both.contract.overlap


def test_programs_without_asynchronous_collectives_are_left_alone() -> None:
    made = spmd_program(TP2, [InputSpec("x", (4,))], lambda b: b.call("aten::relu", b.input("x")))
    pass_ = Raise()
    pass_(made.graph_module(0))
    assert not any(pass_.rewrites.values())
    assert pass_.statistics == ()


def test_an_order_that_exposes_more_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a step that delays something is not recognised, the order as a whole is."""
    monkeypatch.setattr(iterative_raising.Rise, "delays", lambda self, candidate: False)
    pass_ = Raise(memory_budget=1)
    before = ["all_reduce", "mm", "wait_tensor", "all_reduce_1", "wait_tensor_1"]
    assert applied(pass_, waits_between(20)) == before
    assert "gives up an order" in caplog.text
    assert not any(pass_.rewrites.values())


def test_an_order_that_takes_more_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "too_much", lambda self, peak: None)
    with pytest.raises(InternalError, match="raised peak memory"):
        SinkWaitsIterative()(program(early_wait_of_big).graph_module(0))
    monkeypatch.undo()
    SinkWaitsIterative()(program(early_wait_of_big).graph_module(0))


def early_wait_of_big(b: Builder) -> Any:
    """What is sent lives until the wait, which stands before the making of something big."""
    done = b.wait(b.exchange(b.relu(b["x"]), cost=12))
    big = b.call("aten::cat", [b["y"]] * 6, cost=10)
    return done, b.call("aten::sum", big, cost=10)


def test_a_wait_takes_no_wait_for_another_collective_along() -> None:
    def build(b: Builder) -> Any:
        first = b.wait(b.start(b["x"], cost=40))
        second = b.wait(b.start(first, cost=40))
        return second, b.mm(b["y"], cost=10), b.mm(b["w"], cost=10)

    pass_ = SinkWaitsIterative(memory_budget=1)
    applied(pass_, build)
    assert row(pass_, "wait_tensor").limit == "data dependency of wait_tensor_1"
