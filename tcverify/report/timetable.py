"""When the ops of a lowered or asynchronous program run, before and after the pass: for the terminal, the page and the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tcverify.cases.counterexample import Counterexample
from tcverify.checks.streams.anchors import is_lowered, reading_of
from tcverify.checks.streams.reading import parse_seconds
from tcverify.checks.streams.replay import COMMUNICATION, Arrow, ReplayedOp, Stall, replay_streams
from tcverify.cost import MIN_COST_S
from tcverify.program import Program
from tcverify.program.finding import Finding
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.report.sanitize import plural

#: Number of different costs, and of names with one cost, that a line lists.
MOST_COSTS = 4


@dataclass(frozen=True, slots=True)
class ScheduledOp:
    """One op. Times are seconds from the beginning, or steps of one op each if some op has no cost.

    Attributes:
        issued: of asynchronous communication, when it begins to queue.
    """

    node: str
    op: str
    stream: int
    resources: tuple[str, ...]
    start: float
    end: float
    issued: float | None = None


@dataclass(frozen=True, slots=True)
class Timetable:
    """The schedule of one rank.

    Attributes:
        ops: in issue order.
        arrows: from records to the waits that name their tokens.
        output: name of the output node.
        join: when the output can be read: after everything on stream 0 and after what its waits name.
        lowered: whether the graph has anchors.
        timed: whether times are seconds.
        roles: stream → its purpose, in words.
        declared, replayed, serial, critical_path, exposed: seconds, if known.
        asynchronous: whether communication overlaps with compute without streams, as stream `COMMUNICATION`.
        stalls: of an asynchronous graph, when compute waits for communication.
        lanes: of host IR, names of streams.
    """

    ops: tuple[ScheduledOp, ...]
    arrows: tuple[Arrow, ...]
    output: str
    join: float
    lowered: bool
    timed: bool
    roles: Mapping[int, str]
    declared: float | None = None
    replayed: float | None = None
    serial: float | None = None
    critical_path: float | None = None
    exposed: float | None = None
    asynchronous: bool = False
    stalls: tuple[Stall, ...] = ()
    lanes: Mapping[int, str] = field(default_factory=dict)

    def lane(self, stream: int) -> tuple[str, str]:
        """The name of a stream, and its role, "" if the name says it."""
        if self.asynchronous:
            return ("comm" if stream == COMMUNICATION else "compute"), ""
        if self.lanes:
            return self.lanes.get(stream, "caller"), ""
        return f"stream {stream}", self.roles.get(stream, "")

    @property
    def end(self) -> float:
        """When the last op ends."""
        return max((op.end for op in self.ops), default=0.0)

    @property
    def streams(self) -> tuple[int, ...]:
        """Streams of teams, which have numbers below 0, come last."""
        return tuple(
            sorted({MAIN_STREAM, *(op.stream for op in self.ops)}, key=lambda stream: (stream < 0, abs(stream)))
        )


def lowered_ranks(case: Counterexample) -> list[int]:
    """The ranks whose rewritten graph has anchors."""
    program = case.rewritten
    if program is None:
        return []
    lowered = [is_lowered(graph) for graph in program.graphs]
    return [rank for rank, binding in enumerate(program.ranks) if lowered[binding.graph]]


def timed_ranks(case: Counterexample) -> list[int]:
    """The ranks with a schedule: the rewritten graph has anchors, or asynchronous collectives and all costs."""
    program = case.rewritten
    if program is None:
        return []
    told: dict[int, bool] = {}
    for rank, binding in enumerate(program.ranks):
        if binding.graph not in told:
            lowered = is_lowered(program.graphs[binding.graph])
            told[binding.graph] = lowered or _asynchronous(program, rank) is not None
    return [rank for rank, binding in enumerate(program.ranks) if told[binding.graph]]


def _asynchronous(program: Program, rank: int) -> Timetable | None:
    """When a rank with asynchronous collectives runs its ops, if all of them have costs."""
    if not reading_of(program, rank).asynchronous:
        return None
    found = timetable(program, rank)
    return found if found.timed else None


def timetables(case: Counterexample, rank: int) -> tuple[Timetable | None, Timetable] | None:
    """Return when a rank runs its ops before and after the pass, or None if its rewritten graph has no streams and no
    asynchronous collectives with costs.

    Before the pass, an op takes its own cost, but at least the minimum duration of a schedule; without a cost, the time of the op
    of the same name after the pass. If that is missing too, there are no times before the pass.
    """
    rewritten = case.rewritten
    if rewritten is None:
        return None
    if not is_lowered(rewritten.graphs[rewritten.ranks[rank].graph]):
        beside = _asynchronous(rewritten, rank)
        if beside is None:
            return None
        then = timetable(case.program, rank)
        return (then if then.timed else None), beside
    after = timetable(rewritten, rank)
    costs = {op.node: op.end - op.start for op in after.ops} if after.timed else {}
    graph = case.program.graphs[case.program.ranks[rank].graph]
    given = {node.name: parse_seconds(node.meta.get("cost_s")) for node in graph.nodes}
    costs |= {name: max(MIN_COST_S, cost) for name, cost in given.items() if cost is not None}
    before = timetable(case.program, rank, costs)
    return (before if before.timed == after.timed else None), after


def timetable(program: Program, rank: int, costs: Mapping[str, float] | None = None) -> Timetable:
    """Return when `rank` runs its ops.

    Args:
        costs: seconds by node, which override those of a graph without anchors if they cover all its ops.
    """
    found = replay_streams(program, rank)
    ops = [op for op in map(_timed, found.ops) if op is not None]
    timed = len(ops) == len(found.ops)
    if not found.lowered and not found.asynchronous and costs is not None and all(op.node in costs for op in found.ops):
        ops, timed = _in_steps(found.ops, found.arrows, [costs[op.node] for op in found.ops]), True
    elif not timed:
        ops = _in_steps(found.ops, found.arrows, [1.0] * len(found.ops))
    output = next(node for node in program.graphs[program.ranks[rank].graph].nodes if node.op == "output")
    ends = {op.node: op.end for op in ops}
    join = [op.end for op in ops if op.stream == MAIN_STREAM]
    join += [ends[arrow.source] for arrow in found.arrows if arrow.target == output.name and arrow.source in ends]
    return Timetable(
        ops=tuple(ops),
        arrows=found.arrows,
        output=output.name,
        join=max(join, default=0.0),
        lowered=found.lowered,
        timed=timed,
        roles=_roles(program, ops) if found.lowered else {MAIN_STREAM: "sequential"},
        declared=_declared(output.meta.get("schedule")),
        replayed=found.makespan_s,
        serial=found.serial_s,
        critical_path=found.critical_path_s,
        exposed=found.exposed_s,
        asynchronous=found.asynchronous,
        stalls=found.stalls,
        lanes=found.lanes,
    )


def _timed(op: ReplayedOp) -> ScheduledOp | None:
    if op.start_s is None or op.end_s is None or not math.isfinite(op.end_s):
        return None
    return ScheduledOp(op.node, op.op, op.stream, op.resources, op.start_s, op.end_s, op.issued_s)


def _in_steps(ops: tuple[ReplayedOp, ...], arrows: tuple[Arrow, ...], lengths: list[float]) -> list[ScheduledOp]:
    """Each op as early as its stream, its resources and its tokens allow, with made-up durations."""
    sources: dict[str, list[str]] = {}
    for arrow in arrows:
        sources.setdefault(arrow.target, []).append(arrow.source)
    free: dict[int | str, float] = {}
    ends: dict[str, float] = {}
    found = []
    for op, length in zip(ops, lengths, strict=True):
        needs: tuple[int | str, ...] = (op.stream, *op.resources)
        ready = [ends.get(source, 0.0) for source in sources.get(op.node, ())]
        start = max((*(free.get(need, 0.0) for need in needs), *ready), default=0.0)
        ends[op.node] = start + length
        free.update(dict.fromkeys(needs, start + length))
        found.append(ScheduledOp(op.node, op.op, op.stream, op.resources, start, start + length))
    return found


def _roles(program: Program, ops: list[ScheduledOp]) -> dict[int, str]:
    """The purpose of streams: as declared by the program, else by the ops that run on them."""
    if program.streams is not None:
        roles = dict.fromkeys(program.streams.compute, "compute")
        for stream in program.streams.comm:
            roles[stream] = "compute, comm" if stream in roles else "comm"
        return roles
    used: dict[int, set[str]] = {}
    for op in ops:
        used.setdefault(op.stream, set()).update(op.resources)
    return {stream: ", ".join(sorted(resources, reverse=True)) for stream, resources in used.items()}


def _declared(schedule: Any) -> float | None:
    found = schedule.get("makespan_s") if isinstance(schedule, dict) else None
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


# ------------------------------------------------------------------------------------------------------------- in words


def microseconds(time_s: float) -> str:
    """Six significant digits, in µs."""
    return f"{time_s * 1e6:.6g} µs"


def time_facts(table: Timetable) -> list[tuple[str, str]]:
    """Return (what, how long) for a lowered graph: makespan, serial, critical path, exposed communication.

    The makespan is given as predicted and as replayed if these differ, with all digits if they look equal.
    """
    if table.replayed is None or table.serial is None or table.critical_path is None:
        return []
    show = microseconds
    if table.declared is not None and table.declared != table.replayed and show(table.declared) == show(table.replayed):

        def show(time_s: float) -> str:
            return f"{time_s!r} s"

    if table.declared is None:
        facts = [("makespan", show(table.replayed))]
    elif table.declared == table.replayed:
        facts = [("makespan", f"{show(table.replayed)} as predicted")]
    else:
        facts = [("predicted", show(table.declared)), ("replayed", show(table.replayed))]
    facts.append(("serial", microseconds(table.serial)))
    facts.append(("critical path", microseconds(table.critical_path)))
    if table.exposed is not None:
        facts.append(("exposed communication", microseconds(table.exposed)))
    return facts


def time_line(table: Timetable) -> str:
    """One line about the streams and times of a lowered graph; "" if some op has no cost."""
    streams = f"on {plural(len({op.stream for op in table.ops}), 'stream')}"
    if table.asynchronous:
        streams = f"{sum(op.stream == COMMUNICATION for op in table.ops)} of them asynchronous"
    facts = time_facts(table)
    if not facts:
        return ""
    return f"{plural(len(table.ops), 'op')}{',' if table.asynchronous else ''} {streams}; " + ", ".join(
        f"{what} {time}" for what, time in facts
    )


def given_line(program: Program, rank: int) -> str:
    """One line about a program's settings of time: costs of a rank's ops, streams, overhead and device; "" if none."""
    costs: dict[float, list[str]] = {}
    for node in program.graphs[program.ranks[rank].graph].nodes:
        cost = parse_seconds(node.meta.get("cost_s"))
        if cost is not None:
            costs.setdefault(cost, []).append(node.name)
    facts = []
    if len(costs) == 1:
        facts.append(f"{microseconds(next(iter(costs)))} for each op")
    elif costs:
        facts += [f"{microseconds(cost)} for {_some(names)}" for cost, names in list(costs.items())[:MOST_COSTS]]
        if len(costs) > MOST_COSTS:
            facts.append(f"{len(costs) - MOST_COSTS} other costs")
    streams = program.streams
    if streams is not None:
        where = [
            f"{role} on {_ids(ids)}" for role, ids in (("compute", streams.compute), ("communication", streams.comm))
        ]
        facts.append(", ".join(where))
        facts.append(f"synchronisation takes {microseconds(streams.sync_overhead_s)}")
        if streams.device is not None:
            facts.append(f"device {streams.device}")
    return "; ".join(facts)


def _some(names: list[str]) -> str:
    shown = names[:MOST_COSTS] if len(names) <= MOST_COSTS else [*names[:MOST_COSTS], f"{len(names) - MOST_COSTS} more"]
    return _joined([f"'{name}'" if i < MOST_COSTS else name for i, name in enumerate(shown)])


def _ids(streams: tuple[int, ...]) -> str:
    return f"{'stream' if len(streams) == 1 else 'streams'} {_joined([str(i) for i in streams])}"


def _joined(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def marked_ops(finding: Finding) -> dict[str, str]:
    """The ops that a finding is about, with their labels: "first" and "second" for a race."""
    marks: dict[str, str] = {}
    for key in ("first", "second"):
        name = finding.data.get(key)
        if isinstance(name, str):
            marks[name] = key
    if finding.node is not None:
        marks.setdefault(finding.node, "finding")
    return marks


__all__ = [
    "ScheduledOp",
    "Timetable",
    "given_line",
    "lowered_ranks",
    "marked_ops",
    "microseconds",
    "time_facts",
    "time_line",
    "timed_ranks",
    "timetable",
    "timetables",
]
