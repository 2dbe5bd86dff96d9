"""Streams without a device: queues that this process works off, by a clock on which delays pass and ops take no time.

What can begin earliest goes first, and of those what was issued first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from tcverify.errors import InternalError
from tcverify.execution.streams.launches import Launch, Point


class QueuedDevice:
    """A `Device` whose streams run on the CPU, one op at a time, when the host waits for them."""

    def __init__(self) -> None:
        self.place = torch.device("cpu")
        self._queues: dict[tuple[int, int], deque[tuple[float, int, Launch, Callable[[], None]]]] = {}
        self._clocks: dict[tuple[int, int], float] = {}  # of each stream
        self._events: dict[Point, float | None] = {}  # when each went off; None for those that have not
        self._host = 0.0
        self._issued = 0

    def hold(self, streams: Iterable[tuple[int, int]], seconds: float) -> None:
        """See `Device.hold`. Nothing begins before the host waits."""

    def launch(self, launch: Launch, work: Callable[[], None]) -> None:
        """See `Device.launch`.

        Raises:
            InternalError: it waits for an event that was not recorded; CUDA would not wait at all.
        """
        for point in launch.waits:
            if point not in self._events:
                raise InternalError(f"{launch.point} waits for the event of {point}, which is not recorded before it")
        queue = self._queues.setdefault((launch.rank, launch.stream), deque())
        queue.append((self._host, self._issued, launch, work))
        self._issued += 1
        if launch.event:
            self._events[launch.point] = None

    def join(self, streams: Iterable[tuple[int, int]]) -> None:
        """See `Device.join`."""
        for stream in streams:
            while self._queues.get(stream):
                self._next()
            self._host = max(self._host, self._clocks.get(stream, 0.0))

    def finish(self) -> None:
        """See `Device.finish`."""
        self.join(list(self._queues))
        self._events.clear()

    def _next(self) -> None:
        """Run what can begin earliest."""
        heads = [
            (start, queue[0][1], stream)
            for stream, queue in self._queues.items()
            if (start := self._start(stream)) >= 0
        ]
        start, _, stream = min(heads)
        _, _, launch, work = self._queues[stream].popleft()
        self._clocks[stream] = start
        if launch.event:
            self._events[launch.point] = start
        work()

    def _start(self, stream: tuple[int, int]) -> float:
        """When the head of a queue can begin; -1 while it waits for an event that has not gone off."""
        queue = self._queues[stream]
        if not queue:
            return -1.0
        issued, _, launch, _ = queue[0]
        times = [self._events[point] for point in launch.waits]
        if None in times:
            return -1.0
        return max(issued, self._clocks.get(stream, 0.0), *(t for t in times if t is not None)) + launch.delay_s


__all__ = ["QueuedDevice"]
