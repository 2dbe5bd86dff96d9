"""Runs a lowered program on real CUDA streams, one per stream of the program, with delays.

Nothing in this module that touches CUDA has been run on a GPU yet: it follows torch's and NVIDIA's documentation.

The host issues as a real one does, by position (see `queues`): an op goes to its stream, after the events that it waits
for; a record is an event after the op that was issued last. Sleeps before some ops (see `launches`) let other streams overtake
them, so that a read without a wait happens too early and finds poison (see `device_memory`). Stream 0 is the default
stream; the others come from torch's pool and, being non-blocking, do not wait for it implicitly. The outputs are copied by
stream 0, the host waits for stream 0 alone, and only then for the device.

A difference counts when outputs differ from lockstep's and from those of the same kernels in one stream: so device-specific
rounding is not mistaken for a race. A difference proves a race; its absence proves little: a device may run streams one after
the other if it lacks space, hardware queues (8 by default, CUDA_DEVICE_MAX_CONNECTIONS) or streams (torch's pool has
32), and some ops make the host wait. Kernels are loaded and memory is allocated at first use, which can make streams wait as
well; so every program runs without delays first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from tcverify.errors import ExecutorError, UnsupportedOp
from tcverify.execution.interpreter import RankResult
from tcverify.execution.plan import first_line
from tcverify.execution.streams.device_memory import DeviceMemory, Transport
from tcverify.execution.streams.exploration import StreamOrder
from tcverify.execution.streams.issue import IssuedRank
from tcverify.execution.streams.launches import Launch, delay_seconds, held_back, in_one_stream, launches
from tcverify.program.stream_options import MAIN_STREAM

#: Cycles that a second has at most: a slower clock sleeps longer.
CYCLES_PER_S = 3e9


class Device(Protocol):
    """Streams, and a host that gives them work."""

    place: torch.device

    def launch(self, launch: Launch, work: Callable[[], None]) -> None:
        """Put work into the queue of a stream, behind its waits and its delay, and record its event."""
        ...

    def join(self, stream: int) -> None:
        """Wait until a stream has done all that it was given."""
        ...

    def finish(self) -> None:
        """Wait until all streams have, and forget the events."""
        ...


class CudaDevice:
    """The streams of one rank on a CUDA device, which live as long as this object.

    Raises:
        ExecutorError: there is no such device.
    """

    def __init__(self, index: int = 0) -> None:
        if index >= torch.cuda.device_count():
            raise ExecutorError(
                f"there is no CUDA device {index}", "explore the streams in lockstep, which needs no device"
            )
        self.place = torch.device("cuda", index)
        self._streams = {MAIN_STREAM: torch.cuda.default_stream(self.place)}
        self._events: dict[int, torch.cuda.Event] = {}

    def launch(self, launch: Launch, work: Callable[[], None]) -> None:
        """See `Device.launch`. Returns before the work is done, unless an op makes the host wait."""
        stream = self._stream(launch.stream)
        with torch.cuda.stream(stream):
            for op in launch.waits:
                stream.wait_event(self._events[op])
            if launch.delay_s:
                torch.cuda._sleep(int(launch.delay_s * CYCLES_PER_S))
            work()
            if launch.event:
                self._events[launch.op] = stream.record_event()

    def _stream(self, number: int) -> torch.cuda.Stream:
        if number not in self._streams:
            self._streams[number] = torch.cuda.Stream(self.place)
        return self._streams[number]

    def join(self, stream: int) -> None:
        self._stream(stream).synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize(self.place)
        self._events.clear()


def run_launches(places: DeviceMemory, device: Device, plan: Sequence[Launch]) -> RankResult:
    """Give a rank's launches to a device, in order; returns what stream 0 sees at the end, on the CPU.

    Raises:
        ExecutorError: an op raises on the device, although it did not on the CPU.
        UnsupportedOp: an op has no meaning for these arguments.
    """
    ops = places.issued.ops
    entered: dict[int, list[torch.Tensor]] = {}
    seen: list[RankResult] = []
    failed = False

    def work(launch: Launch) -> None:
        nonlocal failed
        if failed:  # queues are worked off all the same
            return
        op = ops[launch.op]
        try:
            if launch.part != "leave":
                entered[launch.op] = places.compute(op)
            if launch.part != "enter":
                places.store(op, entered.pop(launch.op))
            if launch.op == len(ops) - 1:
                seen.append(places.result())
        except Exception as error:  # what kernels, gloo and NCCL raise
            failed = True
            if isinstance(error, (ExecutorError, UnsupportedOp)):
                raise
            where = f"'{op.node}' of rank {places.issued.rank}, on stream {launch.stream} of {device.place}"
            raise ExecutorError(f"{where}, raises {type(error).__name__}: {first_line(error)}") from error

    with torch.no_grad():
        places.reset()
        device.finish()
        try:
            for launch in plan:
                device.launch(launch, partial(work, launch))
            device.join(MAIN_STREAM)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what was launched may still use the places
                device.finish()
            raise
        (result,) = seen
        result.outputs = [v.cpu() if isinstance(v, torch.Tensor) else v for v in result.outputs]
        result.inputs = [value.cpu() for value in result.inputs]
        device.finish()
    return result


def run_orders(
    issued: IssuedRank, device: Device, transport: Transport, orders: Sequence[StreamOrder]
) -> list[RankResult]:
    """Run a rank in one stream, on its streams without delays, and in the orders given. Raises as `run_launches` does.

    Returns:
        One result per run: that in one stream, that without delays, then one per order.
    """
    places = DeviceMemory(issued, device.place, transport)
    results = [
        run_launches(places, device, in_one_stream(issued.ops)),
        run_launches(places, device, launches(issued.ops)),
    ]
    begun = time.perf_counter()
    run_launches(places, device, launches(issued.ops))
    seconds = time.perf_counter() - begun
    for order in orders:
        held = held_back(order, issued.ops, issued.rank)
        plan = launches(issued.ops, held, delay_seconds(seconds, len(held)))
        results.append(run_launches(places, device, plan))
    return results


__all__ = ["CudaDevice", "Device", "run_launches", "run_orders"]
