"""Streams on a device: what is planned, what queues in the place of a device show, and what CUDA devices have to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tcverify.errors import ExecutorError, InternalError, UsageError
from tcverify.execution import RankResult, Run, StreamOrder, explore, explore_on_cuda
from tcverify.execution.streams.cuda_streams import CudaDevice, compare_orders, run_launches
from tcverify.execution.streams.device_memory import DeviceMemory
from tcverify.execution.streams.issue import IssuedRank, issue
from tcverify.execution.streams.launches import (
    MOST_S,
    SHORTEST_S,
    Launch,
    delay_seconds,
    held_back,
    in_one_stream,
    launches,
)
from tcverify.execution.streams.queues import StreamOp
from tcverify.execution.streams.simulated import QueuedDevice
from tcverify.program import Mesh
from tests.support.device_programs import ONE, STREAMS, cross, every_op, reduced, seen_of
from tests.support.lowered import Build, Lowering, program
from tests.support.programs import TP2
from tests.support.random_lowered import MESH, draw


def op(stream: int, *after: int, enters: tuple[tuple[int, ...], ...] = ()) -> StreamOp:
    return StreamOp("op", stream, None, after, (), (), (), enters)


def ranks(*ops: Sequence[StreamOp]) -> list[IssuedRank]:
    (some, *_), _ = issue(program(cross, mesh=ONE))
    return [replace(some, rank=rank, ops=list(one)) for rank, one in enumerate(ops)]


# ---------------------------------------------------------------------------------------------------------- the plan


def test_a_launch_waits_for_the_events_of_other_streams_alone() -> None:
    ops = [op(0), op(1, 0), op(0, 0), op(0, 2, 1)]
    assert launches(ranks(ops), held={((0, 1), False)}, delay_s=0.5) == [
        Launch(0, 0, 0, 0, event=True),
        Launch(0, 1, 0, 1, waits=((0, 0, 0),), delay_s=0.5, event=True),
        Launch(0, 2, 0, 0),
        Launch(0, 3, 0, 0, waits=((0, 1, 0),)),
    ]


def test_a_collective_waits_for_its_members_and_is_held_back_before_it_reads_and_before_it_writes() -> None:
    first, second = [op(0), op(1, 0, enters=((0, 1),)), op(0, 0, 1)], [op(0, enters=((0, 1),))]
    held = {((0, 1), False), ((1, 0), True)}
    assert launches(ranks(first, second), held=held, delay_s=0.5) == [
        Launch(0, 0, 0, 0, event=True),
        Launch(0, 1, 0, 1, waits=((0, 0, 0),), delay_s=0.5, event=True),
        Launch(1, 0, 0, 0, event=True),
        Launch(1, 0, 1, 0, waits=((0, 1, 0),), members=((0, 1, 0), (1, 0, 0)), delay_s=0.5),
        Launch(0, 1, 1, 1, waits=((1, 0, 0),), members=((0, 1, 0), (1, 0, 0)), event=True),
        Launch(0, 2, 0, 0, waits=((0, 1, 1),)),
    ]


def test_in_one_stream_collectives_alone_wait() -> None:
    plan = in_one_stream(ranks([op(0), op(1, 0, enters=((0, 1),))], [op(2, enters=((0, 1),))]))
    assert {one.stream for one in plan} == {0}
    assert [one.waits for one in plan] == [(), (), (), ((0, 1, 0),), ((1, 0, 0),)]


def test_ranks_that_would_wait_for_each_other_where_they_issue_are_refused() -> None:
    both = (0, 1), (1, 0)
    with pytest.raises(InternalError, match="wait for each other"):
        launches(ranks([op(0, enters=both)], [op(0, enters=both[::-1])]))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mesh", [ONE, MESH], ids=["one rank", "four ranks"])
def test_events_are_recorded_before_they_are_waited_for(seed: int, mesh: Mesh) -> None:
    """CUDA lets a stream pass that waits for an event which nobody has recorded."""
    issued, _ = issue(draw(seed, mesh).program)
    for plan in (launches(issued), in_one_stream(issued)):
        recorded: dict[tuple[int, int, int], tuple[int, int]] = {}
        for launch in plan:
            assert all(recorded[before] != (launch.rank, launch.stream) for before in launch.waits)
            if launch.event:
                recorded[launch.point] = launch.rank, launch.stream


@pytest.mark.parametrize(("order", "held"), [
    (StreamOrder("issue"), set()),
    (StreamOrder("starve", stream=1), {1, 4}),
    (StreamOrder("rush", stream=1), {0, 2, 3}),
    (StreamOrder("early", op=3), {1, 4}),
])  # fmt: skip
def test_what_an_order_does_not_prefer_is_held_back(order: StreamOrder, held: set[int]) -> None:
    issued = ranks([op(0), op(1), op(0, 0), op(2, 2), op(1, 1)])
    assert held_back(order, issued) == {((0, number), end) for number in held for end in (False, True)}


def test_an_op_that_goes_early_needs_the_begins_of_collectives_on_other_ranks() -> None:
    group = ((0, 1),)
    issued = ranks([op(0, enters=group), op(1, 0), op(1, 1)], [op(0), op(0, 0, enters=group), op(0, 1)])
    held = held_back(StreamOrder("early", rank=0, op=1), issued)
    assert held == {((0, 2), False), ((0, 2), True), ((1, 1), True), ((1, 2), False), ((1, 2), True)}


def test_random_orders_are_functions_of_their_seed() -> None:
    issued = ranks([op(0)] * 100, [op(0)] * 100)
    first = held_back(StreamOrder("random", seed=3), issued)
    assert first == held_back(StreamOrder("random", seed=3), issued)
    assert 60 < len(first) < 180
    assert {place[0] for place, _ in first} == {0, 1}
    assert first != held_back(StreamOrder("random", seed=4), issued)


def test_an_order_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="no order 'late'"):
        held_back(StreamOrder("late"), ranks([op(0)]))


def test_delays_outlast_the_program_but_not_the_user() -> None:
    assert delay_seconds(0.0001, 3) == SHORTEST_S
    assert delay_seconds(0.05, 3) == 0.05
    assert delay_seconds(0.1, 100) == MOST_S / 100
    assert delay_seconds(1.0, 10_000) == SHORTEST_S
    assert delay_seconds(0.05, 0) == 0.05


# ----------------------------------------------------------------------------------- queues in the place of a device


def seen(*builds: Build, orders: Sequence[StreamOrder] = tuple(STREAMS), **options: str) -> set[str]:
    """What goes wrong with a program of one rank, as "label in order"."""
    found = seen_of(program(*builds, mesh=ONE), orders, **options)
    return {text for _, text in found}


def test_a_missing_wait_shows_when_what_it_misses_is_late() -> None:
    assert seen(cross) == set()
    assert seen(lambda b: cross(b, waits=False)) == {"output 0 in starve stream 0, on CUDA"}


def test_outputs_are_read_on_the_main_stream() -> None:
    assert seen(lambda b: cross(b, joins=False)) == {"output 0 in starve stream 1, on CUDA"}
    assert seen(lambda b: cross(b, joins=False), boundary="lenient") == set()


def test_a_write_before_a_read_shows() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        buffer = b.mm(b.x)
        read = b.relu(b.wait(buffer, 1, b.record(buffer)))
        reader = b.record(read, 1)
        b.call("aten::add_.Tensor", buffer, b.wait(b.y, 0, reader) if waits else b.y)
        return b.wait(read, 0, reader)

    assert seen(lambda b: build(b, waits=True)) == set()
    assert seen(lambda b: build(b, waits=False)) == {"output 0 in starve stream 1, on CUDA"}


def test_a_mutated_input_is_read_by_the_caller() -> None:
    def build(b: Lowering, *, joins: bool) -> Any:
        b.call("aten::mul_.Tensor", b.x, b.wait(b.y, 1))
        token = b.record(b.x, 1)
        return b.relu(b.wait(b.y, 0, *([token] if joins else [])))

    assert seen(lambda b: build(b, joins=True)) == set()
    assert seen(lambda b: build(b, joins=False)) == {"input 'x' after the run in starve stream 1, on CUDA"}


def test_inputs_may_be_written_on_the_main_stream() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        tokens = [b.record(b.relu(b.x))] if waits else []
        out = b.mm(b.wait(b.x, 1, *tokens))
        return b.wait(out, 0, b.record(out, 1))

    assert seen(lambda b: build(b, waits=False)) == set()
    assert seen(lambda b: build(b, waits=True), inputs="stream0") == set()
    assert seen(lambda b: build(b, waits=False), inputs="stream0") == {"output 0 in starve stream 0, on CUDA"}


def test_tuples_views_copies_and_constants_have_their_places() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        ones = b.call("aten::ones", [4, 4])
        both = b.call("tensor_cast::add_rms_norm2", b.x, ones, b.mm(b.x), 1e-6)
        item = b.getitem(both, 1)
        token = b.record(item)
        turned = b.call("aten::t", b.call("aten::view", item, [4, 4]))
        copy = b.wait(turned, 1, *([token] if waits else []))
        b.call("aten::add_.Tensor", copy, b.y)
        done = b.record(copy, 1)
        return b.getitem(both, 0), b.wait(copy, 0, done)

    assert seen(lambda b: build(b, waits=True)) == set()
    assert seen(lambda b: build(b, waits=False)) == {"output 1 in starve stream 0, on CUDA"}


def test_integers_that_are_read_too_early_are_wrong() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        count = b.call("aten::argmax", b.x)
        out = b.call("aten::mul.Tensor", b.wait(count, 1, *([b.record(count)] if waits else [])), 2)
        return b.wait(out, 0, b.record(out, 1))

    assert seen(lambda b: build(b, waits=True)) == set()
    assert seen(lambda b: build(b, waits=False)) == {"output 0 in starve stream 0, on CUDA"}


def test_a_collective_that_is_not_waited_for_shows() -> None:
    assert seen(reduced) == set()
    assert seen(lambda b: reduced(b, waits=False)) == {"output 0 in starve stream 1, on CUDA"}


@pytest.mark.parametrize("first", range(0, 120, 40))
@pytest.mark.parametrize("mesh", [ONE, MESH], ids=["one rank", "four ranks"])
def test_queues_with_delays_show_the_wrong_outputs_that_the_stream_executor_finds(first: int, mesh: Mesh) -> None:
    """It shares how the host issues, but neither memory nor how the order is chosen. Collectives meet in the order in which ranks
    issue them here, but in the simulation in that in which ranks enter them."""
    wrong = 0
    for seed in range(first, first + 40):
        drawn = draw(seed, mesh)
        issued, _ = issue(drawn.program)
        found = explore(drawn.program, systematic=True)
        assert found is not None
        adversary = {(o.rank, o.text.split(" differs")[0]) for o in found.observations if o.kind == "output"}
        queues = {(rank, text.split(" in ")[0]) for rank, text in seen_of(drawn.program, [*every_op(issued), *STREAMS])}
        entered = any(o.kind == "collective-order" for o in found.observations)
        assert queues <= adversary if entered else queues == adversary, seed
        wrong += bool(queues)
    assert wrong > 10


@pytest.mark.parametrize(("value", "wrong"), [
    (1.0, False),  # as lockstep
    (1.5, False),  # as the device without streams
    (1.0 + 2.0**-40, False),
    (1.0 + 2.0**-20, True),
    (float("nan"), True),
])  # fmt: skip
def test_a_difference_counts_when_neither_lockstep_nor_the_device_alone_explains_it(value: float, wrong: bool) -> None:
    _, run = issue(program(lambda b: b.relu(b.wait(b.x, 1)), mesh=ONE))

    def result(filled: float) -> RankResult:
        return replace(run.ranks[0], outputs=[torch.full((4, 4), filled, dtype=torch.float64)])

    reference = Run("lockstep", [result(1.0)])
    found = list(compare_orders(reference, [[result(1.5)], [result(1.0)], [result(value)]], [STREAMS[0]]))
    assert [(o.kind, o.rank, o.order) for o in found] == [("output", 0, "starve stream 0, on CUDA")] * wrong


def test_a_wait_for_an_event_that_is_never_recorded_is_an_error() -> None:
    with pytest.raises(InternalError, match=r"\(0, 1, 0\) waits for the event of \(0, 0, 0\)"):
        QueuedDevice().launch(Launch(0, 1, 0, 0, waits=((0, 0, 0),)), lambda: None)


def test_an_op_that_raises_is_named() -> None:
    issued, _ = issue(program(reduced, mesh=TP2))
    memories = [DeviceMemory(one, torch.device("cpu")) for one in issued]
    product = issued[1].ops[0]
    assert product.node == "mm"
    memories[1].values[0] = torch.zeros(3, 3)
    with pytest.raises(ExecutorError, match="'mm' of rank 1, on stream 0 of cpu, raises RuntimeError: mat1 and mat2"):
        run_launches(memories, QueuedDevice(), launches(issued))


def test_ranks_meet_on_the_device() -> None:
    assert seen_of(program(reduced, mesh=TP2), STREAMS) == set()
    racy = seen_of(program(lambda b: reduced(b, waits=False), mesh=TP2), STREAMS)
    assert racy == {(rank, "output 0 in starve stream 1, on CUDA") for rank in (0, 1)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(ExecutorError, match="no CUDA device"):
        explore_on_cuda(program(cross, mesh=ONE))
    with pytest.raises(ExecutorError, match="no CUDA device 0"):
        CudaDevice()
