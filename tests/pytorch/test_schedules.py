"""Orders of Inductor's scheduler: planted defects are found, and torch's passes are found to be sound where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch._inductor import comms

from tcverify import verify
from tcverify.program import InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch.schedules import (
    NodeSchedule,
    OrderPromise,
    ScheduleStep,
    defects_of_call,
    find_rank_disagreement,
    peak_bytes,
    resolve_waits,
)
from tcverify.pytorch.scheduling import (
    PreservePeakMemory,
    RaiseComms,
    ReorderCompute,
    SinkWaits,
    SinkWaitsIterative,
)
from tcverify.pytorch.subjects import release

MESH = Mesh.grid({"tp": 2})
C10D = "_c10d_functional::"


def step(name: str, reads: str = "", writes: str = "", role: Any = "compute", group: str | None = None) -> ScheduleStep:
    return ScheduleStep(name, "op", frozenset(reads.split()), frozenset(writes.split()), role, group)


def schedule(*steps: ScheduleStep, sizes: dict[str, int] | None = None, kept: str = "") -> NodeSchedule:
    placed = [replace(one, place=place) for place, one in enumerate(steps)]
    return NodeSchedule(tuple((one,) for one in placed), sizes or {}, frozenset(kept.split()))


def judged(given: NodeSchedule, order: str, promise: OrderPromise | None = None) -> list[str]:
    units = [[name] for name in order.split()]
    return [one.aspect for one in defects_of_call(given, units, promise or OrderPromise())]


# ------------------------------------------------------------------------------------------------ on plain data


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (step("a", "", "s"), step("b", "s", "t")),
        (step("a", "s", "t"), step("b", "", "s")),
        (step("a", "", "s"), step("b", "", "s")),
    ],
    ids=["read after write", "write after read", "write after write"],
)  # fmt: skip
def test_nodes_that_share_a_storage_keep_their_order(first, second):
    given = schedule(first, second)
    assert judged(given, "b a") == ["dependency"]
    assert judged(given, "a b") == []


def test_nodes_that_read_one_storage_may_swap():
    assert judged(schedule(step("a", "s", "t"), step("b", "s", "u")), "b a") == []


def test_a_wait_reads_what_its_collective_reads():
    start, wait = step("a", "x", "y", "collective", "tp"), step("b", "y", "y", "wait")
    given = schedule(*resolve_waits([start, wait, step("c", "", "x")]))
    assert judged(given, "a c b") == ["dependency"]
    assert judged(schedule(*resolve_waits([start, wait, step("c", "x", "z")])), "a c b") == []


def test_waits_for_one_result_may_swap_and_what_reads_it_may_not():
    start = step("a", "x", "y", "collective", "tp")
    given = schedule(start, step("b", "y", "y", "wait"), step("c", "y", "y", "wait"), step("d", "y", "z"))
    assert judged(given, "a c b d") == []
    assert judged(given, "a c d b") == ["dependency"]
    assert judged(given, "c a b d") == ["dependency"]


def test_waits_for_results_of_one_collective_may_swap():
    start = step("a", "s t", "s t", "collective", "tp")
    waits = step("b", "s", "s", "wait"), step("c", "t", "t", "wait")
    given = schedule(*resolve_waits([start, *waits, step("d", "t", "u")]))
    assert judged(given, "a c b d") == []
    assert judged(given, "a b d c") == ["dependency"]


def test_a_wait_for_one_result_of_several_reads_the_operand_that_it_names():
    start = step("a", "x y", "p q", "collective", "tp")
    waits = step("b", "x p", "p", "wait"), step("c", "y q", "q", "wait")
    given = schedule(*resolve_waits([start, *waits, step("d", "", "x")]))
    assert judged(given, "a b d c") == []
    assert judged(given, "a d b c") == ["dependency"]


@pytest.mark.parametrize(("order", "what"), [("a", "lost"), ("a b b", "twice"), ("a b c", "new")])
def test_other_nodes_than_were_given_are_found(order, what):
    given = schedule(step("a"), step("b"))
    (found,) = defects_of_call(given, [[name] for name in order.split()], OrderPromise())
    assert found.aspect == "nodes"
    assert what in found.message


def test_the_order_of_collectives_counts_where_it_is_promised():
    given = schedule(step("a", "x", "y", "collective", "tp"), step("b", "z", "w", "collective", "dp"))
    assert judged(given, "b a") == ["collective-order"]
    assert judged(given, "b a", OrderPromise(order=False)) == []


def test_opaque_communication_keeps_its_place():
    given = schedule(step("a", "x", "y", "collective", "tp"), step("b", role="opaque"), step("c", "v", "w"))
    assert judged(given, "b a c", OrderPromise(order=False)) == ["opaque-order"]
    assert judged(given, "c a b", OrderPromise(order=False)) == []


def test_ranks_that_order_collectives_differently_are_found():
    given = schedule(step("a", "x", "y", "collective", "tp"), step("b", "z", "w", "collective", "tp"))
    turned = given.in_order_of([["b"], ["a"]])
    groups = [{"tp": (0, 1)}, {"tp": (0, 1)}]
    found = find_rank_disagreement([given, given], [given, turned], groups)
    assert found is not None
    assert (found.aspect, found.rank) == ("collective-order", 1)
    assert find_rank_disagreement([given, given], [turned, turned], groups) is None
    assert find_rank_disagreement([given, given], [given, turned], [{"tp": (0,)}, {"tp": (1,)}]) is None


def test_nodes_may_return_to_the_order_of_the_graph():
    read, write = step("a", "s", "t"), step("b", "", "s")
    assert judged(schedule(read, write).in_order_of([["b"], ["a"]]), "a b") == []
    graph = schedule(step("a", "x", "y", "collective", "tp"), step("b", "z", "w", "collective", "tp"))
    turned = graph.in_order_of([["b"], ["a"]])  # by a pass before this one
    assert judged(turned, "a b") == []
    groups = [{"tp": (0, 1)}, {"tp": (0, 1)}]
    assert find_rank_disagreement([turned, graph], [graph, graph], groups) is None
    assert find_rank_disagreement([turned, turned], [turned, graph], groups) is not None


def test_peak_memory_is_that_of_lifetimes():
    given = schedule(
        step("a", "", "s"), step("b", "s", "t"), step("c", "", "u"), step("d", "u t", "v"),
        sizes={"s": 8, "t": 1, "u": 8, "v": 1}, kept="v",
    )  # fmt: skip
    assert peak_bytes(given) == 10  # t, u and v
    assert judged(given, "c a b d", OrderPromise(budget=0.5)) == ["peak-memory"]  # u beside s and t: 17
    assert judged(given, "c a b d", OrderPromise(budget=0.7)) == []
    assert judged(given, "c a b d") == []


def test_pieces_are_allocated_with_the_whole():
    given = schedule(step("a", "", "p"), step("b", "", "t"), step("c", "t", "q"), sizes={"w": 8, "t": 1})
    whole = NodeSchedule(given.units, given.sizes, whole={"p": "w", "q": "w"})
    assert peak_bytes(whole) == 9
    assert peak_bytes(given) == 1


# ------------------------------------------------------------------------------------------------ in Inductor


def program(write: Callable[[Any], Any] | None = None) -> Program:
    """Two all_reduces, whose results are added to what has been computed meanwhile."""

    def build(b: Any) -> Any:
        x, w = b.input("x"), b.input("w")
        h = b.call("aten::relu", b.call("aten::mm", x, w))
        first = b.call(C10D + "all_reduce", h, "sum", "tp")
        one = b.call(C10D + "wait_tensor", first)
        second = b.call(C10D + "all_gather_into_tensor", b.call("aten::mm", w, x), 2, "tp")
        k = b.call("aten::mm", h, w)
        two = b.call(C10D + "wait_tensor", second)
        return b.call("aten::add.Tensor", one, k), b.call("aten::sin", two)

    return spmd_program(MESH, [InputSpec("x", (4, 4)), InputSpec("w", (4, 4))], write or build)


@contextlib.contextmanager
def planted(function: str, change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Let a pass change the order that it has made."""
    actual = getattr(comms, function)
    with mock.patch.object(comms, function, lambda nodes: change(list(actual(nodes)))):
        yield


