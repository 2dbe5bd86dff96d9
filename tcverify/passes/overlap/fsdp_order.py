"""The order of FSDP's communication: one all_gather ends before the next one begins; so do reduce_scatters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tcverify.passes.base import Pass
from tcverify.passes.editing import declared_after, named_arguments, op_name
from tcverify.passes.overlap.fsdp import CHUNK_CAT, COPY_OUT, GATHER, GATHER_OUT, SCATTERS, find_copy_in
from tcverify.passes.overlap.graph import AsyncCommunication, CommGraph, GraphReading, comm_graph, put_in_order
from tcverify.passes.overlap.reordering import is_lowered
from tcverify.program import Contract

#: What sorts the nodes of a graph: (place of an anchor, before or at or behind it, own place).
_Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FsdpBlock:
    """A collective of FSDP and what belongs to it.

    Attributes:
        before: casts, copy-in and start, in order; what only they need is among them.
        behind: the first wait, what views its result, and the copy-out, in order.
    """

    before: tuple[fx.Node, ...]
    behind: tuple[fx.Node, ...]


class EnforceCommOrderingForFsdp(Pass):
    """The block of an all_gather (casts, copy-in, start) stands together, and so does what follows it (wait, copy-out); the next
    all_gather's block comes only then. The same holds of reduce_scatters behind `chunk_cat`.

    What must stay behind something says so in `meta["after"]`, so that passes which run later keep it: an all_gather that they
    raised further would hold its buffer for longer. Nodes only sink, and no other dependency is given up for that. So where
    a program starts the next all_gather before it waits for the last one, that stays: ranks that wait earlier than others may
    wait for each other.
    """

    name: ClassVar[str] = "enforce_comm_ordering_for_fsdp"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, order=True, collective_order=True)
    PATTERNS: ClassVar[tuple[str, ...]] = ("all_gather", "reduce_scatter", "moved")
    reading: ClassVar[type[GraphReading]] = GraphReading

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """See `Pass.rewrite`. Near-linear in the graph."""
        if is_lowered(graph):
            return ()
        found = comm_graph(graph, reading=self.reading)
        order = _Order(found)
        chains = {"all_gather": _all_gathers(found), "reduce_scatter": _reduce_scatters(found)}
        for pattern, blocks in chains.items():
            for block in blocks:
                order.gather(block.before)
            for first, second in itertools.zip_longest(blocks, blocks[1:]):
                if second is None:
                    order.gather(first.behind)
                elif order.put_behind(second.before, first.behind):
                    order.gather(first.behind)
                    self.rewrites[pattern] += self.declare(second, first)
        self.rewrites["moved"] = put_in_order(graph, order.sorted())
        return ()

    def declare(self, block: FsdpBlock, earlier: FsdpBlock) -> int:
        """Note that a block follows what stands behind an earlier one. Returns how many nodes did not say so."""
        return _declare(block.before, earlier.behind)


class _Order:
    """An order of the nodes of a graph in which nodes can sink, as far as their dependents allow."""

    def __init__(self, found: CommGraph) -> None:
        self._found = found
        self._place = {node: place for place, node in enumerate(found.nodes)}
        self._key: dict[fx.Node, _Key] = {node: (place, 1, 0) for node, place in self._place.items()}

    def sorted(self) -> list[fx.Node]:
        """The nodes in order."""
        return sorted(self._found.nodes, key=self._key.__getitem__)

    def gather(self, nodes: Sequence[fx.Node]) -> None:
        """Let nodes sink to right before the last of them; those that cannot stay where they are."""
        last = max(nodes, key=self._key.__getitem__)
        anchor = self._key[last]
        for node in sorted(nodes, key=self._key.__getitem__, reverse=True):
            wanted = (anchor[0], 0, self._place[node])
            if self._key[node] < wanted < anchor and self._can_sink(node, wanted, ()):
                self._key[node] = wanted

    def put_behind(self, nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
        """Let nodes sink behind all others, all of them or none. Returns whether they stand there now."""
        barrier = max(self._key[node] for node in others)
        early = [node for node in nodes if self._key[node] < barrier]
        moving = set(early)
        wanted = {node: (barrier[0], 2, self._place[node]) for node in early}
        if not all(barrier < wanted[node] and self._can_sink(node, wanted[node], moving) for node in early):
            return False
        self._key.update(wanted)
        return True

    def _can_sink(self, node: fx.Node, to: _Key, with_it: Iterable[fx.Node]) -> bool:
        return all(self._key[after] > to or after in with_it for after in self._found.successors[node])


def _declare(nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> int:
    """Note that each of `nodes` follows all others. Returns how many of them did not say so."""
    names = [node.name for node in others]
    count = 0
    for node in nodes:
        said = declared_after(node)
        missing = [name for name in names if name not in said]
        if missing:
            node.meta["after"] = said + missing
            count += 1
    return count


# ------------------------------------------------------------------------------------------------------------- blocks


def _all_gathers(found: CommGraph) -> list[FsdpBlock]:
    """The all_gathers of slices that were copied in, in the order in which they start."""
    blocks = []
    place = {node: number for number, node in enumerate(found.nodes)}
    for communication in found.starts:
        start = communication.start
        if op_name(start) not in (GATHER, GATHER_OUT) or not communication.waits:
            continue
        copy_in = find_copy_in(named_arguments(start).get("input"))
        if copy_in is None:
            continue
        slices = [user for user in copy_in.users if user in start.all_input_nodes]
        before = _with_private_operands(found, [copy_in, *slices, start])
        behind = _copy_out(found, communication, place)
        blocks.append(FsdpBlock(tuple(sorted(before, key=place.__getitem__)), behind))
    return blocks


def _with_private_operands(found: CommGraph, block: list[fx.Node]) -> Iterable[fx.Node]:
    """A block, and before it the nodes that only the block reads: casts of the shards, their views, the buffer.

    What an earlier block reads too, as where a layer runs twice, belongs to neither.
    """
    members = dict.fromkeys(block)
    queue = list(block)
    while queue:
        for operand in queue.pop().all_input_nodes:
            if operand not in members and _is_private(found, operand, members):
                members[operand] = None
                queue.append(operand)
    return members


def _is_private(found: CommGraph, node: fx.Node, members: dict[fx.Node, None]) -> bool:
    silent = found.kind(node) in ("compute", "free") and not found.accesses.writes[node]
    return silent and node.op == "call_function" and all(user in members for user in node.users)


def _copy_out(found: CommGraph, communication: AsyncCommunication, place: Mapping[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The first wait for a collective, the views of its result, and what copies out of them."""
    wait = communication.waits[0]
    members = {wait: None}
    queue = [wait]
    while queue:
        for user in queue.pop().users:
            view = found.kind(user) == "free" and user.op == "call_function"
            if user not in members and (view or op_name(user) == COPY_OUT):
                members[user] = None
                queue += [user] if view else []
    last = max((place[node] for node in members if op_name(node) == COPY_OUT), default=place[wait])
    return tuple(sorted((node for node in members if place[node] <= last), key=place.__getitem__))


