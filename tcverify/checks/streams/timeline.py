"""Timeline: when the ops of a rank with asynchronous collectives run.

The host issues ops in graph order to one queue for compute. A start takes no time there: once issued, its communication
queues behind all earlier communication of the rank. A wait blocks the queue for compute until its data has arrived.
Blocking collectives occupy both queues. At the end, everything in flight is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tcverify.checks.streams.reading import IssuedOp


@dataclass(frozen=True, slots=True)
class Span:
    """When an op runs, in seconds from the beginning. `issued` is when it joins its queue."""

    issued: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A period during which compute waits for communication.

    Attributes:
        node: the wait; the blocking op; or the output, where communication in flight is joined.
        awaited: name of the start that arrives last; for a blocking op, itself, or "" if it waits for the queue before it.
        start_s, end_s: seconds from the beginning.
    """

    node: str
    awaited: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of all ops, in issue order; the span of a wait is its stall. Times in seconds.

    Attributes:
        exposed_s: makespan minus compute time, the sum of the stalls.
    """

    spans: tuple[Span, ...]
    stalls: tuple[Stall, ...]
    makespan_s: float
    exposed_s: float


def compute_timeline(ops: Sequence[IssuedOp], costs: Sequence[float], output: str) -> Timeline:
    """Return when ops with the given durations run. Linear in ops."""
    now = channel = 0.0  # until when compute, and communication, is busy
    arriving: dict[int, tuple[float, str]] = {}  # storage -> when the last transfer to it arrives, and its start
    spans: list[Span] = []
    stalls: list[Stall] = []
    last = ""
    for op, cost in zip(ops, costs, strict=True):
        issued = now
        if op.phase == "start":
            begin = max(now, channel)
            channel, last = begin + cost, op.name
            arriving.update(dict.fromkeys(op.writes, (channel, op.name)))
            spans.append(Span(issued, begin, channel))
            continue
        if op.phase == "wait":
            found = [arriving.pop(storage) for storage, _ in op.reads if storage in arriving]
            arrives, start = max(found, default=(now, ""))
            if arrives > now:
                stalls.append(Stall(op.name, start, now, arrives))
                now = arrives
            spans.append(Span(issued, issued, now))
            continue
        if "comm" in op.resources:
            begin = max(now, channel)
            if begin > now:
                stalls.append(Stall(op.name, last, now, begin))
            now = channel = begin + cost
            last = op.name
            if "compute" not in op.resources and cost > 0:
                stalls.append(Stall(op.name, op.name, begin, now))
            spans.append(Span(issued, begin, now))
            continue
        now += cost
        spans.append(Span(issued, issued, now))
    if channel > now:
        stalls.append(Stall(output, last, now, channel))
    exposed = 0.0
    for stall in stalls:
        exposed += stall.end_s - stall.start_s
    return Timeline(tuple(spans), tuple(stalls), max(now, channel), exposed)


__all__ = ["Span", "Stall", "Timeline", "compute_timeline"]
