"""Nodes that are the original's by name and op, and have another value: of what they are called with, or when they run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tcverify.explain.diagnosis.versions import Versions, storage_root
from tcverify.explain.relations import relation_between


def find_first_unlike(of: Versions, start: fx.Node) -> fx.Node | None:
    """The first in graph order of the nodes that lead to `start` through nodes whose values are not those of their namesakes."""
    seen: dict[str, fx.Node] = {}
    stack = [start]
    while stack:
        node = stack.pop()
        if node.name in seen or not _unlike(of, node):
            continue
        seen[node.name] = node
        stack += node.all_input_nodes
    first = next((name for name in of.relations if name in seen), None)
    return None if first is None else seen[first]


def _unlike(of: Versions, node: fx.Node) -> bool:
    namesake = of.namesake(node)
    if namesake is None or namesake.target != node.target or node.name not in of.relations:
        return False
    relation = relation_between(of.program, of.before, of.after, node.name, node.name, of.measure)
    return relation is None or relation.kind != "equal"


def describe_late_read(of: Versions, node: fx.Node) -> str:
    """An operand that is read, or written, only after a write that comes later in the original."""
    for operand, read in of.paired(node):
        if operand.name != read.name:
            continue
        before = {writer.name for writer in of.original_writes(read, read.graph.output_node())}
        early = {writer.name for writer in of.original_writes(read, of.old_nodes[node.name])}
        for writer in of.writes(operand, node):
            if writer.name in before and writer.name not in early:
                made = storage_root(operand)
                what = f"'{operand.name}'" if made is operand else f"'{operand.name}', which belongs to '{made.name}',"
                return f"it reads {what} after '{writer.name}' writes into it, where the original's reads it before"
    return ""


def describe_swapped_operands(of: Versions, node: fx.Node) -> str:
    """The same operands, in another order."""
    namesake = of.namesake(node)
    if namesake is None or namesake.target != node.target:
        return ""
    mine, theirs = _names(node.all_input_nodes), _names(namesake.all_input_nodes)
    if mine == theirs or sorted(mine) != sorted(theirs):
        return ""
    return f"it takes {_list(mine)} in this order, where the original's takes {_list(theirs)}"


def _names(nodes: Sequence[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown}, …"


__all__ = ["describe_late_read", "describe_swapped_operands", "find_first_unlike"]
