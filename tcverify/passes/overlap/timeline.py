"""The time that an order of nodes takes: one queue for compute, one for communication.

Nodes are issued in order. Compute nodes occupy the compute queue. A start takes no time of that queue: its communication
begins when it is issued and the communication before it has ended, and lasts what the start costs. A wait blocks the compute
queue until what it waits for has ended. Blocking nodes occupy both queues. At the output all communication in flight is waited
for. Exposed is the time in which the compute queue does not compute.

Both queues only ever add and take the later of two times, so that the time from a place of an order to the end is given by three
numbers (`Tail`), whatever happened before: with them, and with the times at which a segment begins, a segment is judged
independently of the rest. Times are integers in units of 2⁻⁹⁰ s: sums do not depend on the order in which they are taken.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import fx

from tcverify.ops import lookup
from tcverify.passes.overlap.graph import CommGraph

#: Seconds of one unit of time.
UNIT_S = 2.0**-90

Queue = Literal["compute", "start", "wait", "both"]


class Now(NamedTuple):
    """The state of the queues: when the next node is issued, and when communication in flight ends."""

    compute: int
    communication: int


class Tail(NamedTuple):
    """The time from a place of an order to the end: from when the next node is issued, and from when communication
    in flight ends. `fixed` is the earliest possible end, due to everything that the two do not cover."""

    compute: int
    communication: int
    fixed: int = 0

    def end(self, now: Now) -> int:
        """When all has ended."""
        return max(now.compute + self.compute, now.communication + self.communication, self.fixed)


@dataclass(frozen=True, slots=True)
class Tasks:
    """What the nodes of a graph keep busy. Nodes are numbers, in graph order.

    Attributes:
        queues: per node, which queue it uses.
        costs: per node, in units of time; 0 where times are not known.
        awaited: per wait, the starts that it waits for.
        waits: per start, the waits for it.
        timed: whether times are known.
    """

    queues: tuple[Queue, ...]
    costs: tuple[int, ...]
    awaited: Mapping[int, tuple[int, ...]]
    waits: Mapping[int, tuple[int, ...]]
    timed: bool

    def run(self, nodes: Iterable[int], now: Now, ends: dict[int, int]) -> Now:
        """Issue nodes. `ends`: when communication ends, by start; starts among `nodes` are added."""
        compute, communication = now
        for node in nodes:
            queue = self.queues[node]
            if queue == "compute":
                compute += self.costs[node]
            elif queue == "wait":
                for start in self.awaited[node]:
                    compute = max(compute, ends[start])
            else:
                communication = max(compute, communication) + self.costs[node]
                if queue == "start":
                    ends[node] = communication
                else:
                    compute = communication
        return Now(compute, communication)

    def back(
        self,
        node: int,
        tail: Tail,
        from_wait: dict[int, int],
        ends: Mapping[int, int] | None = None,
        moving: Container[int] = (),
    ) -> Tail:
        """The tail before `node`, given the one behind it.

        Args:
            from_wait: how long it takes from the first wait for a start to the end, by start; starts that `node` waits for
                are entered.
            ends: when communication ends that was started before the segment that is judged; None where that does not count.
            moving: starts within the segment.
        """
        compute, communication, fixed = tail
        queue, cost = self.queues[node], self.costs[node]
        if queue == "compute":
            return Tail(compute + cost, communication, fixed)
        if queue == "wait":
            for start in self.awaited[node]:
                from_wait[start] = compute
                if ends is not None and start not in moving:
                    fixed = max(fixed, ends[start] + compute)
            return Tail(compute, communication, fixed)
        if queue == "start":
            communication = cost + max(communication, from_wait.get(node, 0))
            return Tail(max(compute, communication), communication, fixed)
        both = cost + max(compute, communication)
        return Tail(both, both, fixed)


def tasks(found: CommGraph, times: Mapping[fx.Node, float] | None) -> Tasks:
    """Return what the nodes of a graph keep busy.

    Args:
        times: seconds per node; None where they are not known.
    """
    numbers = {node: number for number, node in enumerate(found.nodes)}
    queues: list[Queue] = []
    for node in found.nodes:
        kind = found.kind(node)
        if kind == "start" or kind == "wait":
            queues.append(kind)
        else:  # what cannot be looked into computes, for all that is known
            communicates = node.op == "call_function" and "comm" in lookup(node.target).resources
            queues.append("both" if kind == "effect" and communicates else "compute")
    costs = [
        0 if times is None or queue == "wait" else to_units(times[node])
        for node, queue in zip(found.nodes, queues, strict=True)
    ]
    return Tasks(
        tuple(queues),
        tuple(costs),
        {numbers[wait]: tuple(numbers[each.start] for each in of) for wait, of in found.completes.items()},
        {numbers[each.start]: tuple(map(numbers.__getitem__, each.waits)) for each in found.starts},
        times is not None,
    )


def to_units(time_s: float) -> int:
    """Seconds in units of time."""
    return int(time_s * 2.0**90)


def to_seconds(time: int) -> float:
    """Units of time in seconds."""
    return float(time) * UNIT_S


@dataclass(frozen=True, slots=True)
class Span:
    """When a node runs, in units of time.

    Attributes:
        node: its number.
        issued: when it is issued.
        begin, end: when its work begins and ends: of a start, its communication; of a wait, the time that it holds compute up.
    """

    node: int
    issued: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class OrderTimeline:
    """An order, replayed.

    Attributes:
        spans: in the order of issue.
        joined: how long compute is blocked after the last node for communication without a wait.
        makespan: when all has ended.
        exposed: time in which compute is blocked, or both queues are busy: makespan minus all compute.
    """

    spans: tuple[Span, ...]
    joined: int
    makespan: int
    exposed: int


def replay_order(work: Tasks, order: Sequence[int]) -> OrderTimeline:
    """Replay an order from its beginning."""
    now = Now(0, 0)
    ends: dict[int, int] = {}
    computed = 0
    spans = []
    for node in order:
        issued = now.compute
        now = work.run((node,), now, ends)
        queue, cost = work.queues[node], work.costs[node]
        if queue == "compute":
            computed += cost
        end = now.communication if queue in ("start", "both") else now.compute
        spans.append(Span(node, issued, issued if queue in ("compute", "wait") else end - cost, end))
    makespan = max(now)
    return OrderTimeline(tuple(spans), makespan - now.compute, makespan, makespan - computed)


def exposures(work: Tasks, replayed: OrderTimeline) -> dict[int, int]:
    """How long each start of an asynchronous collective is exposed: how long waits for it block compute.

    A wait for several counts for the one that ends last; a start without a wait blocks the output.
    """
    exposed = dict.fromkeys(work.waits, 0)
    ends = {span.node: span.end for span in replayed.spans if work.queues[span.node] == "start"}
    for span in replayed.spans:
        awaited = work.awaited.get(span.node, ())
        if awaited:
            exposed[max(awaited, key=ends.__getitem__)] += span.end - span.issued
    if replayed.joined and ends:
        exposed[max(ends, key=ends.__getitem__)] += replayed.joined
    return exposed


def covering_times(work: Tasks, replayed: OrderTimeline) -> dict[int, int]:
    """How long the compute is that stands between each start and the first wait for it (or the end), by start."""
    total = 0
    at_start: dict[int, int] = {}
    found: dict[int, int] = {}
    for span in replayed.spans:
        queue = work.queues[span.node]
        if queue == "start":
            at_start[span.node] = total
        elif queue == "wait":
            for start in work.awaited[span.node]:
                found.setdefault(start, total - at_start[start])
        else:
            total += work.costs[span.node]
    return {start: found.get(start, total - before) for start, before in at_start.items()}


__all__ = [
    "Now",
    "OrderTimeline",
    "Span",
    "Tail",
    "Tasks",
    "covering_times",
    "exposures",
    "replay_order",
    "tasks",
    "to_seconds",
    "to_units",
]
