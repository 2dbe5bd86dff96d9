"""Which nodes of a graph show one storage, and which write into it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tcverify.ops import aliased_operands, is_allocation, lookup, mutated_operands

#: Names of the ops of host IR that neither compute nor write a value: tokens, orders of streams, waits, frees.
ORDERS = frozenset(
    f"host_ir::{name}"
    for name in ("wait", "current_stream", "stream", "set_current_stream", "synchronize", "deallocate")
)


def is_order(node: fx.Node) -> bool:
    """Whether a node is about streams, waits and memory alone, and has no value."""
    return node.op == "call_function" and lookup(node.target).name in ORDERS


def is_communication(node: fx.Node) -> bool:
    """Whether a node posts a communication of host IR."""
    if node.op != "call_function":
        return False
    op = lookup(node.target)
    return op.phase == "start" and op.name.startswith("host_ir::")


def allocates(node: fx.Node) -> bool:
    """Whether a node allocates memory that is never written."""
    return node.op == "call_function" and is_allocation(lookup(node.target).name)


def is_buffer(node: fx.Node) -> bool:
    """Whether a node is an allocation, or a view of one: its value is what others write."""
    return allocates(node) or (is_view(node) and allocates(storage_root(node)))


def is_view(node: fx.Node) -> bool:
    """Whether a node is only another view of its operand: it writes nothing and does not communicate."""
    if node.op != "call_function":
        return False
    op = lookup(node.target)
    return op.aliases and not op.collective and not is_order(node) and next(written_operands(node), None) is None


def written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call writes into, by its schema; those of host IR that only say when are none."""
    if not is_order(node):
        yield from mutated_operands(node)


def storage_root(node: fx.Node) -> fx.Node:
    """The node that made the storage which `node` shows, through views and items."""
    while True:
        if node.op != "call_function" or not lookup(node.target).aliases:
            return node
        if isinstance(node.target, torch._ops.OpOverload):
            source = next((operand for operand, _ in aliased_operands(node)), None)
        else:
            source = next(iter(node.all_input_nodes), None)
        if source is None:
            return node
        node = source


def writers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By the node that made a storage, the nodes that write into it, in graph order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for root in dict.fromkeys(map(storage_root, written_operands(node))):
            found.setdefault(root, []).append(node)
    return found


__all__ = [
    "allocates",
    "is_buffer",
    "is_communication",
    "is_order",
    "is_view",
    "storage_root",
    "writers",
    "written_operands",
]