def _reduce_scatters(found: CommGraph) -> list[FsdpBlock]:
    """The reduce_scatters of what `chunk_cat` has written, in the order in which they start."""
    last_write: dict[int, fx.Node] = {}
    since: dict[int, dict[fx.Node, None]] = {}  # by storage, what touches it behind its chunk_cat
    written_by: dict[fx.Node, list[fx.Node]] = {}
    for node in found.nodes:
        source = named_arguments(node).get("input") if op_name(node) in SCATTERS else None
        if isinstance(source, fx.Node):
            for storage in found.accesses.results[source]:
                if storage in last_write:
                    written_by[node] = [last_write[storage], *since[storage]]
        for storage in (*found.accesses.reads.get(node, ()), *found.accesses.writes.get(node, ())):
            if storage in last_write:
                since[storage][node] = None
        if op_name(node) == CHUNK_CAT:
            for storage in found.accesses.writes[node]:
                last_write[storage], since[storage] = node, {}
    blocks = []
    for communication in found.starts:
        behind = written_by.get(communication.start)
        if behind is not None and communication.waits:
            quiet = [node for node in behind if found.kind(node) in ("compute", "free") and node.op == "call_function"]
            blocks.append(FsdpBlock((*quiet, communication.start), (communication.waits[0],)))
    return blocks


__all__ = ["EnforceCommOrderingForFsdp"]
