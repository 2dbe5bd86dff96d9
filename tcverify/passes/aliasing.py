"""Which values of a graph share storage with one that the graph writes into."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from tcverify.ops import lookup, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program.partition import Partition


def mutated_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return every node whose storage some node of the graph writes into, or may write into.

    Ops without a meaning, method calls and submodules count as writing into all their operands. A wait does not: what it waits
    for is there before anybody may read it. Linear in the graph.
    """
    storages: Partition[fx.Node] = Partition()
    written: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        for operand, writes in _shared_operands(node):
            storages.join(node, operand)
            if writes:
                written.append(operand)
    if not written:
        return frozenset()
    found = {storages.of(node) for node in written}
    return frozenset(node for node in graph.nodes if storages.of(node) in found)


def _shared_operands(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """Yield (operand that may share storage with the result, whether it may be written)."""
    op = lookup(node.target) if node.op == "call_function" else None
    if op is None or op.run is None:
        for operand in node.all_input_nodes:
            yield operand, True
        return
    if not op.aliases:
        return
    schema = schema_of(node.target)
    if schema is None:
        for operand in node.all_input_nodes:  # Python operators
            yield operand, False
        return
    declared = False
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        declared = True
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for operand in leaves(value, fx.Node):
            yield operand, bool(argument.alias_info.is_write) and op.phase != "wait"
    if not declared:  # tagged as aliasing without saying what
        for operand in node.all_input_nodes:
            yield operand, True
