"""Streams of host IR: where the ops of a graph run and what they wait for, determined by the current stream at each op.

Ops run on the current stream. At the beginning this is the caller's, number 0; worker i is number i + 1. `synchronize`
makes the current stream wait for everything queued on another stream so far. A communication begins after the ops queued on
the current stream, runs after earlier communications of its team on a separate stream (with a number below 0), and is
complete for the streams that wait for it. These dependencies hold for all ops queued later, and also through other streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.checks.memory.storage import GraphMemory, memory_of
from tcverify.checks.streams.reading import BEGINNING, IssuedOp, StreamReading
from tcverify.errors import ProgramError
from tcverify.ops import RECORD, WAIT, Layout, Op, lookup, schema_of
from tcverify.ops.dialects.host_ir import COMMUNICATION_WAIT, CURRENT_STREAM, SET_STREAM, STREAM, SYNCHRONIZE
from tcverify.program import RankConstant
from tcverify.program.graph import constant_value
from tcverify.program.stream_options import MAIN_STREAM

_TO_A_PEER = ("host_ir::send", "host_ir::recv")


def reads_rank(graph: fx.Graph) -> bool:
    """Whether teams of a graph depend on the rank, and not on arguments alone."""
    return any(node.op == "call_function" and lookup(node.target).name in _TO_A_PEER for node in graph.nodes)


def find_mixed_anchors(graph: fx.Graph) -> tuple[str, str] | None:
    """The first anchor and the first op of host IR in a graph that has both, by name."""
    anchor = host = ""
    for node in graph.nodes:
        name = lookup(node.target).name if node.op == "call_function" else ""
        anchor = anchor or (node.name if name in (WAIT, RECORD) else "")
        host = host or (node.name if name.startswith("host_ir::") else "")
    return (anchor, host) if anchor and host else None


def read_host_ir(graph: fx.Graph, constants: Mapping[str, Any], rank: int) -> StreamReading:
    """Read a graph of host IR in issue order. Linear in the graph (times streams)."""
    return _Reader(graph, constants, rank).read()


class _Reader:
    def __init__(self, graph: fx.Graph, constants: Mapping[str, Any], rank: int) -> None:
        self._graph = graph
        self._constants = constants
        self._rank = rank
        self._memory: GraphMemory = memory_of(graph, constants)
        self._unknown = set(self._memory.unknown)
        self._reading = StreamReading(lowered=True, host=True)
        self._numbers: dict[fx.Node, int] = {}
        self._current = MAIN_STREAM
        self._tokens: dict[fx.Node, int] = {}  # node of a stream -> the stream
        self._last: dict[int, int] = {MAIN_STREAM: BEGINNING}  # stream -> the last op that is queued on it
        self._pending: dict[int, dict[int, int]] = {}  # stream -> dependencies of its next op: by stream, its last op
        self._bound_by: dict[
            tuple[int, int], int
        ] = {}  # stream, one that it waits for -> number of the node responsible
        self._posted: dict[fx.Node, int] = {}  # communication -> its op
        self._arriving: dict[int, dict[int, int]] = {}  # storage -> stream of a team -> its last one into it
        self._teams: dict[tuple[int, ...], int] = {}
        self._resharded: dict[tuple[int, ...], int] = {}  # ranks -> the last op that reshards among them

    def read(self) -> StreamReading:
        reading = self._reading
        for number, node in enumerate(self._graph.nodes):
            self._numbers[node] = number
            reading.names.append(node.name)
            if node.op in ("placeholder", "get_attr"):
                for storage in self._memory.holds[number]:
                    reading.inputs.setdefault(storage, node.name)
            elif node.op == "output":
                reading.output = self._issued(number, node, None)
                reading.output.after = self._take(MAIN_STREAM)
                reading.output.stream = reading.output.queued_on = MAIN_STREAM
                reading.schedule = node.meta.get("schedule")
                reading.left_on = self._current
            else:
                self._call(number, node, lookup(node.target) if node.op == "call_function" else None)
        for op in (*reading.ops, *([] if reading.output is None else [reading.output])):
            op.positional_stream, op.positional_after = op.stream, op.after
        reading.unknown = self._memory.unknown
        return reading

    def _call(self, number: int, node: fx.Node, op: Op | None) -> None:
        name = op.name if op is not None else ""
        if name in (STREAM, CURRENT_STREAM):
            self._tokens[node] = self._current if name == CURRENT_STREAM else self._worker(number, node)
        elif name in (SET_STREAM, SYNCHRONIZE):
            stream = self._stream(number, node)
            if name == SET_STREAM:
                self._current = stream
                self._reading.switches.append(number)
            elif stream != self._current:
                self._await(self._behind(stream), number)
        elif name == COMMUNICATION_WAIT:
            self._land(number, node)
        elif op is not None and op.phase == "start" and name.startswith("host_ir::"):
            self._communicate(number, node, op)
        elif self._works(number, node, op):
            issued = self._issued(number, node, op)
            issued.after = (*self._take(self._current), *self._earlier(node, issued))
            self._last[self._current] = len(self._reading.ops)
            self._reading.ops.append(issued)

    def _earlier(self, node: fx.Node, issued: IssuedOp) -> tuple[int, ...]:
        """The op before a `set` or `reduce` among the same ranks: before lowering, these keep their order, as those of a team
        do."""
        if not issued.op.startswith("multidevice::"):
            return ()
        given = self._given(node)
        try:
            meshes = [Layout.parse(given[name]).mesh for name in ("source", "target")]
        except (ProgramError, KeyError):
            return ()
        ranks = tuple(dict.fromkeys(rank for mesh in meshes for rank in mesh.ranks))
        before = self._resharded.get(ranks)
        self._resharded[ranks] = len(self._reading.ops)
        return () if before is None else (before,)

    def _works(self, number: int, node: fx.Node, op: Op | None) -> bool:
        """Whether a call does more than return its argument."""
        memory = self._memory
        if memory.writes[number] or number in self._unknown or (op is not None and op.effect):
            return True
        given = {storage for operand in node.all_input_nodes for storage in memory.holds[self._numbers[operand]]}
        return not given.issuperset(memory.holds[number])

    def _issued(self, number: int, node: fx.Node, op: Op | None) -> IssuedOp:
        touches = self._memory.touches[number]
        reads = {touch.storage: touch.through for touch in touches if not touch.writes}
        writes = [touch.storage for touch in touches if touch.writes]
        here = self._current
        return IssuedOp.of(number, node, op, reads, writes, stream=here, queued_on=here, touches=touches)

    # ------------------------------------------------------------------------------------------------- communications

    def _communicate(self, number: int, node: fx.Node, op: Op) -> None:
        reading = self._reading
        issued = self._issued(number, node, op)
        index = len(reading.ops)
        issued.stream = self._stream_of_team(node)
        behind = self._behind(self._current)
        issued.after = tuple(behind.values())
        reading.bound += [(op, index, number) for op in behind.values()]
        reading.ops.append(issued)
        self._last[issued.stream] = index
        self._posted[node] = index
        for storage in self._memory.holds[number]:
            self._arriving.setdefault(storage, {})[issued.stream] = index

    def _stream_of_team(self, node: fx.Node) -> int:
        """The stream on which the communications of a team run. Messages to a peer belong to a team of two."""
        given = self._given(node)
        peer, team = given.get("peer"), given.get("team")
        if isinstance(peer, int):
            sends = lookup(node.target).name == "host_ir::send"
            team = (self._rank, peer) if sends else (peer, self._rank)
        key = tuple(team) if isinstance(team, (list, tuple)) else ()
        if key not in self._teams:
            self._teams[key] = -1 - len(self._teams)
            self._reading.teams[self._teams[key]] = key
        return self._teams[key]

    def _land(self, number: int, node: fx.Node) -> None:
        """Make the current stream wait for the communication whose result it gets; for any other value, for all
        communications that write into its storage."""
        communication = self._given(node).get("communication")
        if not isinstance(communication, fx.Node):
            return
        made = self._posted.get(communication)
        awaited: dict[int, int] = {}
        if made is not None:
            awaited[self._reading.ops[made].stream] = made
        else:
            for storage in self._memory.holds[self._numbers[communication]]:
                awaited.update(self._arriving.get(storage, {}))
        for index in awaited.values():
            self._reading.landed.setdefault(index, (number, self._current))
        self._await(awaited, number)

    # -------------------------------------------------------------------------------------------------------- streams

    def _behind(self, stream: int) -> dict[int, int]:
        """The last op queued on a stream so far, and its dependencies: by stream, its last op."""
        found = dict(self._pending.get(stream, {}))
        if stream in self._last:
            found[stream] = self._last[stream]
        return found

    def _await(self, ops: Mapping[int, int], number: int) -> None:
        """Add a dependency of ops that will be queued on the current stream, as declared by a node."""
        pending = self._pending.setdefault(self._current, {})
        for stream, op in ops.items():
            if stream != self._current and (stream not in pending or pending[stream] < op):
                pending[stream] = op
                self._bound_by[self._current, stream] = number

    def _take(self, stream: int) -> tuple[int, ...]:
        """The dependencies of the next op of a stream, which later ops inherit."""
        pending = self._pending.pop(stream, {})
        next_op = len(self._reading.ops)
        self._reading.bound += [(op, next_op, self._bound_by[stream, other]) for other, op in pending.items()]
        return tuple(pending.values())

    def _worker(self, number: int, node: fx.Node) -> int:
        index = self._given(node).get("index")
        if type(index) is not int:
            self._reading.conflicts.append((number, [None], [number]))
            return MAIN_STREAM
        self._reading.workers[number] = index
        return max(index + 1, MAIN_STREAM)

    def _stream(self, number: int, node: fx.Node) -> int:
        stream = self._tokens.get(self._given(node).get("stream"))  # type: ignore[arg-type]
        if stream is None:
            self._reading.conflicts.append((number, [None], [number]))
            return MAIN_STREAM
        return stream

    def _given(self, node: fx.Node) -> dict[str, Any]:
        """Arguments by name; nodes are kept."""
        schema = schema_of(node.target)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return {name: self._known(value) for name, value in given.items()}

    def _known(self, value: Any) -> Any:
        if isinstance(value, RankConstant) and value.name in self._constants:
            return constant_value(value, self._constants)
        if isinstance(value, (list, tuple)):
            return [self._known(item) for item in value]
        return value


__all__ = ["find_mixed_anchors", "read_host_ir", "reads_rank"]
