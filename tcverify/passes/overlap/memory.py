"""Peak memory of an order of nodes, kept up to date while nodes change places.

A storage lives from the node that makes it to the last node that touches a value in it; of the operands of an asynchronous
collective, the wait that completes it is such a node. Inputs live throughout, outputs to the end; what
`resize_storage_bytes_` frees or grows does so there. While a node runs, its operands and its results live side by side, so that
memory rises by what a node allocates before it runs and falls by what it frees afterwards. The two are kept apart: a node that
makes what it gives up at once weighs nothing afterwards and much while it runs.

What a node allocates does not depend on the order, since what makes a storage precedes all that touches it. What it frees does:
when two nodes that touch a storage change places, the last one of them frees it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tcverify.errors import InternalError
from tcverify.ops import TensorSpec, lookup, schema_of
from tcverify.passes.overlap.graph import CommGraph
from tcverify.passes.storages import recorded_tensors, storage_key

#: Frees a storage, or gives it another size.
RESIZE = "inductor::resize_storage_bytes_"

#: What changes hands: a storage, and the numbers of the nodes that freed it and that free it now.
Handover = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the nodes of a graph do to memory, in whatever order. Nodes and storages are numbers; nodes in graph order.

    Attributes:
        initial: bytes of the inputs.
        allocated: per node, the bytes that it allocates before it runs.
        shrunk: per node, the bytes that it frees by itself, wherever it stands.
        touched: per node, the storages that are freed some time and that it touches.
        nbytes: per storage, the bytes that its last node frees.
        unknown: names of nodes that allocate what has a symbolic size, or none in the metadata; they count as empty.
    """

    initial: int
    allocated: tuple[int, ...]
    shrunk: tuple[int, ...]
    touched: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    unknown: tuple[str, ...]


