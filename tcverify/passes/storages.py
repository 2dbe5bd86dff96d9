"""Which storages the nodes of a graph may make, read and write into.

Of any graph, with shapes symbolic or not known; `program.specs` knows it exactly, where everything can be inferred. Two values
share a storage where the signature of an op says so (what it writes into, what its results alias), where their
metadata does, or where nothing is known of the op between them. Signatures alone do not see what a caller has tied together,
and metadata alone is not enough: captured graphs often record a new storage for what an in-place op or a wait returns. What may
be shared counts as shared, so that orders that are kept are never too few.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tcverify.ops import Op, TensorSpec, aliased_arguments, aliased_operands, lookup, mutated_operands, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program.partition import Partition

Storages = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphAccesses:
    """Storages of a graph, as numbers.

    Attributes:
        results: per node, the storages of the tensors that it returns.
        reads: per node, the storages of its operands. Views read theirs.
        writes: per node, the storages that it writes into: those of operands that it mutates. What it makes is not among them.
        items: per node that returns several values, the storages of each.
    """

    results: dict[fx.Node, Storages]
    reads: dict[fx.Node, Storages]
    writes: dict[fx.Node, Storages]
    items: dict[fx.Node, tuple[Storages, ...]]


def accesses(graph: fx.Graph) -> GraphAccesses:
    """Return what every node of `graph` reads and writes. Linear in the graph."""
    cells = _Cells()
    written: dict[fx.Node, list[fx.Node]] = {}
    attributes: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        cells.add(node)
        if node.op == "get_attr":  # one tensor may have several names
            for key in (node.target, _attribute(node)):
                cells.unite(cells.of[node], cells.of[attributes.setdefault(key, node)])
        elif node.op != "placeholder":
            written[node] = _tie(node, cells)
    results = {node: cells.storages(of) for node, of in cells.of.items()}
    items = {
        node: tuple(cells.storages([cell]) if cell is not None else () for cell in of)
        for node, of in cells.of.items()
        if cells.several(node)
    }
    reads: dict[fx.Node, Storages] = {}
    writes: dict[fx.Node, Storages] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and node.op == "call_function":
            reads[node] = cells.storages(cells.selected(node))
        elif node.op in ("placeholder", "get_attr"):
            reads[node] = ()
        else:
            reads[node] = _joined(results[operand] for operand in node.all_input_nodes)
        writes[node] = _joined(results[operand] for operand in written.get(node, ()))
    return GraphAccesses(results, reads, writes, items)


def mutated_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return every node whose storage some node of the graph writes into, or may write into, by the signatures of ops alone.

    A wait does not write: what it waits for is there before anybody may read it. Linear in the graph.
    """
    storages: Partition[fx.Node] = Partition()
    written: list[fx.Node] = []
    for node in graph.nodes:
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
    if not node.op.startswith("call"):
        return
    op = _meaning(node)
    if op is None:
        yield from ((operand, True) for operand in node.all_input_nodes)
    elif op.aliases and op.name.startswith("python::"):
        yield from ((operand, False) for operand in node.all_input_nodes)
    elif op.aliases:
        yield from ((operand, argument.writes and op.phase != "wait") for operand, argument in aliased_operands(node))


def is_view(node: fx.Node, found: GraphAccesses) -> bool:
    """Whether a call takes no time: an item of a tuple, a view, or arithmetic on numbers.

    An op that only may return a view, such as reshape, is one exactly where its metadata shows the storage of an operand.
    """
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or found.writes[node]:
        return False
    op = lookup(node.target)
    if op.run is None or op.collective or op.effect:
        return False
    if not found.results[node]:
        return not found.reads[node] or op.name.startswith("aten::sym_")
    if not op.aliases or not set(found.results[node]) <= set(found.reads[node]):
        return False
    mine, theirs = _recorded(node), {key for operand in node.all_input_nodes for key in _recorded(operand)}
    return not mine or not theirs or mine <= theirs


def shared_places(graph: fx.Graph, found: GraphAccesses) -> dict[int, int]:
    """Return for storages that overlap in the arena of their rank (`meta["comm_buffer"]`) the representative of their place.

    Places are negative numbers. Storages share one where a chain of overlapping ranges joins them.
    """
    ranges: list[tuple[int, int, int]] = []
    for node in graph.nodes:
        buffer = node.meta.get("comm_buffer")
        if isinstance(buffer, dict) and type(buffer.get("offset")) is type(buffer.get("nbytes")) is int:
            begin = buffer["offset"]
            ranges += [(begin, begin + buffer["nbytes"], storage) for storage in found.results.get(node, ())]
    place: dict[int, int] = {}
    reached = members = 0
    for begin, end, storage in sorted(ranges):
        if begin >= reached:
            members += 1
        reached = max(reached, end)
        place[storage] = -members
    alone = Counter(place.values())
    return {storage: number for storage, number in place.items() if alone[number] > 1}


# -------------------------------------------------------------------------------------------------------------- tying


