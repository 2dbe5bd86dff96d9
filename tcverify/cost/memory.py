"""Liveness over real storages, and the peak memory of a graph in the order in which it stands.

Values that share a storage, by their metadata, live and die together: a view keeps its base alive. Inputs live from the first
node to the last, outputs from the node that makes them to the last; everything else from the node that makes it to the last
node that reads it or a value that shares its storage; results of a tuple until the last of them is taken. While a node runs,
its operands and its results live side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from tcverify.ops import TensorSpec


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One storage of a graph.

    Attributes:
        first, last: numbers of the first and the last node, in graph order, during which it lives.
        nbytes: its size: what the values that live in it reach.
        nodes: the nodes whose values live in it, in graph order.
    """

    first: int
    last: int
    nbytes: int
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of a graph over time.

    Attributes:
        current: bytes that live while each node runs, in graph order.
        peak_bytes: the most of them.
        peak_node: the first node at which that is so.
        unknown: nodes whose sizes are symbolic or missing; they count as empty.
    """

    current: tuple[int, ...]
    peak_bytes: int
    peak_node: fx.Node
    unknown: tuple[fx.Node, ...]


def memory_profile(graph: fx.Graph) -> MemoryProfile:
    """Return the memory that `graph` takes in its order. Linear in the graph.

    Metadata may be fake tensors or `TensorSpec`s. What an op needs inside is not counted.
    """
    nodes = list(graph.nodes)
    found, unknown = lifetimes(graph)
    changes = [0] * (len(nodes) + 1)
    for storage in found:
        changes[storage.first] += storage.nbytes
        changes[storage.last + 1] -= storage.nbytes
    current = tuple(accumulate(changes))[:-1]
    peak = max(current)
    return MemoryProfile(current, peak, nodes[current.index(peak)], unknown)


def lifetimes(graph: fx.Graph) -> tuple[list[Lifetime], tuple[fx.Node, ...]]:
    """Return the storages of a graph by their first node, and the nodes whose sizes are not known."""
    nodes = list(graph.nodes)
    numbers = {node: i for i, node in enumerate(nodes)}
    sizes: dict[Any, int] = {}
    members: dict[Any, list[fx.Node]] = {}
    of_node: dict[fx.Node, list[Any]] = {}
    unknown: list[fx.Node] = []
    for node in nodes:
        if node.op == "output":
            continue
        keys = of_node[node] = []
        for position, value in enumerate(_tensors(node.meta.get("val"))):
            key, size = storage_of(value)
            key = (node, position) if key is None else key
            if size is None:
                unknown.append(node)
                continue
            if key not in keys:
                keys.append(key)
                members.setdefault(key, []).append(node)
            sizes[key] = max(sizes.get(key, 0), size)
        if "val" not in node.meta:
            unknown.append(node)
    end = len(nodes) - 1
    found = []
    for key, users in members.items():
        first, last = numbers[users[0]], numbers[users[-1]]
        for node in users:
            if node.op in ("placeholder", "get_attr"):
                first, last = 0, end
            for reader in node.users:
                last = max(last, numbers[reader])
        found.append(Lifetime(first, last, sizes[key], tuple(users)))
    found.sort(key=lambda storage: storage.first)
    return found, tuple(dict.fromkeys(unknown))


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (TensorSpec, torch.Tensor)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def storage_of(value: TensorSpec | torch.Tensor) -> tuple[Any, int | None]:
    """Return what tells the storage of a value from others (None where it is of its own, or not known), and the bytes up to the
    last element of the value (None where they are not known)."""
    shape: Sequence[Any]
    stride: Sequence[Any]
    offset: Any
    if isinstance(value, TensorSpec):
        key: Any = None if value.alias is None else ("alias", value.alias)
        shape, stride, offset = value.shape, value.stride, value.offset
    else:
        if value.layout is not torch.strided:
            return None, None
        key = value.untyped_storage()._cdata
        shape, stride, offset = tuple(value.shape), tuple(value.stride()), value.storage_offset()
    if any(type(size) is not int for size in (*shape, *stride, offset)):
        return key, None
    if 0 in shape:
        return key, 0
    reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return key, reach * value.dtype.itemsize
