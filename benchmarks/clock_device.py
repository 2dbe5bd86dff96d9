"""Clocks of `gpu_clocks.py`: work is captured into a CUDA graph and timed by events, or run by the CPU in a rehearsal."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tcverify.program.stream_options import MAIN_STREAM


class Lanes(Protocol):
    """Streams that work is issued to."""

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Work that is issued meanwhile goes to this stream."""

    def wait(self, stream: int, event: int) -> None:
        """What follows on a stream begins after an event."""

    def mark(self, stream: int, event: int) -> None:
        """An event after what a stream was given so far."""

    def join(self) -> None:
        """What follows begins after everything so far, on any stream."""


class Replay(Protocol):
    """Work that can be repeated."""

    def run(self) -> None:
        """Start it once; returns before it is done."""


Work = Callable[[Lanes], Any]

#: How long a device is kept busy before what is timed.
AHEAD_S = 300e-6


class Clock(Protocol):
    """A device, and how work on it is repeated and timed.

    Attributes:
        place: the device.
        cache_bytes: of its largest cache: buffers are larger, or rotated.
    """

    place: torch.device
    cache_bytes: int

    @property
    def name(self) -> str: ...

    def capture(self, work: Work) -> Replay:
        """Keep work for repetition; whether it is run once is left open."""

    def seconds(self, replays: Sequence[Replay], rounds: int, times: int = 1) -> list[list[float]]:
        """Per replay, the seconds that one run took in each round, in which all take turns and run so many times."""

    def spin(self, seconds: float) -> None:
        """Keep the current stream busy, by a kernel of one block."""

    def without_waits(self) -> AbstractContextManager[None]:
        """Ops that make the host wait for the device raise meanwhile: they cannot be captured."""

    def finish(self) -> None:
        """Wait until all work is done."""


# -------------------------------------------------------------------------------------------------------------- CUDA


class CudaClock:
    """A CUDA device: work is captured into CUDA graphs, and timed by events."""

    def __init__(self, index: int = 0) -> None:
        self.place = torch.device("cuda", index)
        torch.cuda.set_device(self.place)
        torch.backends.cuda.matmul.allow_tf32 = False
        properties = torch.cuda.get_device_properties(self.place)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 50 << 20))
        self.streams = {MAIN_STREAM: torch.cuda.Stream(self.place)}
        self._pool: Any = None
        self._keeper: Replay | None = None
        a = torch.ones(64, 64, device=self.place)
        for stream in (self.stream(MAIN_STREAM), self.stream(1), self.stream(2)):
            with torch.cuda.stream(stream):  # libraries set themselves up at first use
                a @ a
                a.half() @ a.half()
        self.finish()
        self._cycles_per_s = 1.5e9
        self._cycles_per_s = self._measured_cycles()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.place)

    def stream(self, number: int) -> torch.cuda.Stream:
        if number not in self.streams:
            self.streams[number] = torch.cuda.Stream(self.place)
        return self.streams[number]

    def capture(self, work: Work) -> Replay:
        """See `Clock.capture`. The work itself is not run."""
        if self._pool is None:
            self._keep_pool()
        self.finish()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream(MAIN_STREAM)), _without_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                lanes = CudaLanes(self)
                kept = work(lanes)
                lanes.join()
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # says again that the capture is broken
                    graph.capture_end()
                self._pool = None  # the allocator may believe that it is still captured into
                raise
        return CudaReplay(graph, kept, self.stream(MAIN_STREAM))

    def _keep_pool(self) -> None:
        """Take a new pool of memory for graphs. It lasts as long as one of them, so the first is kept."""
        self._pool = torch.cuda.graph_pool_handle()
        one = torch.ones(8, device=self.place)
        self._keeper = self.capture(lambda lanes: one + 1)

    def seconds(self, replays: Sequence[Replay], rounds: int, times: int = 1) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in replays]
        pairs = [[_events() for _ in replays] for _ in range(rounds)]
        for pair in pairs:
            for replay, (start, end) in zip(replays, pair, strict=True):
                with torch.cuda.stream(self.stream(MAIN_STREAM)):
                    self.spin(AHEAD_S)  # meanwhile the host issues what is timed
                start.record(self.stream(MAIN_STREAM))
                for _ in range(times):
                    replay.run()
                end.record(self.stream(MAIN_STREAM))
        self.finish()
        for pair in pairs:
            for own, (start, end) in zip(found, pair, strict=True):
                own.append(1e-3 * start.elapsed_time(end) / times)
        return found

    def spin(self, seconds: float) -> None:
        torch.cuda._sleep(max(1, int(seconds * self._cycles_per_s)))

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def finish(self) -> None:
        torch.cuda.synchronize(self.place)

    def _measured_cycles(self) -> float:
        cycles = 10_000_000
        replay = self.capture(lambda lanes: torch.cuda._sleep(cycles))
        (times,) = self.seconds([replay], 5)
        return cycles / sorted(times)[2]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Nothing old is destroyed meanwhile, which a capture does not allow."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class CudaReplay:
    """A CUDA graph, and what its work returned, whose memory it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, kept: Any, stream: torch.cuda.Stream) -> None:
        self._graph, self._kept, self._stream = graph, kept, stream

    def run(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()


class CudaLanes:
    """Streams of a capture: each forks from the capturing one before its first work, and is joined at the end."""

    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        self._start = clock.stream(MAIN_STREAM).record_event()
        self._forked = {MAIN_STREAM}
        self._events: dict[int, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self._fork(stream)
        with torch.cuda.stream(self._clock.stream(stream)):
            yield

    def wait(self, stream: int, event: int) -> None:
        self._fork(stream)
        self._clock.stream(stream).wait_event(self._events[event])

    def mark(self, stream: int, event: int) -> None:
        self._events[event] = self._clock.stream(stream).record_event()

    def join(self) -> None:
        """See `Lanes.join`: the capturing stream waits for all others, which then fork anew."""
        main = self._clock.stream(MAIN_STREAM)
        for stream in self._forked - {MAIN_STREAM}:
            main.wait_event(self._clock.stream(stream).record_event())
        self._start, self._forked, self._events = main.record_event(), {MAIN_STREAM}, {}

    def _fork(self, stream: int) -> None:
        if stream not in self._forked:
            self._forked.add(stream)
            self._clock.stream(stream).wait_event(self._start)


# --------------------------------------------------------------------------------------------------------- rehearsal


class CpuClock:
    """The CPU in the place of a device: what is issued runs at once, streams one after the other."""

    def __init__(self) -> None:
        self.place = torch.device("cpu")
        self.cache_bytes = 1 << 16

    @property
    def name(self) -> str:
        return "CPU"

    def capture(self, work: Work) -> Replay:
        return CpuReplay(work)

    def seconds(self, replays: Sequence[Replay], rounds: int, times: int = 1) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in replays]
        for _ in range(rounds):
            for own, replay in zip(found, replays, strict=True):
                begun = time.perf_counter()
                for _ in range(times):
                    replay.run()
                own.append((time.perf_counter() - begun) / times)
        return found

    def spin(self, seconds: float) -> None:
        time.sleep(seconds)

    def without_waits(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass


class CpuReplay:
    """Work that is done again by the CPU, into the memory of the first time."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.kept = work(CpuLanes())

    def run(self) -> None:
        again = self._work(CpuLanes())
        for old, new in zip(_tensors(self.kept), _tensors(again), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


class CpuLanes:
    """No streams."""

    def on(self, stream: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wait(self, stream: int, event: int) -> None:
        pass

    def mark(self, stream: int, event: int) -> None:
        pass

    def join(self) -> None:
        pass
