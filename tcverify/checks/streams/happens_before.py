"""Happens-before: in a lowered graph, anchors apply to the ops that they appear to apply to, and order all conflicting accesses.

Order comes from streams, which run their ops in the order in which the host issues them, and from tokens that waits wait for;
from nothing else. Ops run where the data flow says; see `anchors` for how that is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tcverify.checks.evidence import Evidence
from tcverify.checks.host_ir.races import host_race, host_races_of, is_reported_elsewhere
from tcverify.checks.streams.anchors import lowered_ranks
from tcverify.checks.streams.clocks import Clocks
from tcverify.checks.streams.communicators import unordered_collectives
from tcverify.checks.streams.races import AROUND, Race, clocks_of, describe_race, hints, races_of, stream_around
from tcverify.checks.streams.reading import BEGINNING, IssuedOp, StreamReading, tokens_of
from tcverify.execution import Exploration
from tcverify.program import Contract
from tcverify.program.finding import Doubt, Finding

CHECK = "happens-before"

#: Number of last events of an order that a detail shows.
_EVENTS = 12

#: Largest number of streams of a graph whose order is checked; cost is streams times ops.
_MOST_STREAMS = 1024


def check_happens_before(evidence: Evidence) -> list[Finding | Doubt]:
    """Report anchors that are read differently by position, conflicting streams, races and unordered collectives.

    One finding per kind: the first on the lowest rank. Graphs without streams, and programs that the pass left unchanged,
    are skipped. In host IR, findings of the checks of order and memory are not repeated.
    """
    return find_order_violations(evidence, everything=False)


def find_order_violations(evidence: Evidence, *, everything: bool) -> list[Finding | Doubt]:
    """See `check_happens_before`.

    Args:
        everything: include races that other checks report.
    """
    rewritten = evidence.pair.rewritten
    if rewritten is None or not evidence.pair.changed:
        return []
    found: dict[str, Finding] = {}
    doubts: list[Finding | Doubt] = []
    run = evidence.runs[0].rewritten if evidence.runs else None
    for reading, ranks in lowered_ranks(rewritten):
        streams = len({op.stream for op in reading.ops} | {op.positional_stream for op in reading.ops})
        if streams > _MOST_STREAMS:
            doubts.append(Doubt("unsupported-op", f"a graph on {streams} streams is not checked for races"))
            continue
        unclear = _unclear(reading)
        if unclear:
            doubts.append(Doubt("unsupported-op", f"{unclear}: the graph is not checked for races"))
            continue
        clocks = clocks_of(reading)
        for finding in _of_reading(reading, clocks, evidence.contract, ranks[0], everything):
            if finding is not None:
                found.setdefault(finding.kind, finding)
        unordered = unordered_collectives(rewritten, reading, clocks, ranks, run)
        if unordered is not None:
            found.setdefault(unordered.kind, unordered)
        if reading.unknown and not doubts:
            name = reading.names[reading.unknown[0]]
            sentence = f"the reads and writes of '{name}' are unknown: races on its operands cannot be excluded"
            doubts.append(Doubt("unsupported-op", sentence))
    return [_with_order(finding, evidence.exploration) for finding in found.values()] or doubts


def _with_order(finding: Finding, exploration: Exploration | None) -> Finding:
    """Add to a finding an order of the streams that shows it, if one was tried."""
    kinds = ("collective-order",) if finding.kind == "unordered-collectives" else ("RAW", "WAR", "WAW")
    if exploration is None or finding.kind not in ("race", "unordered-collectives"):
        return finding
    seen = exploration.shown(kinds, finding.rank, finding.node)
    if seen is None:
        return finding
    events = [str(event) for event in seen.events]
    shown = [f"… {len(events) - _EVENTS} events", *events[-_EVENTS:]] if len(events) > _EVENTS else events
    lines = [finding.detail, f"an order that shows it ({seen.order}): {seen.text}", *(f"  {line}" for line in shown)]
    return replace(finding, detail="\n".join(lines), data={**finding.data, "order": seen.order, "events": events})


def _unclear(reading: StreamReading) -> str:
    """Why a graph cannot be read, if so."""
    if reading.mixed is not None:
        return "'{}' is an anchor, and '{}' is host IR".format(*reading.mixed)
    odd = next((number for number, index in reading.workers.items() if index < 0), None)
    return "" if odd is None else f"'{reading.names[odd]}' names an invalid worker stream"


def _of_reading(
    reading: StreamReading, clocks: Clocks, contract: Contract, rank: int, everything: bool
) -> list[Finding | None]:
    if reading.host:
        if reading.conflicts:
            return [_no_stream(reading, rank)]
        races = host_races_of(reading, clocks, contract)
        races = races if everything else [race for race in races if not is_reported_elsewhere(reading, race)]
        return [host_race(reading, races, rank)] if races else []
    found = [_mismatch(reading, clocks, contract, rank), _conflict(reading, contract, rank)]
    races = races_of(reading, clocks, contract)
    if races:
        found.append(_race(reading, races, rank))
    return found


def _no_stream(reading: StreamReading, rank: int) -> Finding:
    """The first op of host IR that gets no stream although it takes one."""
    name = reading.names[min(number for number, _, _ in reading.conflicts)]
    title = f"'{name}' names no stream: streams are what 'current_stream', and 'stream' of a whole number, return"
    return Finding("stream-conflict", CHECK, title, "", name, rank, {"streams": [None]})


# ------------------------------------------------------------------------------------------------------------- anchors


def _conflict(reading: StreamReading, contract: Contract, rank: int) -> Finding | None:
    output = reading.output.number if reading.output is not None else -1
    for number, streams, anchors in sorted(reading.conflicts):
        name = reading.names[number]
        if number == output and contract.boundary == "lenient":
            continue
        data: dict[str, Any] = {"streams": streams, "anchors": [reading.names[a] for a in anchors]}
        if None in streams:
            title = f"anchor '{name}' names no stream: its stream_id is not an integer"
            return Finding("stream-conflict", CHECK, title, "", name, rank, data)
        lines = [_anchor(reading, anchor) for anchor in anchors]
        numbers = " and ".join(map(str, streams))
        if number == output:
            title = f"outputs are read on stream {streams[0]}, but waits bind them to stream {_rest(streams)}"
            lines.append("if the caller waits for all streams: --contract boundary=lenient")
        else:
            title = f"the anchors of '{name}' bind it to streams {numbers}"
        return Finding("stream-conflict", CHECK, title, "\n".join(lines), name, rank, data)
    return None


def _anchor(reading: StreamReading, anchor: int) -> str:
    waiting = reading.waits.get(anchor)
    what, stream = ("wait", waiting.stream) if waiting is not None else ("record", reading.records[anchor].stream)
    return f"{what} '{reading.names[anchor]}' names stream {stream}"


def _rest(streams: list[int | None]) -> str:
    return " and ".join(map(str, streams[1:]))


def _mismatch(reading: StreamReading, clocks: Clocks, contract: Contract, rank: int) -> Finding | None:
    """The first anchor or op, in graph order, for which data flow and position differ."""
    found: list[tuple[int, str, str]] = []  # node, what differs, title
    issued = [*reading.ops]
    if reading.output is not None and contract.boundary == "strict":
        issued.append(reading.output)
    conflicting = {number for number, _, _ in reading.conflicts}.intersection(op.number for op in issued)
    moved = next((op for op in issued if op.stream != op.positional_stream and op.number not in conflicting), None)
    if moved is not None:
        title = (
            f"'{moved.name}' runs on stream {moved.stream} by data flow, but a runtime that binds pending waits to the next op "
            f"runs it on stream {moved.positional_stream}"
        )
        found.append((moved.number, "stream", title))
    for record in reading.records.values():
        if record.op != record.positional_op:
            meant, last = _op_name(reading, record.op), _op_name(reading, record.positional_op)
            title = (
                f"record '{reading.names[record.number]}' stands for {meant} by data flow, but {last} was issued last"
            )
            found.append((record.number, "record", title))
            break
    for number, wait, writer in reading.stale[:1]:
        reader, gated, mutator = (reading.names[n] for n in (number, wait, writer))
        title = (
            f"'{reader}' reads '{gated}', and '{mutator}' has written since into what that waits for: by data flow it reads the "
            "old value, on a runtime, where a wait copies nothing, the new one"
        )
        found.append((number, "copy", title))
    if not found and not conflicting and any(op.after != op.positional_after for op in issued):
        found = _other_order(reading, issued, clocks)
    if not found:
        return None
    number, aspect, title = min(found)
    detail = "only anchors may stand between the waits of an op and the op, and its record follows it at once"
    return Finding(
        "anchor-mismatch", CHECK, title, f"{detail}\n{_around(reading, number)}", reading.names[number], rank,
        {"aspect": aspect},
    )  # fmt: skip


def _other_order(reading: StreamReading, issued: list[IssuedOp], clocks: Clocks) -> list[tuple[int, str, str]]:
    """Streams and records agree; the first op that follows another op in one reading only, or None."""
    positional = clocks_of(reading, positional=True)
    for index, op in enumerate(issued):
        other = clocks.difference(positional, index)
        if other is None:
            continue
        name = f"'{op.name}'" if index < len(reading.ops) else "the output"
        before = reading.ops[other].name
        if clocks.ordered(other, index):
            title = f"{name} waits for '{before}' by data flow, but a runtime gives that wait to an earlier op"
        else:
            title = f"{name} waits for '{before}' by position, by a wait that does not stand on its operands"
        return [(op.number, "order", title)]
    return []


def _op_name(reading: StreamReading, op: int) -> str:
    return "no op" if op == BEGINNING else f"'{reading.ops[op].name}'"


def _around(reading: StreamReading, number: int) -> str:
    """The nodes around a given one, in graph order."""
    start, end = max(0, number - AROUND), min(len(reading.names), number + AROUND + 1)
    shown = [f"[{name}]" if i == number else name for i, name in enumerate(reading.names[start:end], start)]
    return "graph order: " + ("… " if start else "") + ", ".join(shown) + (" …" if end < len(reading.names) else "")


# --------------------------------------------------------------------------------------------------------------- races


def _race(reading: StreamReading, races: list[Race], rank: int) -> Finding:
    race = races[0]
    first = reading.ops[race.first] if race.first != BEGINNING else None
    second = reading.ops[race.second] if race.second is not None else reading.output
    accesses = [op for op in (first, second) if op is not None]
    lines = [stream_around(reading, op) for op in accesses if op is not reading.output]
    if first is not None:
        marks = [reading.names[r.number] for r in reading.records.values() if r.op == race.first]
        lines.append(f"records of '{first.name}': {_list(marks)}")
    if second is not None:
        tokens = [reading.names[reading.records[record].number] for record, _ in tokens_of(reading, second)]
        lines.append(f"'{second.name}' waits for: {_list(tokens)}")
    lines += hints(races)
    data = {
        "kind": race.kind,
        "first": first.name if first is not None else None,
        "second": second.name if second is not None else None,
        "streams": [op.stream if op is not None else 0 for op in (first, second)],
        "value": reading.names[race.value] if race.value is not None else reading.inputs.get(race.storage),
    }
    blamed = first if race.kind == "output" else second
    name = blamed.name if blamed is not None else None
    return Finding("race", CHECK, describe_race(reading, race), "\n".join(lines), name, rank, data)


def _list(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


__all__ = ["check_happens_before"]
