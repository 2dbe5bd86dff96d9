"""Streams: what the anchors of a graph say about where its ops run and what they wait for, read in two ways. Graphs in
host IR, which have no anchors, are read in `host_ir.streams`.

By *data flow* (the reference): the waits on an op's operands bind the op; a record marks the op that produced its operand.
By *position* (as a runtime does that walks the graph): the next op takes all pending waits; a record marks the op that
was dispatched last. In well-formed graphs both readings agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.checks.host_ir.streams import find_mixed_anchors, read_host_ir, reads_rank
from tcverify.checks.memory.storage import GraphMemory, memory_of
from tcverify.checks.streams.reading import BEGINNING, EventRecord, EventWait, IssuedOp, StreamReading, tokens_of
from tcverify.ops import RECORD, WAIT, lookup
from tcverify.ops.leaves import leaves
from tcverify.program import Program, RankConstant
from tcverify.program.graph import in_host_ir
from tcverify.program.stream_options import MAIN_STREAM


def is_lowered(graph: fx.Graph) -> bool:
    """Whether a graph states where its ops run: by anchors, or in host IR. Cached: graphs of programs do not change."""
    known = _LOWERED.get(graph)
    if known is None:
        known = in_host_ir(graph) or any(
            node.op == "call_function" and lookup(node.target).name in (WAIT, RECORD) for node in graph.nodes
        )
        _LOWERED[graph] = known
    return known


_LOWERED: weakref.WeakKeyDictionary[fx.Graph, bool] = weakref.WeakKeyDictionary()
_READINGS: weakref.WeakKeyDictionary[fx.Graph, tuple[list[str], dict[Any, StreamReading]]] = weakref.WeakKeyDictionary()


def reading_of(program: Program, rank: int) -> StreamReading:
    """Return the reading of a rank's graph. Ranks share one unless rank constants make their streams differ."""
    binding = program.ranks[rank]
    graph = program.graphs[binding.graph]
    known = _READINGS.get(graph)
    if known is None:
        known = _READINGS[graph] = _constants_that_matter(graph), {}
    names, readings = known
    host = in_host_ir(graph)
    key = tuple([_frozen(binding.constants.get(name)) for name in names])
    if host and _needs_rank(graph):
        key = (*key, rank)
    reading = readings.get(key)
    if reading is None:
        mixed = find_mixed_anchors(graph) if host else None
        if host and mixed is None:
            reading = read_host_ir(graph, binding.constants, rank)
        else:
            reading = _Reader(graph, binding.constants).read()
            reading.mixed = mixed
        readings[key] = reading
    return reading


def _needs_rank(graph: fx.Graph) -> bool:
    known = _NEEDS_RANK.get(graph)
    if known is None:
        known = _NEEDS_RANK[graph] = reads_rank(graph)
    return known


_NEEDS_RANK: weakref.WeakKeyDictionary[fx.Graph, bool] = weakref.WeakKeyDictionary()


def lowered_ranks(program: Program) -> list[tuple[StreamReading, list[int]]]:
    """Return the distinct readings of a program's lowered graphs, each with the ranks that have it, in rank order."""
    lowered = [is_lowered(graph) for graph in program.graphs]
    found: dict[int, tuple[StreamReading, list[int]]] = {}
    for rank, binding in enumerate(program.ranks):
        if lowered[binding.graph]:
            reading = reading_of(program, rank)
            found.setdefault(id(reading), (reading, []))[1].append(rank)
    return list(found.values())


