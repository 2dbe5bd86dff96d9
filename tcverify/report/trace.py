"""trace.json: the ops of every rank by stream and time, in the Trace Event Format that Perfetto and chrome://tracing read.

A process per rank, and one for each rank before the pass; a thread per stream; a slice per op; a flow from every record to
every wait that names its token. Asynchronous graphs have a thread for compute and one for communication; stalls of compute are
slices too, with a flow from what they wait for. Times are those of the replay in µs; if some op of a lowered graph has no
cost, every op takes one µs.

Format: "Trace Event Format" (Google), events of phase X (slices), s and f (ends of a flow) and M (names).
"""

from __future__ import annotations

import json
from typing import Any

from tcverify.cases.counterexample import Counterexample
from tcverify.errors import UsageError
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.report.beside import FileReport
from tcverify.report.sanitize import sanitize
from tcverify.report.timetable import Timetable, marked_ops, time_facts, timed_ranks, timetables

TRACE_NAME = "trace.json"

#: Largest number of slices in a trace: ranks beyond it are omitted, in ascending order after the rank of the finding.
MAX_SLICES = 200_000

_MICROSECONDS = 1e6


def to_trace(case: Counterexample) -> str:
    """Return trace.json of a counterexample whose rewritten program has streams, or asynchronous collectives with costs.

    Raises:
        UsageError: it has neither.
    """
    ranks = timed_ranks(case)
    if not ranks:
        raise UsageError(
            f"case {case.id} has no streams to trace: its rewritten graphs have no anchors, "
            "and no asynchronous collectives with costs",
            "traces need a graph that a scheduling pass has lowered, or an asynchronous graph whose ops all have costs",
        )
    if case.finding.rank in ranks:
        ranks = [case.finding.rank, *(rank for rank in ranks if rank != case.finding.rank)]
    events: list[dict[str, Any]] = []
    shown: list[int] = []
    slices = 0
    marks = marked_ops(case.finding)
    for rank in ranks:
        found = timetables(case, rank)
        if found is None:
            continue
        before, after = found
        slices += len(after.ops) + (len(before.ops) if before is not None else 0)
        if shown and slices > MAX_SLICES:
            break
        shown.append(rank)
        # Processes are sorted by index, and identified by number: 2r before, 2r + 1 after the pass.
        if before is not None:
            events += _process(2 * rank, f"rank {rank} before", before, {})
        events += _process(2 * rank + 1, f"rank {rank}", after, marks if case.finding.rank in (None, rank) else {})
    other = {
        "case": case.id,
        "pass": sanitize(case.facts.name),
        "finding": sanitize(f"{case.finding.kind}: {case.finding.title}"),
        "ranks without streams, or omitted": str(case.program.world_size - len(shown)),
    }
    trace = {"displayTimeUnit": "ns", "otherData": other, "traceEvents": events}
    return json.dumps(trace, ensure_ascii=True, separators=(",", ":"), allow_nan=False) + "\n"


def _process(pid: int, name: str, table: Timetable, marks: dict[str, str]) -> list[dict[str, Any]]:
    """The events of one rank: names, then slices by stream and time, then flows."""
    events = [_name("process_name", pid, 0, name=name), _name("process_sort_index", pid, 0, sort_index=pid)]
    told = table.lowered or table.asynchronous
    labels = ", ".join(f"{what} {time}" for what, time in time_facts(table)) if told else ""
    if labels:
        events.append(_name("process_labels", pid, 0, labels=labels))
    for stream in table.streams:
        lane, role = table.lane(stream)
        thread = _thread(stream)
        events.append(_name("thread_name", pid, thread, name=f"{lane} ({role})" if role else lane))
        events.append(_name("thread_sort_index", pid, thread, sort_index=thread))
    scale = _MICROSECONDS if table.timed else 1.0
    for op in sorted(table.ops, key=lambda op: (op.stream, op.start)):
        arguments: dict[str, Any] = {
            "node": sanitize(op.node),
            "op": sanitize(op.op),
            "resources": ", ".join(op.resources),
        }
        if table.timed:
            arguments["cost_us"] = (op.end - op.start) * scale
        if op.issued is not None:
            arguments["issued_us"] = op.issued * scale
        if op.node in marks:
            arguments["finding"] = marks[op.node]
        events.append(
            {
                "ph": "X", "pid": pid, "tid": _thread(op.stream), "ts": op.start * scale, "dur": (op.end - op.start) * scale,
                "name": sanitize(op.node), "cat": "+".join(op.resources), "args": arguments,
            }
        )  # fmt: skip
    if any(arrow.target == table.output for arrow in table.arrows):
        events.append(
            {
                "ph": "X", "pid": pid, "tid": MAIN_STREAM, "ts": table.join * scale, "dur": 0.0,
                "name": sanitize(table.output), "cat": "output", "args": {"node": sanitize(table.output)},
            }
        )  # fmt: skip
    return events + _stalls(pid, table, marks) + _flows(pid, table, scale)


