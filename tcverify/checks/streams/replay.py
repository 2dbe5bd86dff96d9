"""Replay: when every op of a rank runs, by the time model of streams.

Ops go in issue order. An op starts when its stream is free, when its resources (compute, comm: one of each) are free, and
when every op that it waits for has ended, plus the synchronisation overhead where that op ran on another stream. Graphs without
streams whose collectives are asynchronous run as `compute_timeline` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tcverify.checks.streams.anchors import reading_of
from tcverify.checks.streams.reading import BEGINNING, IssuedOp, StreamReading, parse_seconds, tokens_of
from tcverify.checks.streams.timeline import Stall, compute_timeline
from tcverify.program import Program


@dataclass(frozen=True, slots=True)
class ReplayedOp:
    """When an op runs.

    Attributes:
        node, op: the node's name and the op's qualified name.
        stream: where it runs; without anchors 0, or `COMMUNICATION` for the transfers of asynchronous collectives.
        resources: what it occupies: "compute", "comm" or both.
        start_s, end_s: seconds from the beginning; None if some op of the graph has no cost.
        issued_s: of asynchronous communication, when it begins to queue; None for everything else.
    """

    node: str
    op: str
    stream: int
    resources: tuple[str, ...]
    start_s: float | None
    end_s: float | None
    issued_s: float | None = None


#: The number of the stream for asynchronous communication, in graphs without anchors.
COMMUNICATION = 1


@dataclass(frozen=True, slots=True)
class Arrow:
    """A dependency through a token: from the op that a record completes to an op that waits for it.

    Attributes:
        record, wait: the anchors' names; `wait` is the one that names the token. In host IR, which has no records, "" and the
            name of the node that makes the target wait.
        source, target: the ops' names; the target may be the output node.
    """

    record: str
    wait: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class StreamReplay:
    """One rank's graph on its streams.

    Attributes:
        lowered: whether the graph has anchors; if not, all ops run on stream 0, one after the other.
        ops: in issue order. Of asynchronous graphs, without waits.
        arrows: in issue order of their targets.
        overhead_s: of synchronisation between streams.
        makespan_s: when the last op ends. This and the times below are None if some op has no cost.
        serial_s: the sum of all costs, added in issue order.
        critical_path_s: longest path over data and mutations, and over communicating ops in their order, without overhead.
        exposed_s: time during which communication is in flight and nothing computes.
        asynchronous: whether collectives overlap with compute from their start to their wait.
        stalls: of an asynchronous graph, when compute waits for communication.
        lanes: of host IR, the names of streams.
    """

    lowered: bool
    ops: tuple[ReplayedOp, ...]
    arrows: tuple[Arrow, ...]
    overhead_s: float
    makespan_s: float | None
    serial_s: float | None
    critical_path_s: float | None
    exposed_s: float | None
    asynchronous: bool = False
    stalls: tuple[Stall, ...] = ()
    lanes: Mapping[int, str] = field(default_factory=dict)


def replay_streams(program: Program, rank: int, *, least_cost_s: float = 0.0) -> StreamReplay:
    """Replay the graph of one rank, lowered or not. Linear in the graph; raises nothing.

    Args:
        least_cost_s: minimum duration of an op, whatever its node says. Not used for asynchronous graphs.
    """
    return replay_reading(reading_of(program, rank), program, least_cost_s=least_cost_s)


def replay_reading(reading: StreamReading, program: Program, *, least_cost_s: float = 0.0) -> StreamReplay:
    """Replay one reading of a graph of `program`; see `replay_streams`."""
    if reading.asynchronous:
        return _asynchronous(reading)
    ops, overhead = reading.ops, sync_overhead_s(program, reading)
    costs = [max(op.cost_s, least_cost_s) for op in ops if op.cost_s is not None]
    if len(costs) < len(ops):
        untimed = tuple(ReplayedOp(op.name, op.op, op.stream, op.resources, None, None) for op in ops)
        return StreamReplay(
            reading.lowered, untimed, _arrows(reading), overhead, None, None, None, None, lanes=_lanes(reading)
        )
    ends = _ends(ops, costs, overhead)
    timed = tuple(
        ReplayedOp(op.name, op.op, op.stream, op.resources, start, end)
        for op, (start, end) in zip(ops, ends, strict=True)
    )
    serial = 0.0
    for cost in costs:  # not sum(): it compensates for rounding in newer Pythons
        serial += cost
    makespan = max((end for _, end in ends), default=0.0)
    return StreamReplay(
        reading.lowered,
        timed,
        _arrows(reading),
        overhead,
        makespan,
        serial,
        _critical_path(ops, costs),
        _exposed(timed),
        lanes=_lanes(reading),
    )


def _lanes(reading: StreamReading) -> dict[int, str]:
    return {op.stream: reading.lane(op.stream) for op in reading.ops} if reading.host else {}


def _asynchronous(reading: StreamReading) -> StreamReplay:
    """Waits and frees take no time, whatever their nodes say."""
    ops = reading.ops
    work = [op for op in ops if op.phase != "wait"]
    lanes = [COMMUNICATION if op.phase == "start" else 0 for op in work]
    known = [op.cost_s if op.phase != "wait" and op.resources else 0.0 for op in ops]
    costs = [cost for cost in known if cost is not None]
    if len(costs) < len(ops):
        untimed = tuple(
            ReplayedOp(op.name, op.op, lane, op.resources, None, None) for op, lane in zip(work, lanes, strict=True)
        )
        return StreamReplay(False, untimed, (), 0.0, None, None, None, None, asynchronous=True)
    found = compute_timeline(ops, costs, reading.output.name if reading.output is not None else "output")
    spans = [span for op, span in zip(ops, found.spans, strict=True) if op.phase != "wait"]
    timed = tuple(
        ReplayedOp(op.name, op.op, lane, op.resources, span.start, span.end, span.issued if lane else None)
        for op, lane, span in zip(work, lanes, spans, strict=True)
    )
    serial = 0.0
    for cost in costs:
        serial += cost
    path = _critical_path(ops, costs)
    return StreamReplay(False, timed, (), 0.0, found.makespan_s, serial, path, found.exposed_s, True, found.stalls)


def sync_overhead_s(program: Program, reading: StreamReading) -> float:
    """Seconds between ops of different streams: as the program says, else as the graph declares, else 0."""
    if program.streams is not None:
        return program.streams.sync_overhead_s
    declared: Any = reading.schedule.get("sync_overhead_s") if isinstance(reading.schedule, dict) else None
    return parse_seconds(declared) or 0.0


def _ends(ops: list[IssuedOp], costs: list[float], overhead: float) -> list[tuple[float, float]]:
    """Start and end of every op."""
    streams: dict[int, float] = {}
    resources: dict[str, float] = {}
    found: list[tuple[float, float]] = []
    for op, cost in zip(ops, costs, strict=True):
        start = streams.get(op.stream, 0.0)
        for resource in op.resources:
            start = max(start, resources.get(resource, 0.0))
        for earlier in op.after:
            if 0 <= earlier < len(found):
                ready = found[earlier][1]
                start = max(start, ready + overhead if ops[earlier].stream != op.stream else ready)
        end = start + cost
        streams[op.stream] = end
        for resource in op.resources:
            resources[resource] = end
        found.append((start, end))
    return found


def _critical_path(ops: list[IssuedOp], costs: list[float]) -> float:
    written: dict[int, float] = {}  # storage -> when its last write is complete
    read: dict[int, float] = {}  # storage -> when all its reads since are
    communication = longest = 0.0
    for op, cost in zip(ops, costs, strict=True):
        start = 0.0
        for storage, _ in op.reads:
            start = max(start, written.get(storage, 0.0))
        for storage in op.writes:
            start = max(start, written.get(storage, 0.0), read.get(storage, 0.0))
        if "comm" in op.resources:
            start = max(start, communication)
        end = start + cost
        if "comm" in op.resources:
            communication = end
        for storage, _ in op.reads:
            read[storage] = max(read.get(storage, 0.0), end)
        for storage in op.writes:
            written[storage] = end
            read.pop(storage, None)
        longest = max(longest, end)
    return longest


def _exposed(ops: tuple[ReplayedOp, ...]) -> float:
    """Both resources are exclusive, so the spans of one never overlap and are in order."""
    spans = {
        resource: [(op.start_s, op.end_s) for op in ops if resource in op.resources] for resource in ("comm", "compute")
    }
    exposed = 0.0
    compute = iter(spans["compute"])
    busy = next(compute, None)
    for start, end in spans["comm"]:
        if start is None or end is None:
            continue
        free_from = start
        while busy is not None and busy[0] is not None and busy[1] is not None and busy[0] < end:
            exposed += max(0.0, busy[0] - free_from)
            free_from = max(free_from, busy[1])
            if busy[1] > end:
                break
            busy = next(compute, None)
        exposed += max(0.0, end - free_from)
    return exposed


def _arrows(reading: StreamReading) -> tuple[Arrow, ...]:
    found: dict[Arrow, None] = {}
    names = reading.names
    end = [] if reading.output is None else [reading.output]
    issued = [*reading.ops, *end]
    for source, after, by in reading.bound:
        if source != BEGINNING and after < len(issued) and reading.ops[source].stream != issued[after].stream:
            found[Arrow("", names[by], reading.ops[source].name, issued[after].name)] = None
    for target in issued:
        for record, wait in tokens_of(reading, target):
            op = reading.records[record].op
            if op != BEGINNING:
                found[Arrow(names[record], names[wait], reading.ops[op].name, target.name)] = None
    return tuple(found)


__all__ = [
    "COMMUNICATION",
    "Arrow",
    "ReplayedOp",
    "Stall",
    "StreamReplay",
    "replay_reading",
    "replay_streams",
    "sync_overhead_s",
]
