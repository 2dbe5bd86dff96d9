"""List scheduling for overlap: of the nodes that may come next, take the best, with heaps in place of searches.

A node's keys come from three facts: the first collective that it must precede, whether it is a wait, and its place in the
original order, which decides where nothing else does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from torch import fx

from tcverify.passes.overlap.graph import CommGraph, is_gemm_like
from tcverify.passes.overlap.runtimes import Runtimes

#: What nodes are compared by: the lower key comes first.
Key = tuple[int, ...]


def first_needed_by(found: CommGraph) -> dict[fx.Node, int]:
    """Return for each node the number of the first start that it is or must precede; of others, the number of starts."""
    numbers = {each.start: each.number for each in found.starts}
    last = len(found.starts)
    scores: dict[fx.Node, int] = {}
    for node in reversed(found.nodes):
        after = min((scores[later] for later in found.successors[node]), default=last)
        scores[node] = min(after, numbers.get(node, last))
    return scores


def list_schedule(found: CommGraph, key: Callable[[fx.Node], Key]) -> list[fx.Node]:
    """Return the order that takes, of all nodes whose predecessors have been taken, always the one with the least key.

    O((nodes + edges) · log nodes).
    """
    state = _Ready(found, key)
    while (node := state.pop()) is not None:
        state.take(node)
    return state.order


def overlap_schedule(found: CommGraph, times: Runtimes | None) -> list[fx.Node]:
    """Return an order in which compute follows every start that is enough to cover its communication, where there is so much.

    Once a collective is in flight, compute comes next that is ready: first what the next collectives need, then what is needed
    for none, until the time of the communication has passed. Then comes what the next collective needs, waits as late as
    possible, and it itself. A start that is ready does not wait for compute that outlasts what is under way.

    Args:
        times: seconds per node. Where they are not known, a collective counts as covered by one matrix product.
    """
    needed = first_needed_by(found)
    place = {node: number for number, node in enumerate(found.nodes)}

    def key(node: fx.Node) -> Key:
        return needed[node], int(found.kind(node) == "wait"), place[node]

    state = _Ready(found, key)
    clock = _Clock(found, times)
    while (node := state.pop()) is not None:
        state.take(node)
        clock.run(node)
        if found.kind(node) != "start":
            continue
        while clock.under_way and (candidate := state.best_compute()) is not None:
            begun = state.best_start()
            if begun is not None and clock.outlasts(candidate):
                candidate = begun
            state.remove(candidate)
            state.take(candidate)
            clock.run(candidate)
    return state.order


class _Clock:
    """Time when the nodes taken so far run: compute one after the other, and communication in parallel, one after the other."""

    def __init__(self, found: CommGraph, times: Runtimes | None) -> None:
        self._found = found
        self._times = times if times is not None else {node: self._guess(node) for node in found.nodes}
        self._now = 0.0
        self._free = 0.0  # when all communication that was started has ended
        self._end: dict[fx.Node, float] = {}

    def _guess(self, node: fx.Node) -> float:
        return 1.0 if self._found.kind(node) == "start" or is_gemm_like(node) else 0.0

    @property
    def under_way(self) -> bool:
        return self._free > self._now

    def outlasts(self, node: fx.Node) -> bool:
        """Whether a node that runs now ends after all communication in flight."""
        return self._now + self._times[node] > self._free

    def run(self, node: fx.Node) -> None:
        kind = self._found.kind(node)
        if kind == "start":
            self._free = self._end[node] = max(self._now, self._free) + self._times[node]
        elif kind == "wait":
            ends = [self._end[each.start] for each in self._found.completes[node]]
            self._now = max([self._now, *ends])
        elif kind == "effect":
            self._now = self._free = max(self._now, self._free) + self._times[node]
        else:
            self._now += self._times[node]


class _Ready:
    """The nodes that may come next, apart by what they are, and the order taken so far."""

    def __init__(self, found: CommGraph, key: Callable[[fx.Node], Key]) -> None:
        self._found = found
        self._key = key
        self._missing = {node: len(before) for node, before in found.predecessors.items()}
        self._compute: list[tuple[Key, int]] = []
        self._starts: list[tuple[Key, int]] = []
        self._rest: list[tuple[Key, int]] = []
        self._nodes = found.nodes
        self._place = {node: number for number, node in enumerate(found.nodes)}
        self._last: fx.Node | None = None
        self.order: list[fx.Node] = []
        inputs = [node for node in found.nodes if node.op == "placeholder"]
        free = [node for node in found.nodes if node.op != "placeholder" and not self._missing[node]]
        for node in inputs:
            self.take(node)
        for node in free:
            self._push(node)

    def take(self, node: fx.Node) -> None:
        """Put a node at the end of the order, and make ready what it was the last to hold back."""
        self.order.append(node)
        for later in self._found.successors[node]:
            self._missing[later] -= 1
            if not self._missing[later]:
                self._push(later)

    def pop(self) -> fx.Node | None:
        """Remove the best node, or the output when nothing else is left, or nothing."""
        heap = min((h for h in self._heaps if h), key=lambda h: h[0], default=None)
        if heap is not None:
            return self._nodes[heapq.heappop(heap)[1]]
        last, self._last = self._last, None
        return last

    def best_compute(self) -> fx.Node | None:
        """The best node that is ready and neither communicates nor waits."""
        return self._nodes[self._compute[0][1]] if self._compute else None

    def best_start(self) -> fx.Node | None:
        """The best start that is ready."""
        return self._nodes[self._starts[0][1]] if self._starts else None

    def remove(self, node: fx.Node) -> None:
        """Remove what `best_compute` or `best_start` gave."""
        heapq.heappop(self._heap(node))

    @property
    def _heaps(self) -> Sequence[list[tuple[Key, int]]]:
        return self._compute, self._starts, self._rest

    def _heap(self, node: fx.Node) -> list[tuple[Key, int]]:
        kind = self._found.kind(node)
        if kind == "start":
            return self._starts
        return self._compute if kind in ("compute", "free") else self._rest

    def _push(self, node: fx.Node) -> None:
        if node.op == "output":
            self._last = node
        else:
            heapq.heappush(self._heap(node), (self._key(node), self._place[node]))


__all__ = ["first_needed_by", "list_schedule", "overlap_schedule"]
