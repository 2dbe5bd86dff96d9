"""List scheduling of work on streams, after HEFT (Topcuoglu, Hariri and Wu, 2002), in order of issue and without insertion.

Ops are issued one after the other. Each starts when its stream, every resource that it keeps busy and everything that it
waits for are free or done, where the end of an op of another stream is known only after the synchronisation overhead. The
lowered graph replays exactly this: the same maxima and sums in the same order, so that prediction and replay agree to the
last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from tcverify.passes.multistream.graph import NotLowered, WorkOp
from tcverify.program.stream_options import MAIN_STREAM


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """An op on its stream.

    Attributes:
        tokens: numbers of the ops whose tokens it waits for; everything else that it follows is done by then anyway.
    """

    op: WorkOp
    stream: int
    start_s: float
    end_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Work in issue order, with its times.

    Attributes:
        join: numbers of the ops whose tokens the output waits for.
        makespan_s: when the last op ends.
        serial_s: all costs added up in the order of issue.
        critical_path_s: longest chain of costs that no schedule can shorten.
    """

    placed: tuple[PlacedOp, ...]
    join: tuple[int, ...]
    makespan_s: float
    serial_s: float
    critical_path_s: float
    sync_overhead_s: float

    @property
    def gain(self) -> float:
        """Speedup over sequential execution."""
        return self.serial_s / self.makespan_s if self.makespan_s else 1.0

    def declared(self) -> dict[str, float]:
        """The schedule that the lowered graph declares."""
        return {
            "makespan_s": self.makespan_s,
            "serial_s": self.serial_s,
            "critical_path_s": self.critical_path_s,
            "sync_overhead_s": self.sync_overhead_s,
        }


def upward_ranks(work: Sequence[WorkOp], before: Sequence[Sequence[int]], overhead_s: float) -> list[float]:
    """For each op, its cost and the longest way from its end to the end of all, with an overhead for every edge."""
    ranks = [op.cost_s for op in work]
    behind = [0.0] * len(work)
    for op in reversed(work):
        ranks[op.index] = op.cost_s + behind[op.index]
        for first in before[op.index]:
            behind[first] = max(behind[first], ranks[op.index] + overhead_s)
    return ranks


def rank_order(work: Sequence[WorkOp], ranks: Sequence[float]) -> list[WorkOp]:
    """Work by decreasing rank, equals in the original order: no op stands before one that it follows."""
    return sorted(work, key=lambda op: (-ranks[op.index], op.index))


def start_order(
    work: Sequence[WorkOp], before: Sequence[Sequence[int]], ranks: Sequence[float], overhead_s: float
) -> list[WorkOp]:
    """Work in the order in which it can start, equals by decreasing rank.

    By rank alone, an op that waits for a collective may be issued before work that could have run meanwhile, and a FIFO
    stream then idles. Here nothing is issued as long as something else could start before it. O(n log n).
    """
    missing = [len(firsts) for firsts in before]
    behind: list[list[int]] = [[] for _ in work]
    for second, firsts in enumerate(before):
        for first in firsts:
            behind[first].append(second)
    ready = [0.0] * len(work)
    free = dict.fromkeys((resource for op in work for resource in op.resources), 0.0)
    #: By what ops keep busy: those that wait for that alone, and those whose operands come later, with the time.
    waiting: dict[tuple[str, ...], list[tuple[float, int]]] = {op.resources: [] for op in work}
    coming: dict[tuple[str, ...], list[tuple[float, float, int]]] = {op.resources: [] for op in work}

    def release(index: int) -> None:
        heappush(coming[work[index].resources], (ready[index], -ranks[index], index))

    def earliest(resources: tuple[str, ...]) -> tuple[float, float, int] | None:
        idle = max((free[resource] for resource in resources), default=0.0)
        later, now = coming[resources], waiting[resources]
        while later and later[0][0] <= idle:
            _, rank, index = heappop(later)
            heappush(now, (rank, index))
        if now:
            return idle, *now[0]
        return later[0] if later else None

    for index, count in enumerate(missing):
        if not count:
            release(index)
    order: list[WorkOp] = []
    while len(order) < len(work):
        start, _, index = min(found for found in map(earliest, waiting) if found is not None)
        op = work[index]
        if waiting[op.resources]:
            heappop(waiting[op.resources])
        else:
            heappop(coming[op.resources])
        order.append(op)
        free.update(dict.fromkeys(op.resources, start + op.cost_s))
        for second in behind[index]:
            crosses = work[second].resources != op.resources
            ready[second] = max(ready[second], start + op.cost_s + (overhead_s if crosses else 0.0))
            missing[second] -= 1
            if not missing[second]:
                release(second)
    return order


def critical_path(work: Sequence[WorkOp], before: Sequence[Sequence[int]]) -> float:
    """Length in seconds of the longest chain of ops, each of which follows the one before."""
    ends: list[float] = []
    for op in work:
        start = max((ends[first] for first in before[op.index]), default=0.0)
        ends.append(start + op.cost_s)
    return max(ends, default=0.0)


