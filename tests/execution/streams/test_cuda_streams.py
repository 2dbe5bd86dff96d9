"""Streams on a device: what is planned, what queues in the place of a device show, and what CUDA devices have to show."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tcverify.errors import ExecutorError, InternalError, UsageError
from tcverify.execution import RankResult, Run, StreamOrder, explore, explore_on_cuda
from tcverify.execution.streams.cuda_ranks import compare_orders, run_ranks
from tcverify.execution.streams.cuda_streams import CudaDevice, Device, run_launches, run_orders
from tcverify.execution.streams.device_memory import DeviceMemory, Transport
from tcverify.execution.streams.issue import issue
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
from tcverify.ops import Collective
from tcverify.ops.distributed import perform
from tcverify.passes import Multistream
from tcverify.program import Mesh, Program
from tcverify.verification.verifier import verify
from tests.support.lowered import Build, Lowering, program
from tests.support.programs import TP2
from tests.support.random_lowered import draw
from tests.support.stream_programs import Builder, is_lowered, lowered
from tests.support.stream_programs import program as lowerable

ONE = Mesh.grid({"dp": 1, "tp": 1})
STREAMS = [
    StreamOrder("starve", stream=0),
    StreamOrder("starve", stream=1),
    StreamOrder("random", seed=1),
    StreamOrder("random", seed=2),
]


def op(stream: int, *after: int, collective: bool = False) -> StreamOp:
    return StreamOp("op", stream, None, after, (), (), (), ((0,),) if collective else ())


def cross(b: Lowering, *, waits: bool = True, joins: bool = True) -> Any:
    """mm on stream 0, relu of it on stream 1, joined by the output."""
    product = b.mm(b.x)
    out = b.relu(b.wait(product, 1, *([b.record(product)] if waits else [])))
    done = b.record(out, 1)
    return b.wait(out, 0, *([done] if joins else []))


def reduced(b: Lowering, *, waits: bool = True) -> Any:
    """mm on stream 0, all_reduce of it on stream 1, relu of that on stream 0, which may not wait for it."""
    product = b.mm(b.x)
    total = b.reduce(b.wait(product, 1, b.record(product)))
    done = b.record(total, 1)
    out = b.relu(b.wait(total, 0, *([done] if waits else [])))
    return b.wait(out, 0, b.record(out, 0))


# ---------------------------------------------------------------------------------------------------------- the plan


def test_a_launch_waits_for_the_events_of_other_streams_alone() -> None:
    ops = [op(0), op(1, 0), op(0, 0), op(0, 2, 1)]
    assert launches(ops, held={1}, delay_s=0.5) == [
        Launch(0, "run", 0, (), 0.0, True),
        Launch(1, "run", 1, (0,), 0.5, True),
        Launch(2, "run", 0, (), 0.0, False),
        Launch(3, "run", 0, (1,), 0.0, False),
    ]


def test_a_collective_is_held_back_before_it_reads_and_before_it_writes() -> None:
    assert launches([op(0), op(1, 0, collective=True), op(0, 0, 1)], held={1}, delay_s=0.5)[1:3] == [
        Launch(1, "enter", 1, (0,), 0.5, False),
        Launch(1, "leave", 1, (), 0.5, True),
    ]


def test_without_streams_nothing_waits() -> None:
    assert in_one_stream([op(0), op(1, 0)]) == [
        Launch(0, "run", 0, (), 0.0, False),
        Launch(1, "run", 0, (), 0.0, False),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_events_are_recorded_before_they_are_waited_for(seed: int) -> None:
    """CUDA lets a stream pass that waits for an event which nobody has recorded."""
    issued, _ = issue(draw(seed).program)
    for rank in issued:
        recorded: dict[int, int] = {}
        for launch in launches(rank.ops):
            assert all(recorded[before] != launch.stream for before in launch.waits)
            if launch.event:
                recorded[launch.op] = launch.stream


@pytest.mark.parametrize(("order", "held"), [
    (StreamOrder("issue"), set()),
    (StreamOrder("starve", stream=1), {1, 4}),
    (StreamOrder("rush", stream=1), {0, 2, 3}),
    (StreamOrder("early", op=3), {1, 4}),
    (StreamOrder("early", op=3, rank=1), set()),
])  # fmt: skip
def test_what_an_order_does_not_prefer_is_held_back(order: StreamOrder, held: set[int]) -> None:
    assert held_back(order, [op(0), op(1), op(0, 0), op(2, 2), op(1, 1)]) == held


def test_random_orders_are_functions_of_seed_and_rank() -> None:
    ops = [op(0)] * 200
    first = held_back(StreamOrder("random", seed=3), ops)
    assert first == held_back(StreamOrder("random", seed=3), ops)
    assert 20 < len(first) < 120
    assert first != held_back(StreamOrder("random", seed=4), ops)
    assert first != held_back(StreamOrder("random", seed=3), ops, rank=1)


def test_an_order_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="no order 'late'"):
        held_back(StreamOrder("late"), [op(0)])


def test_delays_outlast_the_host_but_not_the_user() -> None:
    assert delay_seconds(0.0001, 3) == SHORTEST_S
    assert delay_seconds(0.1, 3) == 0.2
    assert delay_seconds(0.1, 100) == MOST_S / 100
    assert delay_seconds(1.0, 10_000) == SHORTEST_S
    assert delay_seconds(0.1, 0) == 0.2


# ----------------------------------------------------------------------------------- queues in the place of a device


def seen(
    *builds: Build,
    orders: Sequence[StreamOrder] = tuple(STREAMS),
    device: Device | None = None,
    transport: Transport = perform,
    **options: str,
) -> set[str]:
    """What goes wrong with a program of one rank, as "label in order"."""
    return seen_of(program(*builds, mesh=ONE), orders, device, transport, **options)


def seen_of(
    one: Program,
    orders: Sequence[StreamOrder],
    device: Device | None = None,
    transport: Transport = perform,
    **options: str,
) -> set[str]:
    issued, run = issue(one, **options)
    results = run_orders(issued[0], QueuedDevice() if device is None else device, transport, orders)
    return {f"{o.text.split(' on CUDA')[0]} in {o.order}" for o in compare_orders(run, [results], orders)}


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
def test_queues_with_delays_show_the_wrong_outputs_that_the_stream_executor_finds(first: int) -> None:
    """It shares how the host issues, but neither memory nor how the order is chosen."""
    wrong = hidden = 0
    for seed in range(first, first + 40):
        drawn = draw(seed, ONE)
        orders = [StreamOrder("early", op=i) for i in range(len(drawn.ops))] + STREAMS
        found = explore(drawn.program, systematic=True)
        assert found is not None
        adversary = any(o.kind == "output" for o in found.observations)
        assert bool(seen_of(drawn.program, orders)) == adversary, seed
        staged = bool(seen_of(drawn.program, orders, QueuedDevice(staged=True)))
        assert adversary or not staged, seed
        wrong += adversary
        hidden += adversary and not staged
    assert wrong > 10
    assert 0 < hidden < wrong / 2  # collectives through the host hide some


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
    found = list(compare_orders(reference, [[result(1.5), result(1.0), result(value)]], [STREAMS[0]]))
    assert [(o.kind, o.rank, o.order) for o in found] == [("output", 0, "starve stream 0, on CUDA")] * wrong


def test_a_wait_for_an_event_that_is_never_recorded_is_an_error() -> None:
    with pytest.raises(InternalError, match="op 1 waits for the event of op 0"):
        QueuedDevice().launch(Launch(1, "run", 0, (0,), 0.0, False), lambda: None)


def test_an_op_that_raises_is_named() -> None:
    issued, _ = issue(program(reduced, mesh=ONE))

    def refuses(call: Collective, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no route")

    places = DeviceMemory(issued[0], torch.device("cpu"), refuses)
    with pytest.raises(
        ExecutorError, match="'all_reduce' of rank 0, on stream 1 of cpu, raises RuntimeError: no route"
    ):
        run_launches(places, QueuedDevice(), launches(issued[0].ops))


# ---------------------------------------------------------------------------------------------------- several ranks


def wrong_on_ranks(build: Build, device: str) -> set[tuple[int, str]]:
    two = program(build, mesh=TP2)
    _, run = issue(two)
    results = run_ranks(two, STREAMS, "strict", "ready", 120.0, device)
    return {(o.rank, o.order) for o in compare_orders(run, results, STREAMS)}


def test_ranks_meet_by_gloo() -> None:
    assert wrong_on_ranks(reduced, "cpu") == set()
    racy = wrong_on_ranks(lambda b: reduced(b, waits=False), "cpu")
    assert racy == {(0, "starve stream 1, on CUDA"), (1, "starve stream 1, on CUDA")}


def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(ExecutorError, match=r"gloo on cpu streams: on rank \d, UsageError: there is no order 'late'"):
        run_ranks(program(reduced), [StreamOrder("late")], "strict", "ready", 120.0, "cpu")


def test_ranks_that_do_not_answer_are_named() -> None:
    with pytest.raises(ExecutorError, match=r"ranks \[0, 1\] had not answered after 0 s"):
        run_ranks(program(reduced), STREAMS, "strict", "ready", 0.0, "cpu")


# ------------------------------------------------------------------------------------------------------ CUDA devices

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
needs_one_only = pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device and no other")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(ExecutorError, match="no CUDA device"):
        explore_on_cuda(program(cross, mesh=ONE))
    with pytest.raises(ExecutorError, match="no CUDA device 0"):
        CudaDevice()


@needs_cuda
def test_cuda_a_sound_program_is_right_under_delays() -> None:
    assert explore_on_cuda(program(cross, mesh=ONE), seeds=range(5)) == []
    assert explore_on_cuda(program(reduced, mesh=ONE), seeds=range(5)) == []


@needs_cuda
def test_cuda_a_missing_wait_shows_under_delay() -> None:
    found = explore_on_cuda(program(lambda b: cross(b, waits=False), mesh=ONE))
    assert [(o.kind, o.order) for o in found] == [("output", "starve stream 0, on CUDA")]
    found = explore_on_cuda(program(lambda b: cross(b, joins=False), mesh=ONE))
    assert [(o.kind, o.order) for o in found] == [("output", "starve stream 1, on CUDA")]


@needs_cuda
def test_cuda_random_programs_go_wrong_only_where_something_races() -> None:
    for seed in random.Random(0).sample(range(1000), 30):
        drawn = draw(seed, ONE)
        assert not explore_on_cuda(drawn.program) or drawn.races, seed


@needs_cuda
@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
def test_cuda_nccl_of_one_rank_keeps_to_its_stream(tmp_path: Path) -> None:
    def nccl(call: Collective, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        assert seen(reduced, device=CudaDevice(), transport=nccl) == set()
        racy = seen(lambda b: reduced(b, waits=False), device=CudaDevice(), transport=nccl)
        assert racy == {"output 0 in starve stream 1, on CUDA"}
    finally:
        dist.destroy_process_group()


@needs_cuda
def test_cuda_deep_verification_runs_the_streams_on_the_device() -> None:
    def build(b: Builder) -> Any:
        return b.add(b.mm(b.all_reduce(b["x"])), b.mm(b.mm(b["r"])))

    original = lowerable(build)
    assert is_lowered(lowered(original))
    verdict = verify(Multistream(), original, deep=True)
    assert verdict.status == "passed", (verdict.findings, verdict.doubts)


@needs_one_only
def test_cuda_two_ranks_on_one_device_meet_by_gloo() -> None:
    assert explore_on_cuda(program(reduced)) == []
    found = explore_on_cuda(program(lambda b: reduced(b, waits=False)))
    assert {(o.rank, o.order) for o in found} == {(0, "starve stream 1, on CUDA"), (1, "starve stream 1, on CUDA")}


@needs_two
def test_cuda_two_ranks_on_two_devices_meet_by_nccl() -> None:
    assert explore_on_cuda(program(reduced)) == []
    found = explore_on_cuda(program(lambda b: reduced(b, waits=False)))
    assert {(o.rank, o.order) for o in found} == {(0, "starve stream 1, on CUDA"), (1, "starve stream 1, on CUDA")}
