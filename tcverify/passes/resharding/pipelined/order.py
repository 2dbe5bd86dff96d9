"""Where in a graph two of its nodes can do their work together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from torch import fx

from tcverify.passes.storages import GraphAccesses, accesses


class NodeOrder:
    """Positions of the nodes of a graph, and what is written when."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: position for position, node in enumerate(graph.nodes)}
        self._found: GraphAccesses = accesses(graph)
        self._writes: dict[int, list[int]] = {}
        for node, position in self.position.items():
            for storage in self._found.writes.get(node, ()):
                self._writes.setdefault(storage, []).append(position)

    def place(self, first: fx.Node, last: fx.Node, others: Iterable[fx.Node]) -> fx.Node | None:
        """Before which of two nodes can stand what does the work of both; None where nothing can.

        Communication stays where it is if the other operands are known there. If not it moves to the last node, unless
        something else reads its result before. Nothing that they read may be written between them.
        """
        operands = list(others)
        if not self.unwritten(first, last, [first, *first.all_input_nodes, *operands]):
            return None
        if all(self.position[operand] < self.position[first] for operand in operands):
            return first
        if any(self.position[user] < self.position[last] for user in first.users):
            return None
        return last

    def unwritten(self, first: fx.Node, last: fx.Node, values: Iterable[fx.Node]) -> bool:
        """Whether nothing between two nodes writes into any of these values."""
        begin, end = self.position[first], self.position[last]
        for value in values:
            for storage in self._found.results.get(value, ()):
                written = self._writes.get(storage, [])
                at = bisect_right(written, begin)
                if at < len(written) and written[at] < end:
                    return False
        return True


__all__ = ["NodeOrder"]