def kinds(made: Any, one: Program) -> set[str]:
    return {finding.kind for finding in verify(made, one).findings}


def swap(nodes: list[Any], first: Callable[[Any], bool], second: Callable[[Any], bool]) -> list[Any]:
    """Exchange the first nodes of two kinds."""
    a = next(i for i, node in enumerate(nodes) if first(node))
    b = next(i for i, node in enumerate(nodes) if second(node) and i > a)
    nodes[a], nodes[b] = nodes[b], nodes[a]
    return nodes


@pytest.mark.parametrize("made", [SinkWaits, RaiseComms, ReorderCompute, PreservePeakMemory, SinkWaitsIterative])
def test_passes_of_torch_are_sound_on_a_sound_program(made):
    subject = made()
    assert verify(subject, program()).status == "passed"
    assert subject._given, "the pass was not called"
    assert any(step.role == "collective" for step in subject._given[-1].steps)


def coalesced(b: Any) -> Any:
    """One collective of two operands in place, the second of which is read."""
    x, w = b.input("x"), b.input("w")
    both = b.call(C10D + "all_reduce_coalesced", [b.call("aten::mm", x, w), x], "sum", "tp")
    sums = [b.call(C10D + "wait_tensor", b.getitem(both, number)) for number in range(2)]
    return b.call("aten::sin", sums[1])