class _Cells:
    """Cells, one for each node or for each item of one that returns several values, and which of them share a storage."""

    def __init__(self) -> None:
        self.of: dict[fx.Node, list[int | None]] = {}
        self._new = itertools.count().__next__
        self._classes: Partition[int] = Partition()
        self._by_key: dict[Any, int] = {}

    def add(self, node: fx.Node) -> None:
        """Make the cells of a node, and tie those whose metadata shows one storage."""
        if "val" not in node.meta:
            self.of[node] = [self._new()]
            return
        value = node.meta["val"]
        self.of[node] = made = []
        for item in value if isinstance(value, (tuple, list)) else [value]:
            keys = list(map(storage_key, recorded_tensors(item)))
            cell = self._new() if keys else None
            made.append(cell)
            for key in keys:
                assert cell is not None
                if key is not None:
                    self._classes.join(cell, self._by_key.setdefault(key, cell))

    def several(self, node: fx.Node) -> bool:
        """Whether a node is known to return a tuple or a list."""
        return isinstance(node.meta.get("val"), (tuple, list))

    def selected(self, node: fx.Node) -> list[int | None]:
        """The cells that a getitem node takes: one item of a tuple, or all there is of anything else."""
        source, index = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(source, fx.Node):
            return [cell for operand in node.all_input_nodes for cell in self.of[operand]]
        there = self.of[source]
        if self.several(source) and isinstance(index, int) and -len(there) <= index < len(there):
            return [there[index]]
        return there

    def unite(self, first: Iterable[int | None], second: Iterable[int | None]) -> None:
        """Tie every cell of the one to every cell of the other."""
        cells = [cell for cell in (*first, *second) if cell is not None]
        for cell in cells[1:]:
            self._classes.join(cells[0], cell)

    def storages(self, cells: Iterable[int | None]) -> Storages:
        """The storages of cells, each once."""
        return tuple(dict.fromkeys(self._classes.of(cell) for cell in cells if cell is not None))


def _tie(node: fx.Node, cells: _Cells) -> list[fx.Node]:
    """Tie the results of a call to the operands that they may alias, and return the operands that it may write into."""
    op = _meaning(node)
    if op is None:
        for operand in node.all_input_nodes:
            cells.unite(cells.of[node], cells.of[operand])
        return list(node.all_input_nodes)
    if node.target is operator.getitem:
        cells.unite(cells.of[node], cells.selected(node))
    schema = schema_of(node.target)
    if schema is None or not op.aliases:  # Python operators make new values
        return []
    for argument in aliased_arguments(node.target):
        operands = leaves(argument.given(node.args, node.kwargs), fx.Node)
        for number in argument.results:
            _tie_result(cells, cells.of[node], number, len(schema.returns), operands)
    return mutated_operands(node)


def _meaning(node: fx.Node) -> Op | None:
    """What a call does; None where it may alias all its operands and write into them: its op has no meaning, or is tagged as
    aliasing without saying what."""
    op = lookup(node.target) if node.op == "call_function" else None
    if op is None or op.run is None:
        return None
    if op.aliases and not op.name.startswith("python::") and not aliased_arguments(node.target):
        return None
    return op


def _attribute(node: fx.Node) -> Any:
    """What tells the storage of an attribute: its address, or the name where no module is known that holds it."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return node.target
    return value.untyped_storage()._cdata


def _tie_result(
    cells: _Cells, mine: Sequence[int | None], number: int, returned: int, operands: Sequence[fx.Node]
) -> None:
    if returned > 1:
        mine = mine[number : number + 1] if len(mine) == returned else mine
        for operand in operands:
            cells.unite(mine, cells.of[operand])
    elif len(operands) == len(mine):  # lists, item by item
        for cell, operand in zip(mine, operands, strict=True):
            cells.unite([cell], cells.of[operand])
    else:
        for operand in operands:
            cells.unite(mine, cells.of[operand])


def _joined(parts: Iterable[Storages]) -> Storages:
    return tuple(dict.fromkeys(storage for part in parts for storage in part))


# ----------------------------------------------------------------------------------------------------------- metadata


def recorded_tensors(value: Any) -> list[TensorSpec | torch.Tensor]:
    """The tensors in the metadata of a value."""
    return leaves(value, (TensorSpec, torch.Tensor))


def storage_key(value: TensorSpec | torch.Tensor) -> Any:
    """The identity of the recorded storage of a tensor; None if it is not shared, or unknown."""
    if isinstance(value, TensorSpec):
        return None if value.alias is None else ("alias", value.alias)
    return value.untyped_storage()._cdata if value.layout is torch.strided else None


def _recorded(node: fx.Node) -> set[Any]:
    return {*map(storage_key, recorded_tensors(node.meta.get("val")))} - {None}


__all__ = [
    "GraphAccesses",
    "Storages",
    "accesses",
    "is_view",
    "mutated_nodes",
    "recorded_tensors",
    "shared_places",
    "storage_key",
]
