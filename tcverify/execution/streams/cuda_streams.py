"""Runs a lowered program on real CUDA streams, one per stream of each rank, with delays.

All ranks share one device and one process. The host issues as a real one does, by position (see `queues`): an op goes to its
stream, after the events that it waits for; a record is an event after the op that was issued last. A collective leaves a copy
of each member's contribution and an event; each member's stream waits for the events of all, and computes its result from the
copies. So nothing but streams and events orders anything. The host issues all before any stream begins. Sleeps before some ops
(see `launches`) let other streams overtake them, so that a read without a wait happens too early and finds poison (see
`device_memory`). All streams come from torch's pool and are non-blocking. The outputs are copied by stream 0 of each rank; the
host waits for these streams alone, and only then for the device.

A difference counts when outputs differ from lockstep's and from those of the same kernels in one stream per rank: so
device-specific rounding is not mistaken for a race. A difference proves a race; its absence proves little: a device may run
streams one after the other if it lacks space, hardware queues (see `HARDWARE_QUEUES`) or streams (torch's pool has 32), and
some ops make the host wait. Kernels are loaded and memory is allocated at first use, which can make streams wait as well; so
every program runs without delays first. Collectives that ranks enter in different orders do not block each other here, as they
may in NCCL.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from tcverify.errors import ExecutorError, UnsupportedOp
from tcverify.execution.compare import compare_ranks
from tcverify.execution.executor import Run
from tcverify.execution.interpreter import RankResult
from tcverify.execution.plan import first_line, plans_of
from tcverify.execution.streams.device_memory import DeviceMemory
from tcverify.execution.streams.exploration import MOST_OPS, StreamOrder
from tcverify.execution.streams.issue import IssuedRank, is_lowered, issue
from tcverify.execution.streams.launches import (
    Launch,
    Point,
    delay_seconds,
    held_back,
    in_one_stream,
    launches,
)
from tcverify.execution.streams.observations import OrderObservation
from tcverify.ops import Collective, complete
from tcverify.program import Contract, Program
from tcverify.program.contract import Boundary, InputsReady
from tcverify.program.stream_options import MAIN_STREAM

#: Hardware queues that CUDA is asked for, where it has not started yet. With fewer than there are streams, some share a queue,
#: and wait for each other. CUDA's own default is 8, and it has 32 at most.
HARDWARE_QUEUES = 32
#: How far outputs may differ, relative to their scale. Reading too early gives NaN or the values of another op.
TOLERANCE = 2.0**-30


class Device(Protocol):
    """Streams, each known by its rank and number, and a host that gives them work."""

    place: torch.device

    def hold(self, streams: Iterable[tuple[int, int]], seconds: float) -> None:
        """Let these streams begin after this time, all at once: until then, the host issues."""
        ...

    def launch(self, launch: Launch, work: Callable[[], None]) -> None:
        """Put work into the queue of a stream, behind its waits and its delay, and record its event."""
        ...

    def join(self, streams: Iterable[tuple[int, int]]) -> None:
        """Wait until these streams have done all that they were given."""
        ...

    def finish(self) -> None:
        """Wait until all streams have, and forget the events."""
        ...


class CudaDevice:
    """Streams on a CUDA device, which live as long as this object.

    Raises:
        ExecutorError: there is no such device.
    """

    def __init__(self, index: int = 0) -> None:
        if index >= torch.cuda.device_count():
            raise ExecutorError(
                f"there is no CUDA device {index}", "explore the streams in lockstep, which needs no device"
            )
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(HARDWARE_QUEUES))
        self.place = torch.device("cuda", index)
        self._cycles_per_s = 1e3 * torch.cuda.get_device_properties(self.place).clock_rate
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._events: dict[Point, torch.cuda.Event] = {}

    def hold(self, streams: Iterable[tuple[int, int]], seconds: float) -> None:
        """See `Device.hold`."""
        first, *others = [self._stream(stream) for stream in streams]
        with torch.cuda.stream(first):
            self._sleep(seconds)
        begun = first.record_event()
        for stream in others:
            stream.wait_event(begun)

    def _sleep(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def launch(self, launch: Launch, work: Callable[[], None]) -> None:
        """See `Device.launch`. Returns before the work is done, unless an op makes the host wait."""
        stream = self._stream((launch.rank, launch.stream))
        with torch.cuda.stream(stream):
            for point in launch.waits:
                stream.wait_event(self._events[point])
            if launch.delay_s:
                self._sleep(launch.delay_s)
            work()
            if launch.event:
                self._events[launch.point] = stream.record_event()

    def _stream(self, key: tuple[int, int]) -> torch.cuda.Stream:
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.place)
        return self._streams[key]

    def join(self, streams: Iterable[tuple[int, int]]) -> None:
        for stream in streams:
            self._stream(stream).synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize(self.place)
        self._events.clear()


class _Issuing:
    """One run of all ranks: what their launches do."""

    def __init__(self, memories: Sequence[DeviceMemory], device: Device) -> None:
        self._memories = memories
        self._device = device
        self._steps: dict[tuple[int, int], Generator[Any, torch.Tensor | None, list[torch.Tensor]]] = {}
        self._entered: dict[Point, tuple[Collective, torch.Tensor]] = {}  # kept until the end: other streams read them
        self._failed = False
        self.results: dict[int, RankResult] = {}

    def work(self, launch: Launch) -> None:
        """Do a launch. Queues are worked off when something has failed, without doing more.

        Raises:
            ExecutorError: an op raises on the device, although it did not on the CPU.
            UnsupportedOp: an op has no meaning for these arguments.
        """
        if self._failed:
            return
        memory = self._memories[launch.rank]
        op = memory.issued.ops[launch.op]
        try:
            self._advance(memory, launch)
        except Exception as error:  # what kernels raise
            self._failed = True
            if isinstance(error, (ExecutorError, UnsupportedOp)):
                raise
            where = f"'{op.node}' of rank {launch.rank}, on stream {launch.stream} of {self._device.place}"
            raise ExecutorError(f"{where}, raises {type(error).__name__}: {first_line(error)}") from error

    def _advance(self, memory: DeviceMemory, launch: Launch) -> None:
        ops = memory.issued.ops
        op = ops[launch.op]
        if launch.part:
            calls, tensors = zip(*(self._entered[member] for member in launch.members), strict=True)
            own = [member[0] for member in launch.members].index(launch.rank)
            answer = complete(calls, tensors)[own]
        else:
            self._steps[launch.rank, launch.op], answer = memory.compute(op), None
        try:
            asked = self._steps[launch.rank, launch.op].send(answer)
        except StopIteration as stop:
            memory.store(op, stop.value)
            if launch.op == len(ops) - 1:
                self.results[launch.rank] = memory.result()
        else:
            self._entered[launch.point] = asked.collective, asked.tensor.clone()


def run_launches(
    memories: Sequence[DeviceMemory], device: Device, plan: Sequence[Launch], hold_s: float = 0.0
) -> list[RankResult]:
    """Give the launches of all ranks to a device, in order; returns what stream 0 of each sees at the end, on the CPU.

    Args:
        hold_s: time for the host, before any stream begins.

    Raises as `_Issuing.work` does.
    """
    issuing = _Issuing(memories, device)
    with torch.no_grad():
        for memory in memories:
            memory.reset()
        device.finish()
        try:
            if hold_s:
                device.hold(sorted({(launch.rank, launch.stream) for launch in plan}), hold_s)
            for launch in plan:
                device.launch(launch, partial(issuing.work, launch))
            device.join([(rank, MAIN_STREAM) for rank in range(len(memories))])
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what was launched may still use the places
                device.finish()
            raise
        results = [issuing.results[rank] for rank in range(len(memories))]
        for result in results:
            result.outputs = [v.cpu() if isinstance(v, torch.Tensor) else v for v in result.outputs]
            result.inputs = [value.cpu() for value in result.inputs]
        device.finish()
    return results


def run_orders(issued: Sequence[IssuedRank], device: Device, orders: Sequence[StreamOrder]) -> list[list[RankResult]]:
    """Run all ranks in one stream each, on their streams without delays, and in the orders given. Raises as `run_launches` does.

    Returns:
        The ranks' results per run: that in one stream, that without delays, then one per order.
    """
    memories = [DeviceMemory(one, device.place) for one in issued]
    plain = launches(issued)
    results = [run_launches(memories, device, in_one_stream(issued)), run_launches(memories, device, plain)]
    begun = time.perf_counter()
    run_launches(memories, device, plain)
    seconds = time.perf_counter() - begun
    for order in orders:
        held = held_back(order, issued)
        delayed = sum(((one.rank, one.op), one.part > 0) in held for one in plain)
        plan = launches(issued, held, delay_seconds(seconds, delayed))
        results.append(run_launches(memories, device, plan, hold_s=2 * seconds))
    return results


def explore_on_cuda(
    program: Program,
    reference: Run | None = None,
    seeds: Sequence[int] = (0,),
    *,
    boundary: Boundary = "strict",
    inputs: InputsReady = "ready",
    orders: Sequence[StreamOrder] | None = None,
    device: Device | None = None,
) -> list[OrderObservation]:
    """Run a lowered program on real CUDA streams, each stream delayed in turn, then ops drawn at random.

    Args:
        reference: the program's run in lockstep, by default that of the issue order.
        seeds: of the random draws.
        boundary, inputs: as in `Contract`.
        orders: what is delayed, instead.
        device: what runs the streams, by default the first CUDA device.

    Returns:
        Outputs that were wrong, each once; none for a program that is not lowered, does not run to its end, or is too large.

    Raises:
        ExecutorError: there is no CUDA device, or it fails.
        UnsupportedOp: an op has no meaning.
    """
    if device is None and not torch.cuda.is_available():
        raise ExecutorError("there is no CUDA device", "explore the streams in lockstep, which needs no device")
    Contract(boundary=boundary, inputs=inputs)  # refuses other words
    if not any(map(is_lowered, plans_of(program))):
        return []
    issued, run = issue(program, boundary, inputs)
    if not issued or sum(len(one.ops) for one in issued) > MOST_OPS:
        return []
    if orders is None:
        used = sorted({op.stream for one in issued for op in one.ops})
        orders = [*(StreamOrder("starve", stream=s) for s in used), *(StreamOrder("random", seed) for seed in seeds)]
    try:
        results = run_orders(issued, CudaDevice() if device is None else device, orders)
    except RuntimeError as error:  # what CUDA raises, when an op fails that was launched before, or memory is short
        raise ExecutorError(f"the CUDA device fails: {first_line(error)}") from error
    reference = run if reference is None or not reference.finished else reference
    return list(compare_orders(reference, results, orders))


def compare_orders(
    reference: Run, results: Sequence[Sequence[RankResult]], orders: Sequence[StreamOrder]
) -> Iterator[OrderObservation]:
    """Say which outputs differ from lockstep's and from those in one stream, each in the first order that shows it.

    Args:
        results: as `run_orders` returns them.
    """
    alone, *others = results
    known: set[tuple[int, str]] = set()
    for order, found in zip([StreamOrder("issue"), *orders], others, strict=True):
        for expected, single, seen in zip(reference.ranks, alone, found, strict=True):
            for label in sorted(_wrong(expected, seen) & _wrong(single, seen)):
                if (expected.rank, label) in known:
                    continue
                known.add((expected.rank, label))
                text = f"{label} on CUDA streams differs from what it is in lockstep, and in one stream of the device"
                name = f"{order}, on CUDA"
                yield OrderObservation("output", expected.rank, "output", MAIN_STREAM, "", text, name, ())


def _wrong(expected: RankResult, found: RankResult) -> set[str]:
    deltas = (delta for delta in compare_ranks(expected, found) if not delta.alias)  # outputs are copies here
    return {d.label for d in deltas if d.problem or d.overflow or d.difference > TOLERANCE * d.scale}


__all__ = [
    "CudaDevice",
    "Device",
    "compare_orders",
    "explore_on_cuda",
    "run_launches",
    "run_orders",
]