def _constants_that_matter(graph: fx.Graph) -> list[str]:
    """The rank constants that determine streams and teams, or which result of a tuple is used."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        name = lookup(node.target).name if node.op == "call_function" else ""
        if name in (WAIT, RECORD, "python::getitem") or name.startswith("host_ir::"):
            found.update(dict.fromkeys(one.name for one in leaves((node.args, node.kwargs), RankConstant)))
    return list(found)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Reader:
    """Walks a graph once, in issue order."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, Any]) -> None:
        self._graph = graph
        self._constants = constants
        self._memory: GraphMemory = memory_of(graph, constants)
        self._unknown = set(self._memory.unknown)
        self._reading = StreamReading()
        self._numbers: dict[fx.Node, int] = {}
        self._producer: list[int] = []  # by node number: the op that made its value
        self._base: list[int] = []  # by node number: the value that a chain of waits gates
        self._copies: dict[int, int] = {}  # storage of a wait's result, until it is written -> the node it copies
        self._copied_at: dict[int, int] = {}  # storage of a wait's result -> the wait
        self._written: dict[int, int] = {}  # storage -> the last node that wrote into it after it was made
        self._pending: list[EventWait] = []
        self._expects_record: IssuedOp | None = None  # what was dispatched last, if nothing has marked it yet
        self._marks: list[list[int]] = []  # by op: its records by data flow

    def read(self) -> StreamReading:
        reading = self._reading
        for number, node in enumerate(self._graph.nodes):
            self._numbers[node] = number
            reading.names.append(node.name)
            self._producer.append(BEGINNING)
            self._base.append(number)
            if node.op in ("placeholder", "get_attr"):
                for storage in self._memory.holds[number]:
                    reading.inputs.setdefault(storage, node.name)
            elif node.op == "output":
                reading.output = self._issue(number, node)
                reading.schedule = node.meta.get("schedule")
            else:
                self._call(number, node)
        for index, op in enumerate(reading.ops):
            self._settle(op, self._marks[index])
        if reading.output is not None:
            self._settle(reading.output, [])
        reading.unknown = self._memory.unknown
        return reading

    def _call(self, number: int, node: fx.Node) -> None:
        op = lookup(node.target) if node.op == "call_function" else None
        if op is not None and op.name == WAIT:
            self._wait(number, node)
        elif op is not None and op.name == RECORD:
            self._record(number, node)
        else:
            source = None if op is not None and op.effect else self._source(number, node)
            if source is None:
                self._producer[number] = len(self._reading.ops)
                self._reading.ops.append(self._issue(number, node))
                self._marks.append([])
            elif source >= 0:
                self._producer[number] = self._producer[source]

    def _source(self, number: int, node: fx.Node) -> int | None:
        """The operand that a call only views; -1 for calls that produce no tensor; None for work."""
        memory = self._memory
        if memory.writes[number] or number in self._unknown:
            return None
        held = memory.holds[number]
        if not held:
            return -1
        operands = [self._numbers[operand] for operand in node.all_input_nodes]
        shared = {storage for operand in operands for storage in memory.holds[operand]}
        if not shared.issuperset(held):
            return None
        return next(o for o in operands if not set(memory.holds[o]).isdisjoint(held))

    def _issue(self, number: int, node: fx.Node) -> IssuedOp:
        """Dispatch an op, or the output: it takes the pending waits."""
        memory = self._memory
        gates: list[int] = []
        reads: dict[int, int] = {}
        for operand in node.all_input_nodes:
            at = self._numbers[operand]
            if at in self._reading.waits:
                gates.append(at)
            if at not in self._reading.records:
                self._read(number, at, reads)
        output = node.op == "output"
        own = () if output else tuple(s for s in memory.holds[number] if s not in reads)
        for storage in memory.writes[number]:
            self._copies.pop(storage, None)  # from here on the copy is a separate value
            self._written[storage] = number
        op = lookup(node.target) if node.op == "call_function" else None
        issued = IssuedOp.of(number, node, op, reads, memory.writes[number] + own, gates=tuple(gates))
        self._expects_record = None
        if self._pending:
            issued.positional_stream = self._pending[-1].stream
            records = self._reading.records
            marked = [records[r].positional_op for wait in self._pending for r in wait.records]
            issued.positional_after = tuple(dict.fromkeys(marked))
            self._pending = []
        elif not output:
            self._expects_record = issued
        return issued

    def _read(self, reader: int, number: int, reads: dict[int, int]) -> None:
        """Add what reading a node reads: a wait's result is read where it is used, and so is what it copies."""
        todo: list[tuple[int, int | None]] = [(number, None)]
        while todo:
            at, wait = todo.pop()
            for storage in self._memory.holds[at]:
                if wait is not None and self._written.get(storage, -1) > wait:
                    self._reading.stale.append((reader, wait, self._written[storage]))
                if storage not in reads:
                    reads[storage] = self._base[at]
                    if storage in self._copies:
                        todo.append((self._copies[storage], self._copied_at[storage]))

    def _wait(self, number: int, node: fx.Node) -> None:
        reading = self._reading
        value, deps = _argument(node, 0, "x"), _argument(node, 2, "deps")
        stream = self._stream(number, node)
        named = [self._numbers[record] for record in leaves(deps, fx.Node)]
        records = [number for number in named if number in reading.records]
        inner: int | None = None
        if isinstance(value, fx.Node):
            at = self._numbers[value]
            self._producer[number], self._base[number] = self._producer[at], self._base[at]
            inner = at if at in reading.waits else None
            self._copies.update(dict.fromkeys(self._memory.holds[number], at))
            self._copied_at.update(dict.fromkeys(self._memory.holds[number], number))
        waiting = reading.waits[number] = EventWait(number, stream, tuple(dict.fromkeys(records)), inner)
        self._pending.append(waiting)
        self._expects_record = None
        reading.lowered = True

    def _record(self, number: int, node: fx.Node) -> None:
        reading = self._reading
        value = _argument(node, 0, "x")
        stream = self._stream(number, node)
        op = self._producer[self._numbers[value]] if isinstance(value, fx.Node) else BEGINNING
        reading.records[number] = EventRecord(number, stream, op, len(reading.ops) - 1)
        if op != BEGINNING:
            self._marks[op].append(number)
        if self._expects_record is not None:
            self._expects_record.positional_stream = stream
            self._expects_record = None
        reading.lowered = True

    def _stream(self, number: int, node: fx.Node) -> int:
        stream = _argument(node, 1, "stream_id")
        if isinstance(stream, RankConstant):
            stream = self._constants.get(stream.name)
        if type(stream) is int:
            return stream
        self._reading.conflicts.append((number, [None], [number]))
        return MAIN_STREAM

    def _settle(self, op: IssuedOp, marks: list[int]) -> None:
        """Determine by data flow where an op runs and what it waits for, once all its records are known."""
        reading = self._reading
        op.after = tuple(dict.fromkeys(reading.records[record].op for record, _ in tokens_of(reading, op)))
        streams = [reading.waits[gate].stream for gate in op.gates] + [reading.records[m].stream for m in marks]
        if op is reading.output:  # it is read there, whatever waits say
            streams.insert(0, MAIN_STREAM)
        if streams:
            op.stream = streams[0]
        named: list[int | None] = list(dict.fromkeys(streams))
        if len(named) > 1:
            reading.conflicts.append((op.number, named, [*op.gates, *marks]))


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


__all__ = ["is_lowered", "lowered_ranks", "reading_of"]
