"""Starts rise as far as memory and time allow: `reorder_communication_preserving_peak_memory`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tcverify.passes.overlap.iterative import (
    MAX_GROUP,
    MAX_IDLE_MOVES,
    CollectiveProgress,
    IterativePass,
    MoveSetting,
    Round,
)
from tcverify.passes.overlap.timeline import Now, Tail


class ReorderCommunicationPreservingPeakMemory(IterativePass):
    """Every start as early as it gains something and as memory allows: starts change places with what stands before them.

    Collectives are treated in their order. Nodes that a start depends on are taken along where that costs nothing.
    Options and promises: see `IterativePass`.
    """

    name = "reorder_communication_preserving_peak_memory"

    def round(self, setting: MoveSetting, order: Sequence[int]) -> Round:
        return Raising(setting, order)


class Raising(Round):
    """One way through the graph from its beginning.

    What stands behind the collective that is treated has not moved yet, so that the tails there are those of the order at the
    beginning of the round; what stands before it is final, so that the times there are.
    """

    def run(self) -> None:
        self._look_ahead()
        self._now = Now(0, 0)
        self._level = self.memory.footprint.initial
        self._times: list[Now] = [Now(0, 0)] * len(self.order)  # per node, before it
        self._levels = [0] * len(self.order)
        self._ends: dict[int, int] = {}
        self._open: list[tuple[int, int]] = []  # heap: when the end is at least, negated; start
        self._due: dict[int, int] = {}  # the same by start, of those that have not been waited for
        for node in self.order:
            if self.work.queues[node] == "start" and self.treats(node):
                self.rise(node).run()
            else:
                self.advance([node])

    def rise(self, node: int) -> Rise:
        """A start on its way up."""
        return Rise(self, node)

    def _look_ahead(self) -> None:
        """Tails behind every node, and the compute between each start and the first wait for it."""
        tail = Tail(0, 0)
        self.from_wait: dict[int, int] = {}
        self.tails = [tail] * len(self.order)
        for node in reversed(self.order):
            self.tails[node] = tail
            tail = self.work.back(node, tail, self.from_wait)
        total = 0
        self.covered: dict[int, int] = {}
        started: dict[int, int] = {}
        for node in self.order:
            queue = self.work.queues[node]
            if queue == "start":
                started[node] = total
            elif queue == "wait":
                for start in self.work.awaited[node]:
                    self.covered.setdefault(start, total - started[start])
            else:
                total += self.work.costs[node]
        for start, before in started.items():
            self.covered.setdefault(start, total - before)

    def advance(self, nodes: Sequence[int]) -> None:
        """Go past nodes that have come to their place."""
        for node in nodes:
            self._times[node], self._levels[node] = self._now, self._level
            self._now = self.work.run((node,), self._now, self._ends)
            self._level += self.memory.allocated[node] - self.memory.freed[node]
            queue = self.work.queues[node]
            if queue == "wait":
                for start in self.work.awaited[node]:
                    self._due.pop(start, None)
            elif queue == "start" and node in self.from_wait:
                self._due[node] = self._ends[node] + self.from_wait[node]
                heapq.heappush(self._open, (-self._due[node], node))

    def rewind(self, now: Now, level: int) -> None:
        """Go back to an earlier place."""
        self._now, self._level = now, level

    def tail_behind(self, node: int) -> Tail:
        """The tail behind the node that is treated."""
        while self._open and self._due.get(self._open[0][1]) != -self._open[0][0]:
            heapq.heappop(self._open)
        compute, communication, _ = self.tails[node]
        return Tail(compute, communication, -self._open[0][0] if self._open else 0)

    @property
    def now(self) -> Now:
        """The times before the node that is treated."""
        return self._now

    @property
    def level(self) -> int:
        """Bytes that live before the node that is treated."""
        return self._level

    def at(self, node: int) -> tuple[Now, int]:
        """The times and the bytes before a node that has come to its place."""
        return self._times[node], self._levels[node]

    @property
    def ends(self) -> dict[int, int]:
        """When communication ends, by start, of all that has come to its place."""
        return self._ends


class Rise:
    """One start on its way up, with what it takes along.

    Attributes:
        group: the nodes that move, the last one first.
        now, level: times and bytes before the group.
        tail: behind it.
    """

    def __init__(self, course: Raising, node: int) -> None:
        self.course, self.setting, self.work = course, course.setting, course.work
        self.node = node
        self.group = [node]
        self.members = {node}
        self.needed = set(self.setting.before[node])
        self.now, self.level = course.now, course.level
        self.tail = course.tail_behind(node)
        self.covered = course.covered[node]
        self.earliest = self.now.compute
        self.gained_at = 0
        self.progress: CollectiveProgress = course.progress[node]

    def run(self) -> None:
        line = self.course.line
        after = line.following[self.node]
        while True:
            candidate = line.previous[self.group[-1]]
            stopped = self._idle(candidate)
            if stopped is None and candidate in self.needed:
                stopped = self._no_member(candidate)
                if stopped is None:
                    self.take_along(candidate)
                    continue
            if stopped is None:
                stopped = self._swap(candidate)
            if stopped is not None:
                self.progress.limit = stopped
                break
        self.course.rewind(self.now, self.level)
        self.course.advance(line.until(self.group[-1], after))

    def _idle(self, candidate: int) -> str | None:
        """Why there is nothing to gain, or no room, further up."""
        issued = self.now
        if self.work.timed:
            issued = self.work.run(reversed(self.group[1:]), issued, self.course.ends)
            cost = self.work.costs[self.node]
            if issued.compute + self.covered - (max(issued) + cost) >= self.setting.freedom.extra_overlap * cost:
                return "unexposed by runtime estimates"
            if issued.compute < self.earliest:
                self.earliest, self.gained_at = issued.compute, self.progress.moves
            elif self.progress.moves - self.gained_at >= MAX_IDLE_MOVES:
                return f"nothing to gain before the last {MAX_IDLE_MOVES} nodes"
        if candidate < 0 or self.setting.fixed(candidate):
            return "the beginning of the graph"
        if self.course.moves_left <= 0:
            return "the number of moves that a round may make"
        if self.work.timed and issued.communication > issued.compute:
            return "communication under way before it"
        return None

    def _no_member(self, candidate: int) -> str | None:
        """Why a node that the group depends on cannot be taken along."""
        kind, name = self.setting.kind(candidate), self.setting.name(candidate)
        if kind == "effect" or (kind == "start" and not self.setting.freedom.group_with_collectives):
            return f"collective ordering behind {name}"
        if not self.work.timed and (kind == "wait" or self.setting.is_gemm_like(candidate)):
            return f"data dependency on {name}"
        if len(self.group) >= MAX_GROUP:
            return f"data dependency on {name}, with {MAX_GROUP} nodes taken along already"
        return None

    def take_along(self, candidate: int) -> None:
        """Let a node that the group depends on move with it."""
        self.group.append(candidate)
        self.members.add(candidate)
        self.needed.update(self.setting.before[candidate])
        self.now, self.level = self.course.at(candidate)

    def _swap(self, candidate: int) -> str | None:
        """Let the candidate change places with the group; returns why not."""
        memory = self.course.memory
        handovers = memory.behind(candidate, self.members)
        now, level = self.course.at(candidate)
        stopped = self.course.too_much(memory.peak(level, [*reversed(self.group), candidate], handovers))
        if stopped is not None:
            return stopped
        tail = self.work.back(candidate, self.tail, self.course.from_wait, self.course.ends, self.members)
        if self.work.timed and self.delays(candidate):
            loss = self._end(now, tail) - self._end(self.now, self.tail)
            if loss > 0:
                return f"more exposed elsewhere, were it before {self.setting.name(candidate)}"
        self.tail, self.now, self.level = tail, now, level
        if self.work.queues[candidate] in ("compute", "both"):
            self.covered += self.work.costs[candidate]
        memory.apply(handovers)
        self.course.line.move_behind(candidate, self.group[-1], self.node)
        self.course.moves_left -= 1
        self.progress.moves += 1
        self.progress.grouped = len(self.group) - 1
        self.course.checked()
        return None

    def delays(self, candidate: int) -> bool:
        """Whether the swap can delay anything. A start that goes up alone, or with compute, never does."""
        queues = self.work.queues
        return queues[candidate] in ("start", "both") or any(
            queues[node] in ("wait", "start") for node in self.group[1:]
        )

    def _end(self, now: Now, tail: Tail) -> int:
        """When all has ended if the group stands between `now` and `tail`."""
        for node in self.group:
            tail = self.work.back(node, tail, self.course.from_wait, self.course.ends, self.members)
        return tail.end(now)


__all__ = ["Raising", "ReorderCommunicationPreservingPeakMemory", "Rise"]
