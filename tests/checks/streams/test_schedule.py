"""Replays of lowered graphs, and schedules that they do not confirm."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import fx

from tcverify.application import Pair
from tcverify.checks import Evidence
from tcverify.checks.streams.replay import Arrow, replay_streams
from tcverify.checks.streams.schedule import check_schedule
from tcverify.program import Contract, Program, StreamSettings
from tcverify.program.finding import Finding
from tests.support.lowered import Lowering, judge, program

MM, REDUCE, RELU, ADD = 8e-6, 12e-6, 5e-6, 2e-6
OVERHEAD = 0.5e-6
STREAMS = StreamSettings((0,), (1,), OVERHEAD)
#: all_reduce on stream 1 beside mm and relu on stream 0; add waits for both.
TIMES = {
    "makespan_s": max(MM + RELU, REDUCE + OVERHEAD) + ADD,
    "serial_s": 0.0 + REDUCE + MM + RELU + ADD,
    "critical_path_s": MM + RELU + ADD,
    "sync_overhead_s": OVERHEAD,
}


def overlap(b: Lowering, costs: tuple[float | None, ...] = (REDUCE, MM, RELU, ADD)) -> Any:
    reduced = b.reduce(b.wait(b.x, 1), cost_s=costs[0])
    token = b.record(reduced, 1)
    hidden = b.relu(b.mm(b.x, cost_s=costs[1]), cost_s=costs[2])
    return b.add(b.wait(reduced, 0, token), hidden, cost_s=costs[3])


def plain(b: Lowering) -> Any:
    reduced = b.reduce(b.x, cost_s=REDUCE)
    return b.add(reduced, b.relu(b.mm(b.x, cost_s=MM), cost_s=RELU), cost_s=ADD)


def lowered(schedule: dict[str, Any] | None = TIMES, **options: Any) -> Program:
    return program(overlap, schedule=schedule, streams=STREAMS, **options)


def finding(rewritten: Program, *, original: Program | None = None, **promises: Any) -> Finding:
    (found,) = judge("schedule", rewritten, original=original or program(plain, streams=STREAMS), **promises)
    assert isinstance(found, Finding)
    return found


def silent(rewritten: Program, *, original: Program | None = None, **promises: Any) -> bool:
    return not judge("schedule", rewritten, original=original or program(plain, streams=STREAMS), **promises)


# -------------------------------------------------------------------------------------------------------------- replay


def test_a_replay_says_when_every_op_runs() -> None:
    times = replay_streams(lowered(), 1)
    assert [(op.node, op.stream, op.resources) for op in times.ops] == [
        ("all_reduce", 1, ("comm",)), ("mm", 0, ("compute",)), ("relu", 0, ("compute",)), ("add", 0, ("compute",)),
    ]  # fmt: skip
    assert [(op.start_s, op.end_s) for op in times.ops] == [
        (0.0, REDUCE), (0.0, MM), (MM, MM + RELU), (MM + RELU, MM + RELU + ADD),
    ]  # fmt: skip
    assert times.arrows == (Arrow("_internal_record", "_internal_wait_and_bind_1", "all_reduce", "add"),)
    assert (times.makespan_s, times.serial_s, times.critical_path_s) == (
        TIMES["makespan_s"], TIMES["serial_s"], TIMES["critical_path_s"],
    )  # fmt: skip
    assert times.exposed_s == 0.0
    assert times.lowered


def test_a_plain_graph_replays_one_op_after_the_other() -> None:
    times = replay_streams(program(plain, streams=STREAMS), 0)
    assert not times.lowered
    assert times.makespan_s == times.serial_s == TIMES["serial_s"]
    assert times.critical_path_s == TIMES["critical_path_s"]
    assert times.exposed_s == REDUCE
    assert {op.stream for op in times.ops} == {0}


def test_without_all_costs_there_are_ops_and_no_times() -> None:
    times = replay_streams(program(lambda b: overlap(b, (REDUCE, None, RELU, ADD))), 0)
    assert [op.node for op in times.ops] == ["all_reduce", "mm", "relu", "add"]
    assert {op.start_s for op in times.ops} == {None}
    assert (times.makespan_s, times.serial_s, times.critical_path_s, times.exposed_s) == (None, None, None, None)


def test_waiting_for_another_stream_costs_the_overhead_and_for_the_same_one_nothing() -> None:
    def build(b: Lowering, *, stream: int) -> Any:
        first = b.mm(b.x, cost_s=MM)
        token = b.record(first)
        second = b.relu(b.wait(first, stream, token), cost_s=RELU)
        return b.wait(second, 0, b.record(second, stream))

    same, other = (replay_streams(program(lambda b, s=s: build(b, stream=s), streams=STREAMS), 0) for s in (0, 1))  # type: ignore[misc]
    assert same.makespan_s == MM + RELU
    assert other.makespan_s == MM + OVERHEAD + RELU


def test_a_resource_is_exclusive_whatever_the_streams() -> None:
    def build(b: Lowering) -> Any:
        first, second = b.mm(b.x, cost_s=MM), b.mm(b.wait(b.x, 2), cost_s=MM)
        token = b.record(second, 2)
        return first, b.wait(second, 0, token)

    assert replay_streams(program(build), 0).makespan_s == MM + MM
    assert replay_streams(program(build), 0).critical_path_s == MM


def test_fused_ops_take_both_resources() -> None:
    def build(b: Lowering) -> Any:
        fused = b.work("tensor_cast::matmul_all_reduce", b.x, b.y, None, b.rank, b.group("tp"), cost_s=MM)
        reduced = b.reduce(b.wait(b.x, 1), cost_s=REDUCE)
        token = b.record(reduced, 1)
        beside = b.relu(b.x, cost_s=RELU)
        return fused, beside, b.wait(reduced, 0, token)

    times = replay_streams(program(build), 0)
    assert [op.start_s for op in times.ops] == [0.0, MM, MM]
    assert times.exposed_s == pytest.approx(REDUCE - RELU)
    assert times.critical_path_s == MM + REDUCE  # communication keeps its order


def test_mutations_are_on_the_critical_path() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x, cost_s=MM)
        read = b.relu(product, cost_s=RELU)
        b.work("aten::add_.Tensor", product, b.y, cost_s=ADD)  # after the read
        return read, b.call("aten::view", product, [16])

    assert replay_streams(program(build), 0).critical_path_s == MM + RELU + ADD


def test_the_overhead_of_a_program_without_settings_is_the_declared_one() -> None:
    assert replay_streams(program(overlap, schedule={**TIMES, "sync_overhead_s": 3e-6}), 0).overhead_s == 3e-6
    assert replay_streams(program(overlap), 0).overhead_s == 0.0


# --------------------------------------------------------------------------------------------------------------- check


def test_a_schedule_that_holds_is_silent() -> None:
    assert silent(lowered())
    assert silent(lowered(), schedule=True)


def test_a_lowering_that_promises_a_schedule_declares_it() -> None:
    assert silent(lowered(None))  # a foreign one
    found = finding(lowered(None), schedule=True)
    assert (found.kind, found.node) == ("wrong-schedule", "output")
    assert found.title == "'output' declares no schedule, although the pass promises one"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({k: v for k, v in TIMES.items() if k != "serial_s"}, "lacks 'serial_s'"),
        ({**TIMES, "makespan_s": "long"}, "gives no time for 'makespan_s'"),
        ({**TIMES, "makespan_s": math.nan}, "gives no time for 'makespan_s'"),
        ({**TIMES, "serial_s": 10**400}, "gives no time for 'serial_s'"),
        ({**TIMES, "sync_overhead_s": -1.0}, "gives no time for 'sync_overhead_s'"),
        ({**TIMES, "critical_path_s": True}, "gives no time for 'critical_path_s'"),
        ([1.0], "is not a dict, but a list"),
    ],
)
def test_a_malformed_schedule_is_named(schedule: Any, words: str) -> None:
    made = lowered()
    list(made.graphs[0].nodes)[-1].meta["schedule"] = schedule
    found = finding(made)
    assert (found.kind, found.node) == ("wrong-schedule", "output")
    assert words in found.title


def node(made: Program, name: str) -> fx.Node:
    return next(n for n in made.graphs[0].nodes if n.name == name)


def test_every_op_has_a_cost() -> None:
    made = lowered()
    del node(made, "relu").meta["cost_s"]
    found = finding(made)
    assert (found.title, found.node) == ("meta['cost_s'] of 'relu' is missing", "relu")
    made = lowered()
    node(made, "relu").meta["cost_s"] = math.inf
    assert finding(made).title == "meta['cost_s'] of 'relu' is inf, which is not a time"


def test_costs_are_those_that_were_given() -> None:
    made = lowered()
    node(made, "mm").meta["cost_s"] = 7e-6
    found = finding(made)
    assert found.title == "the schedule assumes 7 µs for 'mm', but the op takes 8 µs"
    assert found.node == "mm"


def test_an_op_takes_a_microsecond_at_least() -> None:
    def quick(b: Lowering) -> Any:
        return b.add(b.reduce(b.x, cost_s=REDUCE), b.relu(b.mm(b.x, cost_s=MM), cost_s=RELU), cost_s=1e-9)

    original = program(quick, streams=STREAMS)
    times = {
        **TIMES,
        "makespan_s": max(MM + RELU, REDUCE + OVERHEAD) + 1e-6,
        "serial_s": REDUCE + MM + RELU + 1e-6,
        "critical_path_s": MM + RELU + 1e-6,
    }
    raised = program(lambda b: overlap(b, (REDUCE, MM, RELU, 1e-6)), schedule=times, streams=STREAMS)
    assert silent(raised, original=original)
    kept = program(lambda b: overlap(b, (REDUCE, MM, RELU, 1e-9)), schedule=times, streams=STREAMS)
    assert "assumes 0.001 µs for 'add', but the op takes 1 µs" in finding(kept, original=original).title


def test_an_op_that_an_earlier_stage_changed_has_a_cost_of_its_own() -> None:
    def wider(b: Lowering) -> Any:
        product = b.work("aten::mm", b.call("tensor_cast::cat", [b.x, b.x], 0), b.y, cost_s=3e-6)
        return b.reduce(b.x, cost_s=REDUCE), product

    assert silent(lowered(), original=program(wider, streams=STREAMS))


def test_the_overhead_is_that_of_the_program() -> None:
    found = finding(lowered({**TIMES, "sync_overhead_s": 0.0}))
    assert found.title == "the schedule assumes a synchronisation overhead of 0 µs, but the program has 0.5 µs"
    assert silent(lowered(), original=program(plain))  # a program that says nothing


def test_the_makespan_is_that_of_the_replay_to_the_last_digit() -> None:
    found = finding(lowered({**TIMES, "makespan_s": 14e-6}))
    assert found.title == "the schedule predicts a makespan of 14 µs, but the replay gives 15 µs"
    assert "makespan         14.000     15.000  µs" in found.detail
    assert found.data["replayed"]["makespan_s"] == TIMES["makespan_s"]
    close = math.nextafter(TIMES["makespan_s"], 1.0)
    found = finding(lowered({**TIMES, "makespan_s": close}))
    assert found.kind == "wrong-schedule"
    said, real = found.title.removeprefix("the schedule predicts a makespan of ").split(", but the replay gives ")
    assert said != real


def test_the_serial_time_is_the_sum() -> None:
    found = finding(lowered({**TIMES, "serial_s": 28e-6}))
    assert found.title == "the schedule predicts a serial time of 28 µs, but the replay gives 27 µs"


def test_no_schedule_is_faster_than_its_critical_path() -> None:
    found = finding(lowered({**TIMES, "critical_path_s": 16e-6}))
    assert found.title == "the schedule's makespan of 15 µs is below its own critical path of 16 µs"

    def racy(b: Lowering) -> Any:
        reduced = b.reduce(b.wait(b.x, 1), cost_s=REDUCE)
        product = b.mm(reduced, cost_s=MM)  # does not wait
        return b.wait(product, 0, b.record(reduced, 1))

    def unlowered(b: Lowering) -> Any:
        return b.mm(b.reduce(b.x, cost_s=REDUCE), cost_s=MM)

    times = {"makespan_s": REDUCE, "serial_s": REDUCE + MM, "critical_path_s": 0.0, "sync_overhead_s": OVERHEAD}
    found = finding(program(racy, schedule=times, streams=STREAMS), original=program(unlowered, streams=STREAMS))
    assert found.title == "the schedule's makespan of 12 µs is below the critical path of 20 µs"


def test_a_schedule_without_gain_is_refuted() -> None:
    def serial(b: Lowering) -> Any:
        product = b.mm(b.x, cost_s=MM)
        token = b.record(product)
        reduced = b.reduce(b.wait(product, 1, token), cost_s=REDUCE)
        return b.wait(reduced, 0, b.record(reduced, 1))

    def unlowered(b: Lowering) -> Any:
        return b.reduce(b.mm(b.x, cost_s=MM), cost_s=REDUCE)

    for overhead in (0.0, OVERHEAD):
        streams = StreamSettings((0,), (1,), overhead)
        times = {
            "makespan_s": MM + overhead + REDUCE, "serial_s": MM + REDUCE, "critical_path_s": MM + REDUCE,
            "sync_overhead_s": overhead,
        }  # fmt: skip
        made = program(serial, schedule=times, streams=streams)
        found = finding(made, original=program(unlowered, streams=streams))
        assert found.kind == "no-gain"
        assert "not less than the 20 µs" in found.title


def test_ranks_have_schedules_of_their_own() -> None:
    slow = (REDUCE, MM, RELU, ADD + 1e-6)
    made = program(overlap, lambda b: overlap(b, slow), schedule=TIMES, streams=STREAMS)
    original = program(plain, lambda b: overlap(b, slow), streams=STREAMS)
    found = finding(made, original=original)
    assert found.rank == 1
    assert found.title.startswith("the schedule predicts a makespan of 15 µs, but the replay gives 16 µs")


def beside(b: Lowering) -> Any:
    """A collective beside two products, which take as long together."""
    total = b.reduce(b.wait(b.x, 1), cost_s=2e-6)
    token = b.record(total, 1)
    products = [b.mm(b.x, cost_s=1e-6) for _ in range(2)]
    return [b.wait(total, 0, token), *products]


def behind(b: Lowering) -> Any:
    """The same, but the collective waits for both products."""
    products = [b.mm(b.x, cost_s=1e-6) for _ in range(2)]
    total = b.reduce(b.wait(b.x, 1, b.record(products[1])), cost_s=2e-6)
    return [b.wait(total, 0, b.record(total, 1)), *products]


def test_communication_that_is_exposed_for_longer_breaks_a_promise() -> None:
    hidden, exposed = program(beside), program(behind)
    assert (replay_streams(hidden, 0).exposed_s, replay_streams(exposed, 0).exposed_s) == (0.0, 2e-6)
    worse = Evidence(Pair(hidden, exposed, changed=True), Contract(overlap=True))
    found = [f for f in check_schedule(worse) if isinstance(f, Finding)]
    assert [f.kind for f in found] == ["exposed-communication"]
    assert "2 µs after the pass, for 0 µs before" in found[0].title
    assert check_schedule(Evidence(Pair(hidden, exposed, changed=True), Contract())) == []
    assert check_schedule(Evidence(Pair(exposed, hidden, changed=True), Contract(overlap=True))) == []


def test_costs_below_the_least_are_no_exposure_that_a_pass_has_made() -> None:
    tiny = program(lambda b: [b.reduce(b.x, cost_s=1e-7), b.mm(b.x, cost_s=1e-6)])
    least = program(lambda b: [b.reduce(b.x, cost_s=1e-6), b.mm(b.x, cost_s=1e-6)])
    pair = Pair(tiny, least, changed=True)
    assert check_schedule(Evidence(pair, Contract(overlap=True))) == []