def _stalls(pid: int, table: Timetable, marks: dict[str, str]) -> list[dict[str, Any]]:
    """Periods when compute waits, as slices; each with a flow from what it waits for. Blocking ops have a slice already."""
    events: list[dict[str, Any]] = []
    ops = {op.node: op for op in table.ops}
    for number, stall in enumerate(stall for stall in table.stalls if stall.node != stall.awaited):
        start, length = stall.start_s * _MICROSECONDS, (stall.end_s - stall.start_s) * _MICROSECONDS
        arguments = {"node": sanitize(stall.node), "waits for": sanitize(stall.awaited)}
        if stall.node in marks:
            arguments["finding"] = marks[stall.node]
        events.append(
            {
                "ph": "X", "pid": pid, "tid": MAIN_STREAM, "ts": start, "dur": length,
                "name": sanitize(f"waits for {stall.awaited}"), "cat": "stall", "args": arguments,
            }
        )  # fmt: skip
        source = ops.get(stall.awaited)
        if source is None or source.stream == MAIN_STREAM:
            continue
        left = (source.start + (source.end - source.start) * 0.999) * _MICROSECONDS
        arrives = max(left, start + length * 0.999)
        common = {"pid": pid, "id": f"{pid}.stall.{number}", "name": "arrival", "cat": "stall", "args": arguments}
        events.append({"ph": "s", "tid": _thread(source.stream), "ts": left, **common})
        events.append({"ph": "f", "bp": "e", "tid": MAIN_STREAM, "ts": arrives, **common})
    return events


def _flows(pid: int, table: Timetable, scale: float) -> list[dict[str, Any]]:
    """Both ends of every arrow. An end belongs to the slice that contains its time: the first is just before the end of
    its op."""
    ops = {op.node: op for op in table.ops}
    flows: list[dict[str, Any]] = []
    for number, arrow in enumerate(table.arrows):
        source, target = ops.get(arrow.source), ops.get(arrow.target)
        if source is None or (target is None and arrow.target != table.output):
            continue
        left = source.start + (source.end - source.start) * 0.999
        stream, arrives = (target.stream, target.start) if target is not None else (MAIN_STREAM, table.join)
        common = {"pid": pid, "id": f"{pid}.{number}", "name": "token", "cat": "token"}
        anchors = {what: sanitize(name) for what, name in (("record", arrow.record), ("wait", arrow.wait)) if name}
        flows.append({"ph": "s", "tid": _thread(source.stream), "ts": left * scale, **common, "args": anchors})
        flows.append({"ph": "f", "bp": "e", "tid": _thread(stream), "ts": arrives * scale, **common, "args": anchors})
    return flows


#: Threads from this number on represent the streams of teams, which have numbers below 0.
_OF_TEAMS = 1 << 17


def _thread(stream: int) -> int:
    """The number of a stream among the threads of a process."""
    return stream if stream >= 0 else _OF_TEAMS - stream


def _name(what: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}


class TraceReport(FileReport):
    """Writes trace.json next to every counterexample whose rewritten program has streams; see `FileReport`."""

    name = TRACE_NAME
    announcement = "Timeline:  {} (open it in ui.perfetto.dev)"

    def content(self, case: Counterexample) -> str | None:
        return to_trace(case) if timed_ranks(case) else None