class OrderMemory:
    """The memory of an order of nodes, while candidates change places with groups of nodes beside them.

    Attributes:
        allocated, freed: per node, bytes before it runs and after it.
        last: per storage, the number of the node that frees it.
    """

    def __init__(self, footprint: Footprint, order: Sequence[int]) -> None:
        self.footprint = footprint
        self.allocated = list(footprint.allocated)
        self.freed, self.last = self.recomputed(order)

    def recomputed(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """What the nodes free in `order`, and the last node of every storage, recomputed."""
        last = [-1] * len(self.footprint.nbytes)
        for node in order:
            for storage in self.footprint.touched[node]:
                last[storage] = node
        freed = list(self.footprint.shrunk)
        for storage, node in enumerate(last):
            if node >= 0:
                freed[node] += self.footprint.nbytes[storage]
        return freed, last

    def levels(self, order: Iterable[int]) -> list[int]:
        """Bytes that live while each node of `order` runs."""
        level = self.footprint.initial
        found = []
        for node in order:
            level += self.allocated[node]
            found.append(level)
            level -= self.freed[node]
        return found

    def behind(self, candidate: int, group: Collection[int]) -> list[Handover]:
        """What changes hands when `candidate` goes behind a group that follows it."""
        last = self.last
        return [(s, last[s], candidate) for s in self.footprint.touched[candidate] if last[s] in group]

    def before(self, candidate: int, latest: Mapping[int, int]) -> list[Handover]:
        """What changes hands when `candidate` goes before a group that precedes it.

        Args:
            latest: per storage that the group touches, the last node of the group that does.
        """
        last = self.last
        return [
            (s, candidate, latest[s]) for s in self.footprint.touched[candidate] if last[s] == candidate and s in latest
        ]

    def peak(self, level: int, nodes: Iterable[int], handovers: Sequence[Handover] = ()) -> int:
        """The most bytes that live while one of `nodes` runs, in this order.

        Args:
            level: bytes that live before the first of them.
            handovers: what has changed hands then.
        """
        changes: dict[int, int] = {}
        for storage, giver, taker in handovers:
            nbytes = self.footprint.nbytes[storage]
            changes[giver] = changes.get(giver, 0) - nbytes
            changes[taker] = changes.get(taker, 0) + nbytes
        peak = 0
        for node in nodes:
            level += self.allocated[node]
            peak = max(peak, level)
            level -= self.freed[node] + changes.get(node, 0)
        return peak

    def apply(self, handovers: Iterable[Handover]) -> None:
        """Let storages change hands."""
        for storage, giver, taker in handovers:
            nbytes = self.footprint.nbytes[storage]
            self.freed[giver] -= nbytes
            self.freed[taker] += nbytes
            self.last[storage] = taker

    def verify(self, order: Sequence[int]) -> None:
        """Compare with a full recomputation. Raises `InternalError` if they differ."""
        freed, last = self.recomputed(order)
        if freed != self.freed or last != self.last:
            wrong = [node for node in order if freed[node] != self.freed[node]]
            raise InternalError(f"incremental memory differs from recomputed memory at nodes {wrong[:5]} of the graph")


# -------------------------------------------------------------------------------------------------------- of a graph


def footprint(found: CommGraph) -> Footprint:
    """Return the effect of a graph's nodes on memory. Linear in the graph."""
    return StorageWalk(found).footprint()


class StorageWalk:
    """Walks a graph and tells its storages apart.

    Storages are those that metadata shows; where an op returns what it writes into, a view or a wait what it is given, the
    storage is that of the operand, whatever metadata says.
    """

    def __init__(self, found: CommGraph) -> None:
        self._found = found
        self._held: dict[fx.Node, list[tuple[int, tuple[int, ...]]]] = {}  # (storage, storages of the dependency graph)
        self._sizes: list[int] = []
        self._makers: list[int] = []
        self._by_key: dict[Any, int] = {}
        self._unknown: dict[str, None] = {}

    def footprint(self) -> Footprint:
        nodes = self._found.nodes
        touched = [self._touch(number, node) for number, node in enumerate(nodes)]
        self.extend(touched)
        kept = {s for s, maker in enumerate(self._makers) if nodes[maker].op in ("placeholder", "get_attr")}
        inputs = frozenset(kept)
        for node, of in zip(nodes, touched, strict=True):
            if node.op == "output":
                kept.update(of)
        kept = self.kept(inputs, kept)
        allocated, shrunk = [0] * len(nodes), [0] * len(nodes)
        for storage, maker in enumerate(self._makers):
            if storage not in inputs:
                allocated[maker] += self._sizes[storage]
        initial = sum(self._sizes[storage] for storage in inputs)
        now = list(self._sizes)
        for number, node in enumerate(nodes):
            for storage, size in self._resized(node):
                allocated[number] += max(0, size - now[storage])
                shrunk[number] += max(0, now[storage] - size)
                now[storage] = size
        return Footprint(
            initial,
            tuple(allocated),
            tuple(shrunk),
            tuple(tuple(s for s in of if s not in kept) for of in touched),
            tuple(now),
            tuple(self._unknown),
        )

    def kept(self, inputs: frozenset[int], kept: set[int]) -> set[int]:
        """The storages that are never freed: those of inputs and of outputs."""
        return kept

    def _touch(self, number: int, node: fx.Node) -> dict[int, None]:
        """Tell the storages of a node's value; returns all that it touches."""
        touched = {storage: None for operand in node.all_input_nodes for storage, _ in self._held[operand]}
        held = self._held[node] = [] if node.op == "output" else list(self._own(number, node))
        touched.update(dict.fromkeys(storage for storage, _ in held))
        return touched

    def _own(self, number: int, node: fx.Node) -> Iterator[tuple[int, tuple[int, ...]]]:
        accesses, kind = self._found.accesses, self._found.kind(node)
        if "val" not in node.meta and not _returns_nothing(node):
            self._note_unknown(node)
        value = node.meta.get("val")
        several = isinstance(value, (tuple, list))
        operands = [pair for operand in node.all_input_nodes for pair in self._held[operand]]
        items: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
        for position, item in enumerate(items):
            roots = accesses.items[node][position] if several and node in accesses.items else accesses.results[node]
            same = kind in ("wait", "free") or not set(roots).isdisjoint(accesses.writes[node])
            given = self._given(node, operands, roots) if same else None
            for tensor in recorded_tensors(item):
                key, size = storage_key(tensor), _size_of(tensor)
                if size is None:
                    self._note_unknown(node)
                    size = 0
                storage = self._by_key.get(key) if key is not None else None
                if storage is None:
                    storage = self._new(number) if given is None else given
                if key is not None:
                    self._by_key[key] = storage
                self._sizes[storage] = max(self._sizes[storage], size)
                yield storage, roots

    def _note_unknown(self, node: fx.Node) -> None:
        if node.op not in ("placeholder", "get_attr"):  # they live throughout in any order
            self._unknown[node.name] = None

    def _given(
        self, node: fx.Node, operands: Sequence[tuple[int, tuple[int, ...]]], roots: tuple[int, ...]
    ) -> int | None:
        """The storage of the operand that a node returns."""
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
            there = self._held[node.args[0]]
            if -len(there) <= node.args[1] < len(there):
                return there[node.args[1]][0]
        for storage, theirs in operands:
            if not set(theirs).isdisjoint(roots):
                return storage
        return None

    def _new(self, maker: int) -> int:
        self._sizes.append(0)
        self._makers.append(maker)
        return len(self._sizes) - 1

    def extend(self, touched: Sequence[dict[int, None]]) -> None:
        """Let what a collective reads live until the wait that completes it, and to the end where there is none; not what it
        has copied."""
        pending: dict[int, list[int]] = {}  # storage in flight → storages that are read for it
        for node, of in zip(self._found.nodes, touched, strict=True):
            kind = self._found.kind(node)
            if kind == "start" and not lookup(node.target).copies:
                for sources, targets in self._transfers(node):
                    for target in targets:
                        pending.setdefault(target, []).extend(sources)
            elif kind == "wait":
                for storage in list(of):
                    of.update(dict.fromkeys(pending.pop(storage, ())))
        touched[-1].update(dict.fromkeys(storage for of in pending.values() for storage in of))

    def _transfers(self, node: fx.Node) -> Iterator[tuple[list[int], list[int]]]:
        """What a start reads, and into which storages that goes."""
        given = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
        sources = [
            [storage for storage, _ in self._held[each]]
            for each in (given if isinstance(given, (list, tuple)) else [given])
            if isinstance(each, fx.Node)
        ]
        targets = [storage for storage, _ in self._held[node]]
        if len(targets) == len(sources):
            yield from ((of, [target]) for of, target in zip(sources, targets, strict=True))
        else:
            yield [storage for of in sources for storage in of], targets

    def _resized(self, node: fx.Node) -> Iterator[tuple[int, int]]:
        if node.op != "call_function" or lookup(node.target).name != RESIZE:
            return
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("new_size")
        operand = node.args[0] if node.args else node.kwargs.get("variable")
        if isinstance(operand, fx.Node) and type(size) is int:
            for storage, _ in self._held[operand]:
                yield storage, size


def _returns_nothing(node: fx.Node) -> bool:
    schema = schema_of(node.target) if node.op == "call_function" else None
    return schema is not None and not schema.returns


def _size_of(value: TensorSpec | torch.Tensor) -> int | None:
    """The bytes of its storage up to the last element of a value; None where they are not known."""
    shape: Sequence[Any] = value.shape
    stride: Sequence[Any]
    offset: int | torch.SymInt
    if isinstance(value, TensorSpec):
        stride, offset = value.stride, value.offset
    elif value.layout is torch.strided:
        stride, offset = value.stride(), value.storage_offset()
    else:
        return None
    if any(type(size) is not int for size in (*shape, *stride, offset)):
        return None
    if 0 in shape:
        return 0
    elements: int = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return elements * value.dtype.itemsize


__all__ = ["RESIZE", "Footprint", "Handover", "OrderMemory", "StorageWalk", "footprint"]
