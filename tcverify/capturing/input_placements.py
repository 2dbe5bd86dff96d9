"""How inputs of captured graphs lie on the ranks, as graphs say it: what they gather are shards, what they sum addends."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tcverify.domains.exact.indexing import is_structural
from tcverify.ops import lookup, qualified_name

#: Ops that begin collectives whose operands every member has its own of, by a part of their names.
_OWN = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
#: Ops that change only dtypes, besides those that only move values.
_CASTS = frozenset({"_to_copy", "convert_element_type", "clone", "contiguous", "copy", "copy_"})


def find_varying_inputs(graph: fx.Graph) -> dict[str, dict[str, None]]:
    """Return, by the names of placeholders, the names of the groups over which the graph gathers, sums or exchanges them."""
    found: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        group = _group_of(node)
        if group is not None:
            for name in _moved(node):
                found.setdefault(name, {})[group] = None
    return found


def _group_of(node: fx.Node) -> str | None:
    """The group of a collective to which every member contributes its own values."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    op = lookup(node.target)
    if not op.collective or op.uninterpreted or op.group is None or not any(word in op.name for word in _OWN):
        return None
    given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False)) | node.kwargs
    group = given.get(op.group)
    return group if isinstance(group, str) else None


def _moved(collective: fx.Node) -> Iterator[str]:
    """The placeholders whose values come to a collective as they are: moved, joined or cast."""
    waiting, seen = list(collective.all_input_nodes), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            yield node.name
        elif node.op == "call_function" and _moves(node):
            waiting += node.all_input_nodes


def _moves(node: fx.Node) -> bool:
    name = qualified_name(node.target).partition("::")[2].split(".")[0]
    return name == "getitem" or name in _CASTS or is_structural(name)


__all__ = ["find_varying_inputs"]