class StreamClocks:
    """What is known to be complete when an op ends: per stream, how many of its ops.

    Streams are FIFO and tokens complete the op they record, so that a dependency on the seventh op of a stream covers the
    first six, and all that those waited for.
    """

    def __init__(self, count: int) -> None:
        self._rows: dict[int, int] = {}  # stream -> its column
        self._known: list[list[int]] = [[] for _ in range(count)]  # by op
        self._column = [0] * count
        self._number = [0] * count
        self._last: dict[int, int] = {}  # stream -> the last op issued on it

    def missing(self, stream: int, wanted: Sequence[int]) -> tuple[int, ...]:
        """Of the ops that something on `stream` must follow, the fewest whose tokens make sure of all of them.

        Args:
            wanted: ops that have been issued, the latest first.
        """
        known = self._behind(stream)
        column = self._rows.get(stream, -1)
        tokens: list[int] = []
        for op in wanted:
            if self._column[op] == column:
                continue  # FIFO
            if self._at(known, self._column[op]) < self._number[op]:
                tokens.append(op)
                known = self._merged(known, self._known[op])
        return tuple(reversed(tokens))

    def issue(self, op: int, stream: int, tokens: Sequence[int]) -> None:
        """Put an op at the end of a stream."""
        known = self._behind(stream)
        for token in tokens:
            known = self._merged(known, self._known[token])
        column = self._rows.setdefault(stream, len(self._rows))
        known = known + [0] * (column + 1 - len(known))
        known[column] += 1
        self._known[op], self._column[op], self._number[op] = known, column, known[column]
        self._last[stream] = op

    def _behind(self, stream: int) -> list[int]:
        last = self._last.get(stream)
        return [] if last is None else self._known[last]

    @staticmethod
    def _at(known: list[int], column: int) -> int:
        return known[column] if column < len(known) else 0

    @staticmethod
    def _merged(first: list[int], second: list[int]) -> list[int]:
        if len(first) < len(second):
            first, second = second, first
        return [*map(max, first, second), *first[len(second) :]]


def list_schedule(
    order: Sequence[WorkOp],
    before: Sequence[Sequence[int]],
    allowed: Callable[[WorkOp, Mapping[int, PlacedOp]], Sequence[int]],
    busy: Callable[[WorkOp], Sequence[str]],
    overhead_s: float,
    synchronised: Sequence[Sequence[int]] | None = None,
    join: Sequence[int] = (),
) -> StreamSchedule:
    """Put each op of `order` on the stream on which it ends first.

    Args:
        before: for each op, by number, the ops that it follows.
        allowed: the streams on which an op may run, given where the ops before it run. Of streams on which it would end at
            the same time, the first is taken; but where synchronisation is free, the one that has been idle longest, since
            what the model says is exclusive may overlap in part on a real device.
        busy: the resources that an op keeps to itself while it runs.
        synchronised: of `before`, those that are made sure of by tokens; all of them unless given.
        join: ops that the output follows, which is read on the main stream.

    Raises:
        NotLowered: an op needs tokens and has no operand that could wait for them.
    """
    made = _Timeline(len(order), overhead_s)
    for op in order:
        streams = allowed(op, made.placed)
        wanted = made.latest_first((before if synchronised is None else synchronised)[op.index])
        best: PlacedOp | None = None
        for stream in streams if overhead_s else made.longest_idle(streams):
            start = made.start(stream, busy(op), before[op.index])
            if best is not None and start + op.cost_s >= best.end_s:
                continue
            tokens = made.clocks.missing(stream, wanted)
            if not tokens or op.carriers:
                best = PlacedOp(op, stream, start, start + op.cost_s, tokens)
        if best is None:
            raise NotLowered(f"'{op.node.name}' has no operand that could wait for what it must follow")
        made.issue(best, busy(op))
    placed = tuple(made.placed.values())
    serial = 0.0
    for op in order:
        serial += op.cost_s
    by_number = sorted(order, key=lambda op: op.index)
    return StreamSchedule(
        placed,
        made.clocks.missing(MAIN_STREAM, made.latest_first(join)),
        max((p.end_s for p in placed), default=0.0),
        serial,
        critical_path(by_number, before),
        overhead_s,
    )


class _Timeline:
    """A schedule under construction.

    Attributes:
        placed: by number, in the order of issue.
    """

    def __init__(self, count: int, overhead_s: float) -> None:
        self.placed: dict[int, PlacedOp] = {}
        self.clocks = StreamClocks(count)
        self._overhead_s = overhead_s
        self._issued: dict[int, int] = {}
        self._streams: dict[int, float] = {}
        self._resources: dict[str, float] = {}

    def latest_first(self, ops: Sequence[int]) -> list[int]:
        """The ops in reverse order of issue: a later one may make sure of an earlier one, never the other way round."""
        return sorted(ops, key=self._issued.__getitem__, reverse=True)

    def longest_idle(self, streams: Sequence[int]) -> list[int]:
        """The streams, the one first whose last op ended first."""
        return sorted(streams, key=lambda stream: self._streams.get(stream, 0.0))

    def start(self, stream: int, busy: Sequence[str], before: Sequence[int]) -> float:
        """When an op could start on `stream`, in seconds."""
        start = self._streams.get(stream, 0.0)
        for resource in busy:
            start = max(start, self._resources.get(resource, 0.0))
        for first in before:
            other = self.placed[first]
            start = max(start, other.end_s if other.stream == stream else other.end_s + self._overhead_s)
        return start

    def issue(self, placed: PlacedOp, busy: Sequence[str]) -> None:
        """Append the op to those that have been placed."""
        index = placed.op.index
        self.clocks.issue(index, placed.stream, placed.tokens)
        self._issued[index] = len(self.placed)
        self.placed[index] = placed
        self._streams[placed.stream] = placed.end_s
        for resource in busy:
            self._resources[resource] = placed.end_s


__all__ = [
    "PlacedOp",
    "StreamClocks",
    "StreamSchedule",
    "critical_path",
    "list_schedule",
    "rank_order",
    "start_order",
    "upward_ranks",
]
