"""Readings: what one rank's graph does on streams, as data. Created by `anchors`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tcverify.checks.memory.storage import Touch
from tcverify.ops import Op
from tcverify.ops.op import Phase
from tcverify.program.stream_options import MAIN_STREAM

#: Largest number of ranks that the name of a team's stream lists.
_SHOWN = 4

#: Represents, among dependencies of an op, the beginning of the graph, before every op.
BEGINNING = -1


@dataclass(slots=True)
class IssuedOp:
    """A work op, or the output node, as the host issues it.

    Ops are named by their index in `StreamReading.ops`; nodes by their number in graph order.

    Attributes:
        number, name, op: the node, and its op by qualified name.
        resources: what it occupies: "compute", "comm" or both.
        collective: whether it communicates.
        cost_s: its duration in seconds, None if the node has no cost.
        stream, after: by data flow, the stream it runs on and the ops whose tokens it waits for.
        positional_stream, positional_after: the same by position.
        reads: (storage, node through which it reads it, skipping anchors).
        writes: storages, of earlier values and of its own results.
        gates: the waits that are its direct operands.
        phase: "start" of an asynchronous collective, "wait" for it, or None.
        queued_on: in host IR, the current stream when the host issues it; a communication is only posted
            there.
        touches: in host IR, its accesses to parts of storages.
    """

    number: int
    name: str
    op: str
    resources: tuple[str, ...]
    collective: bool
    cost_s: float | None
    reads: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    gates: tuple[int, ...] = ()
    stream: int = MAIN_STREAM
    after: tuple[int, ...] = ()
    positional_stream: int = MAIN_STREAM
    positional_after: tuple[int, ...] = ()
    phase: Phase | None = None
    queued_on: int = MAIN_STREAM
    touches: tuple[Touch, ...] = ()

    @classmethod
    def of(
        cls, number: int, node: fx.Node, op: Op | None, reads: Mapping[int, int], writes: Iterable[int], **more: Any
    ) -> IssuedOp:
        """Return what a node issues, each storage that it writes once. An unknown op counts as compute."""
        return cls(
            number,
            node.name,
            op.name if op is not None else f"{node.op}::{node.target}",
            op.resources if op is not None else ("compute",),
            op.collective if op is not None else False,
            parse_seconds(node.meta.get("cost_s")),
            reads=tuple(reads.items()),
            writes=tuple(dict.fromkeys(writes)),
            phase=op.phase if op is not None else None,
            **more,
        )


@dataclass(slots=True)
class EventRecord:
    """A record: its stream, and the op that its token completes, by data flow and by position."""

    number: int
    stream: int
    op: int
    positional_op: int


@dataclass(slots=True)
class EventWait:
    """A wait: its stream, the records (by node number) whose tokens it names, and the wait whose result it gates, if any."""

    number: int
    stream: int
    records: tuple[int, ...]
    inner: int | None


@dataclass(slots=True)
class StreamReading:
    """What one rank's graph does on streams. Contains no nodes, so that it can be cached as long as the graph lives.

    Attributes:
        names: of all nodes, in graph order.
        ops: the work ops, in issue order.
        output: the output node as a reader.
        inputs: storage → name of the input that it belongs to.
        conflicts: (node number, the streams that its anchors name, the anchors); a stream is None if it is not a number.
        stale: (op, wait, writer), as node numbers: the op reads the wait's result, and in between the writer has written into
            what the wait gates.
        unknown: nodes whose reads and writes are unknown.
        schedule: what the output node declares, of any type.
        lowered: whether the graph has anchors, or is host IR.
        host: whether it is host IR, and has no anchors.
        mixed: an anchor and an op of host IR, if the graph has both.
        teams: in host IR, stream of a team's communications → the team.
        workers: in host IR, node number of a `stream` → the index that it names.
        landed: in host IR, communication (an op) → node number of the first wait for it, and the stream that waits.
        switches: in host IR, the node numbers of `set_current_stream`.
        left_on: in host IR, the current stream at the end.
        bound: in host IR, (an op, another op that waits for it, the node that makes it wait); ops by index, where the output
            is one past the last, the node by number.
    """

    names: list[str] = field(default_factory=list)
    ops: list[IssuedOp] = field(default_factory=list)
    output: IssuedOp | None = None
    records: dict[int, EventRecord] = field(default_factory=dict)
    waits: dict[int, EventWait] = field(default_factory=dict)
    inputs: dict[int, str] = field(default_factory=dict)
    conflicts: list[tuple[int, list[int | None], list[int]]] = field(default_factory=list)
    stale: list[tuple[int, int, int]] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    schedule: Any = None
    lowered: bool = False
    host: bool = False
    mixed: tuple[str, str] | None = None
    teams: dict[int, tuple[int, ...]] = field(default_factory=dict)
    workers: dict[int, int] = field(default_factory=dict)
    landed: dict[int, tuple[int, int]] = field(default_factory=dict)
    switches: list[int] = field(default_factory=list)
    left_on: int = MAIN_STREAM
    bound: list[tuple[int, int, int]] = field(default_factory=list)

    def lane(self, stream: int) -> str:
        """A short name of a stream: a number, or in host IR its owner."""
        if not self.host:
            return f"stream {stream}"
        team = self.teams.get(stream)
        if team is not None:
            return f"team {list(team)}" if len(team) <= _SHOWN else f"team [{team[0]}, {team[1]}, …, {team[-1]}]"
        return "caller" if stream == MAIN_STREAM else f"worker {stream - 1}"

    @property
    def asynchronous(self) -> bool:
        """Whether times follow the model of asynchronous collectives: the graph has some, and no anchors, which say more."""
        return not self.lowered and any(op.phase == "start" for op in self.ops)


def tokens_of(reading: StreamReading, op: IssuedOp) -> list[tuple[int, int]]:
    """Return (record, wait that names it) for every token that orders an op by data flow, by their node numbers."""
    found: dict[tuple[int, int], None] = {}
    for gate in op.gates:
        at: int | None = gate
        while at is not None:
            waiting = reading.waits[at]
            found.update(dict.fromkeys((record, waiting.number) for record in waiting.records))
            at = waiting.inner
    return list(found)


def parse_seconds(value: Any) -> float | None:
    """Return a time from metadata, None if it is not a finite, non-negative number in range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        time = float(value)
    except OverflowError:  # an integer too large for a float
        return None
    return time if math.isfinite(time) and time >= 0 else None


__all__ = ["BEGINNING", "EventRecord", "EventWait", "IssuedOp", "StreamReading", "parse_seconds", "tokens_of"]
