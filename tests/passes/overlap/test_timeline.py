"""Time of an order: two queues, whose times from a place to the end are told by three numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from tcverify.passes.overlap import comm_graph, runtimes
from tcverify.passes.overlap.timeline import (
    Now,
    OrderTimeline,
    Tail,
    Tasks,
    covering_times,
    exposures,
    replay_order,
    tasks,
    to_seconds,
)
from tests.support.overlap_orders import legal_order, plain_makespan
from tests.support.overlap_programs import US, Builder, drawn, program

DATA = st.binary(min_size=60, max_size=60)


def replayed(build: Callable[[Builder], object]) -> tuple[Tasks, list[str], OrderTimeline]:
    found = comm_graph(program(build).graph_module(0).graph)
    work = tasks(found, runtimes(found))
    return work, [node.name for node in found.nodes], replay_order(work, range(len(found.nodes)))


def test_communication_runs_beside_compute_until_it_is_waited_for() -> None:
    def build(b: Builder) -> object:
        sent = b.start(b["x"], cost=30)
        other = b.mm(b["y"], cost=10)
        return b.add(b.wait(sent), other, cost=5)

    work, names, found = replayed(build)
    assert to_seconds(found.makespan) == pytest.approx(35 * US)
    assert to_seconds(found.exposed) == pytest.approx(20 * US)
    start = names.index("all_reduce")
    assert exposures(work, found) == {start: found.exposed}
    assert to_seconds(covering_times(work, found)[start]) == pytest.approx(10 * US)


def test_communication_queues_behind_communication() -> None:
    def build(b: Builder) -> object:
        first, second = b.start(b["x"], cost=30), b.start(b["y"], cost=20)
        return b.wait(second), b.mm(b.wait(first), cost=10)

    work, names, found = replayed(build)
    assert to_seconds(found.makespan) == pytest.approx(60 * US)
    exposed = exposures(work, found)
    assert [exposed[names.index(name)] for name in ("all_reduce", "all_reduce_1")] == [0, found.exposed]


def test_what_blocks_takes_both_queues_and_what_nobody_waits_for_holds_up_the_end() -> None:
    def build(b: Builder) -> object:
        sent = b.start(b["x"], cost=30)
        got = b.call("tensor_cast::all_reduce", b["y"], b.graph.rank, b.graph.group("tp"), cost=7)
        last = b.start(got, cost=11)
        return b.relu(b.wait(sent), cost=5), last

    work, names, found = replayed(build)
    assert to_seconds(found.makespan) == pytest.approx(48 * US)
    assert to_seconds(found.joined) == pytest.approx(6 * US)
    assert to_seconds(exposures(work, found)[names.index("all_reduce_2")]) == pytest.approx(6 * US)


@given(DATA, st.integers(0, 1 << 30))
@settings(max_examples=80, deadline=None)
def test_the_time_is_that_which_is_told_plainly(data: bytes, seed: int) -> None:
    found = comm_graph(_costly(data, seed))
    work = tasks(found, runtimes(found))
    numbers = {node: number for number, node in enumerate(found.nodes)}
    for order in (list(found.nodes), legal_order(found, random.Random(seed))):
        ours = replay_order(work, [numbers[node] for node in order])
        makespan, exposed = plain_makespan(order)
        assert to_seconds(ours.makespan) == pytest.approx(makespan, abs=1e-12)
        assert to_seconds(ours.exposed) == pytest.approx(exposed, abs=1e-12)
        blocking = sum(work.costs[span.node] for span in ours.spans if work.queues[span.node] == "both")
        behind = sum(span.begin - span.issued for span in ours.spans if work.queues[span.node] == "both")
        assert sum(exposures(work, ours).values()) + blocking + behind == ours.exposed


@given(DATA, st.integers(0, 1 << 30))
@settings(max_examples=80, deadline=None)
def test_at_every_place_time_before_and_time_behind_make_the_whole(data: bytes, seed: int) -> None:
    found = comm_graph(_costly(data, seed))
    work = tasks(found, runtimes(found))
    order = [found.nodes.index(node) for node in legal_order(found, random.Random(seed))]
    whole = replay_order(work, order).makespan
    ends: dict[int, int] = {}
    work.run(order, Now(0, 0), ends)
    for place in range(len(order) + 1):
        tail, from_wait = Tail(0, 0), dict[int, int]()
        for node in reversed(order[place:]):
            tail = work.back(node, tail, from_wait, ends, set(order[place:]))
        assert tail.end(work.run(order[:place], Now(0, 0), {})) == whole


def _costly(data: bytes, seed: int) -> fx.Graph:
    """The graph of a drawn program, in which all has a cost."""
    graph = drawn(data)[0].graph_module(0).graph
    rng = random.Random(seed)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["cost_s"] = rng.choice([0, 0.05, 1, 2.5, 7, 30.1]) * US
    return graph