def test_operands_of_one_collective_are_storages_of_their_own():
    subject = SinkWaits()
    assert verify(subject, program(coalesced)).status == "passed"
    given = subject._given[-1]
    (start,) = (step for step in given.steps if step.role == "collective")
    waits = [step for step in given.steps if step.role == "wait"]
    assert len(start.writes & given.sizes.keys()) == 2
    assert [len(one.writes & start.writes) for one in waits] == [1, 1]
    assert waits[0].writes.isdisjoint(waits[1].writes)


def test_what_one_result_of_several_is_made_of_may_be_written_once_that_one_is_there():
    def build(b: Any) -> Any:
        x, w = b.input("x"), b.input("w")
        both = b.call(C10D + "reduce_scatter_tensor_coalesced", [x, w], "sum", 2, "tp")
        sums = [b.call(C10D + "wait_tensor", b.getitem(both, number)) for number in range(2)]
        b.call("aten::mul_.Tensor", x, 0.5)
        return sums

    subject = SinkWaits()
    assert verify(subject, program(build)).status == "passed"
    waits = [step for step in subject._given[-1].steps if step.role == "wait"]
    assert len(waits) == 2
    assert waits[0].reads.isdisjoint(waits[1].reads)


def test_an_operand_of_several_that_is_written_after_the_collective_is_found():
    def late(nodes: list[Any]) -> list[Any]:
        place = next(i for i, node in enumerate(nodes) if comms.contains_collective(node))
        return [*nodes[: place - 1], nodes[place], nodes[place - 1], *nodes[place + 1 :]]

    with planted("sink_waits", late):
        assert "broken-order" in kinds(SinkWaits(), program(coalesced))


def test_a_pass_moves_waits():
    subject = SinkWaits()
    assert verify(subject, program()).status == "passed"
    assert [one.name for one in subject._given[-1].steps] != [one.name for one in subject._made[-1].steps]


def test_a_pass_that_moves_nodes_has_changed_the_program():
    moved = verify(SinkWaits(), program())
    assert moved.changed
    with mock.patch.object(comms, "sink_waits", list):
        kept = verify(SinkWaits(), program())
    assert not kept.changed


