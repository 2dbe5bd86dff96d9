"""Times of graphs whose collectives are asynchronous."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tcverify.checks.streams.replay import COMMUNICATION, Stall, replay_streams
from tests.sizes import by_night
from tests.support.async_programs import Functional, judge, kinds, moved, program

US = 1e-6


def overlapped(b: Functional, comm: float | None = 5 * US) -> Any:
    started = b.start(b.x, cost_s=comm)
    product = b.mm(b.x, cost_s=2 * US)
    waited = b.wait(started)
    return b.add(waited, product, cost_s=1 * US)


def test_communication_runs_beside_compute_until_the_wait() -> None:
    times = replay_streams(program(overlapped), 0)
    assert times.asynchronous
    assert not times.lowered
    assert [(op.node, op.stream, op.start_s, op.end_s, op.issued_s) for op in times.ops] == [
        ("all_reduce", COMMUNICATION, 0.0, 5 * US, 0.0),
        ("mm", 0, 0.0, 2 * US, None),
        ("add", 0, 5 * US, 5 * US + US, None),
    ]
    assert times.stalls == (Stall("wait_tensor", "all_reduce", 2 * US, 5 * US),)
    assert times.makespan_s == 5 * US + US
    assert times.exposed_s == pytest.approx(3 * US)
    assert times.serial_s == pytest.approx(8 * US)
    assert times.critical_path_s == pytest.approx(6 * US)


def test_communication_queues_in_the_order_of_its_starts() -> None:
    def build(b: Functional) -> Any:
        first = b.start(b.x, cost_s=3 * US)
        product = b.mm(b.x, cost_s=1 * US)
        second = b.start(product, cost_s=2 * US)
        return b.wait(second), b.wait(first)

    times = replay_streams(program(build), 0)
    second = next(op for op in times.ops if op.node == "all_reduce_1")
    assert (second.issued_s, second.start_s, second.end_s) == (1 * US, 3 * US, 5 * US)
    # the first has arrived by then
    assert times.stalls == (Stall("wait_tensor", "all_reduce_1", 1 * US, 5 * US),)
    assert times.exposed_s == pytest.approx(4 * US)


def test_blocking_collectives_take_both_queues() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x, cost_s=3 * US)
        b.work("p2p::barrier", "dp", cost_s=2 * US)
        product = b.mm(b.x, cost_s=1 * US)
        return b.add(b.wait(started), product, cost_s=1 * US)

    times = replay_streams(program(build), 0)
    barrier, product = times.ops[1:3]
    assert (barrier.node, barrier.stream, product.node) == ("barrier", 0, "mm")
    assert [barrier.start_s, barrier.end_s, product.end_s] == pytest.approx([3 * US, 5 * US, 6 * US])
    assert [(stall.node, stall.awaited) for stall in times.stalls] == [
        ("barrier", "all_reduce"),
        ("barrier", "barrier"),
    ]
    assert times.exposed_s == pytest.approx(5 * US)


def test_what_is_under_way_is_joined_at_the_end() -> None:
    def build(b: Functional) -> Any:
        b.start(b.x, cost_s=3 * US)
        return b.mm(b.x, cost_s=1 * US)

    times = replay_streams(program(build), 0)
    assert times.stalls == (Stall("output", "all_reduce", 1 * US, 3 * US),)
    assert times.makespan_s == 3 * US


def test_a_second_wait_and_views_take_no_time() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x, cost_s=3 * US)
        view = b.call("aten::view", started, [16])
        first = b.work("_c10d_functional::wait_tensor", view, cost_s=7 * US)
        return b.wait(started), b.work("aten::view", first, [4, 4], cost_s=9 * US)

    times = replay_streams(program(build), 0)
    assert times.makespan_s == times.exposed_s == 3 * US


def test_without_a_cost_there_are_no_times() -> None:
    times = replay_streams(program(lambda b: overlapped(b, None)), 0)
    assert [op.node for op in times.ops] == ["all_reduce", "mm", "add"]
    assert (times.makespan_s, times.exposed_s, times.stalls) == (None, None, ())


def test_exposed_time_is_the_makespan_without_compute() -> None:
    for seed in range(by_night(200, 50)):
        chance = random.Random(seed)

        def build(b: Functional, chance: random.Random = chance) -> Any:
            values, pending = [b.x], []
            for _ in range(12):
                cost = chance.randrange(8) * US
                match chance.randrange(4):
                    case 0:
                        pending.append(b.start(chance.choice(values), cost_s=cost))
                    case 1 if pending:
                        values.append(b.wait(pending.pop(chance.randrange(len(pending)))))
                    case 2:
                        b.work("p2p::barrier", "dp", cost_s=cost)
                    case _:
                        values.append(b.mm(chance.choice(values), cost_s=cost))
            return [*values[1:], *map(b.wait, pending)]

        made = program(build)
        times = replay_streams(made, 0)
        assert times.makespan_s is not None
        spans = [(op.start_s or 0.0, op.end_s or 0.0) for op in times.ops if op.resources == ("compute",)]
        compute = sum(end - start for start, end in spans)
        if times.asynchronous:
            assert times.exposed_s == pytest.approx(times.makespan_s - compute, abs=1e-12)
            assert times.critical_path_s is not None
            assert times.critical_path_s <= times.makespan_s + 1e-12


def test_exposure_that_grows_breaks_the_promise() -> None:
    original = program(overlapped)
    late = moved(original, "mm", before="all_reduce")
    assert kinds("schedule", original, late) == []
    (finding,) = judge("schedule", original, late, overlap=True)
    assert (finding.kind, finding.node, finding.rank) == ("exposed-communication", "wait_tensor", 0)
    assert finding.title == "communication is exposed for 5 µs after the pass, for 3 µs before"
    assert finding.detail == "compute waits at 'wait_tensor' for 'all_reduce': 5 µs, 3 µs before"
    assert kinds("schedule", late, original, overlap=True) == []


def test_costs_below_a_microsecond_count_as_they_are() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x, cost_s=2e-7)
        product = b.mm(b.x, cost_s=2e-7)
        return b.wait(started), product

    original = program(build)
    assert replay_streams(original, 0).exposed_s == 0.0
    late = moved(original, "mm", before="all_reduce")
    (finding,) = judge("schedule", original, late, overlap=True)
    assert "for 0.2 µs after the pass, for 0 µs before" in finding.title
