"""Which node is to blame: the first one that is not what it should be, among those that lead to what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tcverify.diagnosis.versions import Versions

#: Relations to a whole in parts.
IN_PARTS = frozenset({"shard", "partial", "nested"})


def upward(of: Versions, start: Sequence[fx.Node]) -> fx.Node | None:
    """The first in graph order of the suspicious values that lead to `start` through nothing but suspicious values."""
    seen: dict[str, fx.Node] = {}
    stack = list(start)
    while stack:
        node = stack.pop()
        if node.name not in seen and suspicious(of, node):
            seen[node.name] = node
            stack += node.all_input_nodes
    first = next((name for name in of.relations if name in seen), None)
    return None if first is None else seen[first]


def suspicious(of: Versions, node: fx.Node) -> bool:
    """Whether a value may be what makes another one wrong: nothing explains it, or what does promises no good."""
    relation = of.relations.get(node.name)
    if relation is None:
        return False
    return not relation.explained or relation.loses or bent(of, node) or displaced(of, node)


def bent(of: Versions, node: fx.Node) -> bool:
    """Whether parts have been put together to another shape than they were parts of."""
    relation = of.relations[node.name]
    if relation.kind not in ("reshaped", "transposed") and not (relation.kind == "shard" and relation.view):
        return False
    read = [of.relations[operand.name] for operand in node.all_input_nodes if operand.name in of.relations]
    return any(r.kind in IN_PARTS for r in read)


def displaced(of: Versions, node: fx.Node) -> bool:
    """Whether a value is divided over the ranks of the collective that the original has it from, in another order."""
    relation = of.relations[node.name]
    group = relation.groups.get(of.rank)
    if relation.kind != "shard" or group is None or relation.original is None:
        return False
    homes = of.home.get(relation.original, frozenset())
    return bool(homes) and group not in homes and any(sorted(group) == sorted(home) for home in homes)