def test_a_wait_before_its_collective_is_found():
    with planted("sink_waits", lambda nodes: swap(nodes, comms.contains_collective, comms.contains_wait)):
        assert "broken-order" in kinds(SinkWaits(), program())


def test_collectives_that_swap_are_found():
    def change(nodes: list[Any]) -> list[Any]:
        return swap(nodes, comms.contains_collective, comms.contains_collective)

    with planted("raise_comms", change):
        assert "reordered-collectives" in kinds(RaiseComms(), program())


def independent(b: Any) -> Any:
    """Two collectives of inputs, which may come in any order."""
    given = [b.input(name) for name in "xw"]
    started = [b.call(C10D + "all_gather_into_tensor", one, 2, "tp") for one in given]
    return [b.call(C10D + "wait_tensor", one) for one in started]


def test_collectives_that_swap_on_one_rank_are_found_where_their_order_is_not_promised():
    import torch.distributed as dist

    def change(nodes: list[Any]) -> list[Any]:
        if dist.get_rank() == 1:
            swap(nodes, comms.contains_collective, comms.contains_collective)
        return nodes

    class Free(RaiseComms):
        def promise(self, options: Any) -> OrderPromise:
            return OrderPromise(order=False)

    with planted("raise_comms", change):
        (finding,) = verify(Free(), program(independent)).findings
    assert (finding.kind, finding.rank) == ("reordered-collectives", 1)
    assert verify(Free(), program(independent)).status == "passed"


def test_a_pass_that_takes_more_memory_than_it_may_is_found():
    """Planted: every product comes at once, before what frees the products before it."""

    def build(b: Any) -> Any:
        x = b.input("x")
        total = b.call(C10D + "wait_tensor", b.call(C10D + "all_reduce", x, "sum", "tp"))
        for _ in range(4):
            made = b.call("aten::mm", x, x)
            total = b.call("aten::mm", total, made)
        return total

    name = "reorder_communication_preserving_peak_memory"
    budget = {"reorder_iterative_peak_memory_budget": 0.0}

    def eager(nodes: list[Any]) -> list[Any]:
        ready = [n for n in nodes if {d.name for d in n.read_writes.reads} <= {"arg0_1"}]
        return ready + [n for n in nodes if n not in ready]

    one = program(build)
    assert verify(PreservePeakMemory(**budget), one).status == "passed"
    with planted(name, eager):
        assert kinds(PreservePeakMemory(**budget), one) == {"peak-memory"}


def test_a_pass_that_loses_a_node_is_found():
    with planted("sink_waits", lambda nodes: nodes[:-1]):
        assert kinds(SinkWaits(), program()) == {"changed-nodes"}


def test_a_pass_that_raises_is_found():
    def change(nodes: list[Any]) -> list[Any]:
        raise KeyError("planted")

    with mock.patch.object(comms, "sink_waits", change):
        assert kinds(SinkWaits(), program()) == {"pass-raised"}


def overwritten(b: Any) -> Any:
    """An input is read behind a wait and overwritten later."""
    x, w, z = (b.input(name) for name in "xwz")
    reduced = b.call(C10D + "wait_tensor", b.call(C10D + "all_reduce", w, "sum", "tp"))
    y = b.call("aten::add.Tensor", reduced, x)
    b.call("aten::copy_", x, b.call("aten::exp", z))
    return y


def test_a_wait_that_takes_a_read_behind_a_write_is_found():
    """torch 2.11 and later; see reports/pytorch/wait-sinks-past-mutation."""
    import torch

    inputs = [InputSpec(name, (4, 4)) for name in "xwz"]
    found = kinds(SinkWaitsIterative(), spmd_program(MESH, inputs, overwritten))
    assert found == ({"broken-order"} if release(torch.__version__) >= (2, 11) else set())
    assert kinds(SinkWaits(), spmd_program(MESH, inputs, overwritten)) == set()
