"""Which node is to blame: the first one that is not what it should be, among those that lead to what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import fx

from tcverify.explain.diagnosis.buffers import describe_unwritten
from tcverify.explain.diagnosis.buffers import writes_wrong_part as written_astray
from tcverify.explain.diagnosis.versions import Versions, storage_root
from tcverify.explain.relations.relation import IN_FULL
from tcverify.explain.relations.storages import allocates, is_buffer, is_view
from tcverify.ops import lookup

#: Relations to a whole in parts.
IN_PARTS = frozenset({"shard", "partial", "nested"})


def find_first_suspicious(of: Versions, start: Sequence[fx.Node]) -> fx.Node | None:
    """The first in graph order of the suspicious values that lead to `start` through nothing but suspicious values.

    An allocation is only what others write into it: they come before it, wherever it stands.
    """
    seen: dict[str, fx.Node] = {}
    looked_into: set[fx.Node] = set()
    stack = [node for node in start if is_suspicious(of, node)]
    for node in start:
        stack += _wrong_writers(of, node, looked_into)
    while stack:
        node = stack.pop()
        if node.name not in seen:
            seen[node.name] = node
            stack += [operand for operand in node.all_input_nodes if is_suspicious(of, operand)]
            stack += find_wrong_operands(of, node)
            stack += [w for o in node.all_input_nodes for w in of.writes(o, node) if is_suspicious(of, w)]
            stack += [w for o in node.all_input_nodes for w in of.clobbers(o, node)]
            stack += [w for o in node.all_input_nodes for w in _wrong_writers(of, o, looked_into)]
    ordered = [seen[name] for name in of.relations if name in seen]
    if of.hosts:
        holes = (node for node in ordered if allocates(node) and describe_unwritten(of, node))
        written = (node for node in ordered if not is_buffer(node))
        return next(itertools.chain(holes, written, ordered), None)
    return ordered[0] if ordered else None


def _wrong_writers(of: Versions, node: fx.Node, looked_into: set[fx.Node]) -> list[fx.Node]:
    """The wrong write into the allocation that a node shows, on the first request."""
    root = storage_root(node)
    if not of.hosts or not allocates(root) or root in looked_into:
        return []
    looked_into.add(root)
    return [writer for writer in of.all_writers(root) if is_suspicious(of, writer)]


def is_suspicious(of: Versions, node: fx.Node) -> bool:
    """Whether a value may be what makes another one wrong: nothing explains it, or what does promises no good."""
    relation = of.relations.get(node.name)
    if relation is None:
        return False
    if not relation.explained or relation.loses:
        return not _shows(of, node)
    fraction = relation.kind == "partial" and (relation.alike or relation.original == node.name)
    return (
        fraction
        or is_wrongly_reshaped(of, node)
        or is_divided_otherwise(of, node)
        or (of.hosts and written_astray(of, node))
    )


def _shows(of: Versions, node: fx.Node) -> bool:
    """Whether an inserted node of host IR only shows, or copies, what is right: parts on their way to a communication."""
    while of.hosts and _is_shown(of, node):
        node = node.all_input_nodes[0]
        relation = of.relations.get(node.name)
        if relation is None:
            return False
        if relation.explained and not relation.loses:
            return not is_suspicious(of, node)
    return False


def _is_shown(of: Versions, node: fx.Node) -> bool:
    if node.op != "call_function" or of.namesake(node) is not None or not node.all_input_nodes or is_buffer(node):
        return False
    return is_view(node) or lookup(node.target).name == "aten::clone"


def is_wrongly_reshaped(of: Versions, node: fx.Node) -> bool:
    """Whether parts have been put together to another shape than they were parts of."""
    relation = of.relations[node.name]
    if relation.kind not in ("reshaped", "transposed") and not (relation.kind == "shard" and relation.view):
        return False
    read = [of.relations[operand.name] for operand in node.all_input_nodes if operand.name in of.relations]
    return any(r.kind in IN_PARTS for r in read)


def is_divided_otherwise(of: Versions, node: fx.Node) -> bool:
    """Whether a value is divided over the ranks of the collective that the original has it from, in another order."""
    relation = of.relations[node.name]
    group = relation.groups.get(of.rank)
    if relation.kind != "shard" or group is None or relation.original is None or node.name in of.called:
        return False
    if relation.original != node.name and not _cut(of, node):
        return False  # which of several equal values it corresponds to is too uncertain
    homes = of.home.get(relation.original, frozenset())
    return bool(homes) and group not in homes and any(sorted(group) == sorted(home) for home in homes)


def _cut(of: Versions, node: fx.Node) -> bool:
    """Whether an inserted node takes a shard of what it reads whole."""
    read = [of.relations[operand.name].kind for operand in node.all_input_nodes if operand.name in of.relations]
    return of.namesake(node) is None and bool(read) and all(kind in IN_FULL for kind in read)


def find_wrong_operands(of: Versions, node: fx.Node) -> list[fx.Node]:
    """Operands that are explained, but by another value than the one that the original's node reads, and were made so.

    Of an operand that is the original's other value itself, the reader is to blame. But one that bears the name of what
    should be read is wrong itself, and one that was inserted for this reader alone is as wrong as its reader.
    """
    found: list[fx.Node] = []
    for operand, read in of.paired(node):
        relation = of.relations.get(operand.name)
        if relation is None or not relation.explained or relation.original in (None, read.name):
            continue
        if not of.reads_instead(operand, read):
            continue
        path = list(_made(of, operand))
        named = next((i for i, made in enumerate(path) if _misnamed(of, made)), None)
        if named is not None:
            found += path[: named + 1]
        elif of.namesake(operand) is None and operand.op == "call_function" and len(operand.users) == 1:
            found.append(operand)
    return found


def _made(of: Versions, node: fx.Node) -> Iterator[fx.Node]:
    """A node and the sources of its value, as long as that corresponds to one value of the original."""
    original = of.relations[node.name].original
    while True:
        yield node
        if node.name == original:
            return
        standing = [
            o for o in node.all_input_nodes if o.name in of.relations and of.relations[o.name].original == original
        ]
        if not standing:
            return
        node = standing[0]


def _misnamed(of: Versions, node: fx.Node) -> bool:
    """Whether a node calls what the original's node of its name calls, and has another one's value."""
    namesake = of.namesake(node)
    return namesake is not None and namesake.target == node.target and of.relations[node.name].original != node.name
