"""Waits sink as far as memory and time allow: `sink_waits_iterative`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tcverify.passes.overlap.iterative import (
    MAX_GROUP,
    MAX_IDLE_MOVES,
    CollectiveProgress,
    IterativePass,
    MoveSetting,
    Round,
)
from tcverify.passes.overlap.timeline import Now, Tail


class SinkWaitsIterative(IterativePass):
    """Every wait as late as it gains something and as memory allows: waits change places with what stands behind them.

    Waits are treated from the last one to the first one. Nodes that depend on a wait are taken along where that costs nothing.
    Options and promises: see `IterativePass`.

    Args:
        swap_with_collectives: let waits go behind starts of other collectives, which then start earlier. Without, a wait stays
            before the next start.
    """

    name = "sink_waits_iterative"

    def __init__(self, *, swap_with_collectives: bool | str = True, **options: Any) -> None:
        super().__init__(**options)
        swap = self._boolean("swap_with_collectives", swap_with_collectives)
        self.freedom = replace(self.freedom, swap_with_collectives=swap)

    def round(self, setting: MoveSetting, order: Sequence[int]) -> Round:
        return Sinking(setting, order)


class Sinking(Round):
    """One way through the graph from its end.

    What stands before the wait that is treated has not moved yet, so that the times there are those of the order at the beginning
    of the round; what stands behind it is final, so that the tails there are.
    """

    def run(self) -> None:
        now, level = Now(0, 0), self.memory.footprint.initial
        self.times: list[Now] = [now] * len(self.order)  # per node, before it
        self.levels = [0] * len(self.order)
        self.ends: dict[int, int] = {}
        for node in self.order:
            self.times[node], self.levels[node] = now, level
            now = self.work.run((node,), now, self.ends)
            level += self.memory.allocated[node] - self.memory.freed[node]
        self.tails: list[Tail] = [Tail(0, 0)] * len(self.order)  # per node, before it
        self.from_wait: dict[int, int] = {}
        for node in reversed(self.order):
            if self.work.awaited.get(node) and self.treats(node):
                self.sink(node).run()
            else:
                self.retreat([node])

    def sink(self, node: int) -> Sink:
        """A wait on its way down."""
        return Sink(self, node)

    def retreat(self, nodes: Sequence[int]) -> None:
        """Go past nodes that have come to their place; in order, which is walked backwards."""
        for node in reversed(nodes):
            tail = self.tail_before(self.line.following[node])
            self.tails[node] = self.work.back(node, tail, self.from_wait)

    def tail_before(self, node: int) -> Tail:
        """The tail before a node that has come to its place; -1 for the end."""
        return self.tails[node] if node >= 0 else Tail(0, 0)


class Sink:
    """One wait on its way down, with what it takes along.

    Attributes:
        group: the nodes that move, in order.
        latest: per storage that the group touches, the last node of the group that does.
        now, level: times and bytes before the group.
    """

    def __init__(self, course: Sinking, node: int) -> None:
        self.course, self.setting, self.work = course, course.setting, course.work
        self.node = node
        self.group: list[int] = []
        self.latest: dict[int, int] = {}
        self.blocked: set[int] = set()
        self.now, self.level = course.times[node], course.levels[node]
        self.latest_time = self.now.compute
        self.gained_at = 0
        self.progress: CollectiveProgress = course.progress[node]
        self.take_along(node)

    def run(self) -> None:
        line = self.course.line
        before = line.previous[self.node]
        while True:
            candidate = line.following[self.group[-1]]
            stopped = self._idle(candidate)
            if stopped is None and candidate in self.blocked:
                stopped = self._no_member(candidate)
                if stopped is None:
                    self.take_along(candidate)
                    continue
            if stopped is None:
                stopped = self._swap(candidate)
            if stopped is not None:
                self.progress.limit = stopped
                break
        first = line.following[before] if before >= 0 else line.first
        self.course.retreat(line.until(first, line.following[self.group[-1]]))

    def take_along(self, candidate: int) -> None:
        """Let a node that depends on the group move with it."""
        self.group.append(candidate)
        self.blocked.update(self.setting.after[candidate])
        self.latest.update(dict.fromkeys(self.setting.footprint.touched[candidate], candidate))

    def _idle(self, candidate: int) -> str | None:
        """Why there is nothing to gain, or no room, further down."""
        if self.work.timed:
            last = max(self.work.awaited[self.node], key=self.course.ends.__getitem__)
            slack = self.now.compute - self.course.ends[last]
            if slack >= self.setting.freedom.extra_overlap * self.work.costs[last]:
                return "unexposed by runtime estimates"
            if self.now.compute > self.latest_time:
                self.latest_time, self.gained_at = self.now.compute, self.progress.moves
            elif self.progress.moves - self.gained_at >= MAX_IDLE_MOVES:
                return f"nothing to gain behind the last {MAX_IDLE_MOVES} nodes"
        if candidate < 0 or self.setting.fixed(candidate):
            return "the end of the graph"
        if self.course.moves_left <= 0:
            return "the number of moves that a round may make"
        if self.setting.kind(candidate) == "start" and not self.setting.freedom.swap_with_collectives:
            return f"collective {self.setting.name(candidate)} behind it"
        return None

    def _no_member(self, candidate: int) -> str | None:
        """Why a node that depends on the group cannot be taken along."""
        kind, name = self.setting.kind(candidate), self.setting.name(candidate)
        if kind == "start" and not self.setting.freedom.group_with_collectives:
            return f"collective {name} depends on it"
        same = set(self.work.awaited.get(candidate, ())) <= set(self.work.awaited[self.node])
        if kind == "effect" or (kind == "wait" and not same):
            return f"data dependency of {name}"
        if not self.work.timed and self.setting.is_gemm_like(candidate):
            return f"data dependency of {name}"
        if len(self.group) >= MAX_GROUP:
            return f"data dependency of {name}, with {MAX_GROUP} nodes taken along already"
        return None

    def _swap(self, candidate: int) -> str | None:
        """Let the candidate change places with the group; returns why not."""
        course, memory = self.course, self.course.memory
        handovers = memory.before(candidate, self.latest)
        stopped = course.too_much(memory.peak(self.level, [candidate, *self.group], handovers))
        if stopped is not None:
            return stopped
        if self.work.timed and self.delays(candidate):
            tail = course.tail_before(course.line.following[candidate])
            loss = self._end([candidate, *self.group], tail) - self._end([*self.group, candidate], tail)
            if loss > 0:
                return f"more exposed elsewhere, were it behind {self.setting.name(candidate)}"
        memory.apply(handovers)
        self.now = self.work.run((candidate,), self.now, course.ends)
        self.level += memory.allocated[candidate] - memory.freed[candidate]
        course.line.move_before(candidate, self.group[0], self.group[-1])
        course.moves_left -= 1
        self.progress.moves += 1
        self.progress.grouped = len(self.group) - 1
        course.checked()
        return None

    def delays(self, candidate: int) -> bool:
        """Whether the swap can delay anything. A wait that sinks alone never does, nor with compute behind compute."""
        queues = self.work.queues
        if any(queues[node] == "start" for node in self.group):
            return True
        return len(self.group) > 1 and queues[candidate] != "compute"

    def _end(self, nodes: Sequence[int], tail: Tail) -> int:
        """When all has ended, on account of `nodes` between the times before the group and `tail`."""
        ends = self.course.ends
        changed = {node: ends.get(node) for node in nodes if self.work.queues[node] == "start"}
        end = tail.end(self.work.run(nodes, self.now, ends))
        for start, known in changed.items():
            end = max(end, ends[start] + self.course.from_wait.get(start, 0))
            if known is not None:
                ends[start] = known
        return end


__all__ = ["Sink", "SinkWaitsIterative", "Sinking"]
