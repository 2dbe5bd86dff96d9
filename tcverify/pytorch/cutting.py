"""Where a graph is divided into a forward and a backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import lookup


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of a graph.

    Attributes:
        backward: the calls behind the cut.
        tangents: the inputs that only those read: gradients of outputs.
    """

    backward: frozenset[fx.Node]
    tangents: frozenset[fx.Node]


def find_cut(graph: fx.Graph, results: Sequence[Any], share: float) -> Cut:
    """Find the place nearest to that share of the calls that leaves something to return to both parts.

    Args:
        results: what the graph returns.

    Raises:
        Unsupported: there is none.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for place in sorted(quiet_places(calls), key=lambda place: abs(place - share * len(calls))):
        backward = set(calls[place:])
        tangents = {n for n in graph.nodes if n.op == "placeholder" and n.users and set(n.users) <= backward}
        behind = sum(one in backward or one in tangents for one in results)
        if tangents and 0 < behind < len(results):
            return Cut(frozenset(backward), frozenset(tangents))
    raise Unsupported("wherever it is cut, no input belongs to the backward alone, or one of the parts returns nothing")


def quiet_places(calls: list[fx.Node]) -> list[int]:
    """The places in front of calls, but the first, at which no collective is under way."""
    flying: set[fx.Node] = set()
    found = []
    for place, node in enumerate(calls):
        if place and not flying:
            found.append(place)
        phase = lookup(node.target).phase
        if phase == "start" or any(one in flying for one in node.all_input_nodes):
            flying.add(node)
        if phase == "wait":
            flying -= {node, *_sources(node)}
    return found


def _sources(node: fx.Node) -> set[fx.Node]:
    """What a wait is for: its operand, and where that was selected from several, all that they came from."""
    found: set[fx.Node] = set()
    reached = list(node.all_input_nodes)
    while reached:
        one = reached.pop()
        found.add(one)
        if lookup(one.target).name == "python::getitem":
            reached += one.all_input_nodes
    return found


__all__ = ["Cut", "find_cut", "quiet_places"]
