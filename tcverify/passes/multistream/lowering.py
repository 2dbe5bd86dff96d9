"""Writes a schedule into a graph: nodes in issue order, a wait before each op that needs one, a record after each.

Only anchors stand between the waits of an op and the op, and its record follows at once (behind the item of a tuple through
which it is recorded), so that it means the same whether anchors are read by data flow or by position.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from tcverify.ops import TensorSpec
from tcverify.passes.multistream.graph import NotLowered, StreamGraph, last_writers, spec_of_copy
from tcverify.passes.multistream.schedule import StreamSchedule


@dataclass(slots=True)
class StreamLowering:
    """A graph under construction.

    Attributes:
        records: the token of every op that has been issued, by the op's number.
        waits: how many waits have been inserted.
    """

    graph: fx.Graph
    parts: StreamGraph
    schedule: StreamSchedule
    records: dict[int, fx.Node] = field(default_factory=dict)
    waits: int = 0
    _missing: dict[fx.Node, int] = field(default_factory=dict)
    _readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _items: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        for host in self.parts.hosts:
            operands = host.all_input_nodes
            self._missing[host] = len(operands)
            for operand in operands:
                self._readers.setdefault(operand, []).append(host)

    def issue_inputs(self) -> None:
        """Move the inputs to the front, with the host nodes that need nothing else."""
        inputs = self.parts.inputs
        for node in inputs:
            if node.op != "placeholder":  # those stand in front already
                self.parts.output.prepend(node)
        for host in self.parts.hosts:
            if self._missing[host] == 0:
                self.issue_host(host)
        for node in inputs:
            self.issue_hosts_of(node)

    def issue_host(self, host: fx.Node) -> None:
        """Move a host node behind everything issued so far, and what needs only it."""
        queue = [host]
        while queue:
            node = queue.pop()
            self._missing[node] = -1
            self.parts.output.prepend(node)
            queue += reversed(self._ready(node))

    def issue_hosts_of(self, node: fx.Node) -> None:
        """Move the host nodes behind everything issued so far that waited for `node` alone, or for an item recorded since."""
        ready = self._ready(node)
        for item in self._items:
            ready += self._ready(item)
        self._items.clear()
        for host in ready:
            self.issue_host(host)

    def item_of(self, node: fx.Node) -> fx.Node | None:
        """The first selection of a tensor from the result of `node`, if there is one that has not been issued."""
        for host in self._readers.get(node, ()):
            item = host.target is operator.getitem and isinstance(self.parts.specs[host], TensorSpec)
            if item and self._missing[host] == 1:
                return host
        return None

    def issue_item(self, item: fx.Node) -> None:
        """Move the item right behind its tuple; what needs it follows once the tuple is recorded."""
        self._missing[item] = -1
        self._items.append(item)
        self.parts.output.prepend(item)

    def _ready(self, node: fx.Node) -> list[fx.Node]:
        """Count `node` as issued; return the host nodes that need nothing else now."""
        ready = []
        for host in self._readers.get(node, ()):
            if self._missing[host] > 0:
                self._missing[host] -= 1
                if self._missing[host] == 0:
                    ready.append(host)
        return ready


def joined_storages(parts: StreamGraph) -> set[int]:
    """Storages that the caller reads: those of outputs, and of inputs, which the graph may have written into."""
    read = [*parts.inputs, *parts.output.all_input_nodes]
    return {storage for node in read for storage in parts.storages(node)}


def joinable_outputs(parts: StreamGraph) -> list[fx.Node]:
    """Outputs in whose place a copy may be returned: single tensors, dense, that share storage with no input or other output."""
    shared = [storage for node in parts.inputs for storage in parts.storages(node)]
    leaves = parts.output.all_input_nodes
    for node in leaves:
        shared += parts.storages(node)
    counts: dict[int, int] = {}
    for storage in shared:
        counts[storage] = counts.get(storage, 0) + 1
    found = []
    for node in leaves:
        spec = parts.specs[node]
        alone = isinstance(spec, TensorSpec) and spec.alias is not None and counts[spec.alias] == 1
        if alone and spec_of_copy(spec).layout == spec.layout:
            found.append(node)
    return found


def plan_joins(parts: StreamGraph, tokens: Sequence[int]) -> Mapping[fx.Node, tuple[int, ...]]:
    """Divide the tokens that the output needs among the outputs: each to what its op wrote, others to the first one.

    Raises:
        NotLowered: tokens are needed, but no output may be replaced by a copy that waits.
    """
    able = joinable_outputs(parts)
    if tokens and not able:
        raise NotLowered("no output could wait for other streams: they share storage with inputs or with each other")
    owner: dict[int, fx.Node] = {}
    for node in able:
        for writer in last_writers(parts, parts.storages(node)):
            owner.setdefault(writer, node)
    joins: dict[fx.Node, list[int]] = {}
    for token in tokens:
        joins.setdefault(owner.get(token, able[0]), []).append(token)
    return {node: tuple(own) for node, own in joins.items()}


__all__ = ["StreamLowering", "joinable_outputs", "joined_storages", "plan_joins"]
