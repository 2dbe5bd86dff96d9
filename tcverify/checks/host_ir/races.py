"""Races in host IR: two unordered accesses to the same part of a storage, at least one of them a write."""

from __future__ import annotations

from dataclasses import dataclass, field

from tcverify.checks.memory.parts import WHOLE, ByteRange, covers, overlap
from tcverify.checks.memory.storage import Touch
from tcverify.checks.streams.clocks import Clocks
from tcverify.checks.streams.races import Race, RaceKind, excerpt, hints
from tcverify.checks.streams.reading import BEGINNING, IssuedOp, StreamReading
from tcverify.ops import DEALLOCATE
from tcverify.program import Contract
from tcverify.program.finding import Finding
from tcverify.program.stream_options import MAIN_STREAM


@dataclass(slots=True)
class _Past:
    """The accesses to a part of a storage: its last write, and the last read since then on every stream."""

    writer: int | None = None
    readers: dict[int, int] = field(default_factory=dict)


#: By storage and part.
_Pasts = dict[int, dict[ByteRange, _Past]]


def host_races_of(reading: StreamReading, clocks: Clocks, contract: Contract) -> list[Race]:
    """Return the races of a graph in host IR, in issue order.

    An access is compared with the last accesses to overlapping parts of its storage: linear in the number of
    distinct parts.
    """
    found: list[Race] = []
    pasts: _Pasts = {}
    if contract.inputs == "stream0":
        pasts = {storage: {WHOLE: _Past(BEGINNING)} for storage in reading.inputs}
    for index, op in enumerate(reading.ops):
        touches = list(map(_whole, op.touches)) if op.op == DEALLOCATE else op.touches
        for touch in sorted(touches, key=lambda touch: touch.writes):  # it reads before it writes
            found += _compared(pasts, touch, index, index, op.stream, clocks)
    if reading.output is None or contract.boundary == "lenient":
        return found
    end = len(reading.ops)
    returned = list(reading.output.touches)
    known = {touch.storage for touch in returned}
    for storage in reading.inputs:  # the caller also reads inputs that the graph has written to
        if storage not in known:
            returned.append(Touch(storage, -1, None, writes=False))
    for touch in returned:
        unjoined = _compared(pasts, touch, end, None, MAIN_STREAM, clocks)
        found += [race for race in unjoined if race.first != BEGINNING]
    return found


def _whole(touch: Touch) -> Touch:
    return Touch(touch.storage, touch.through, None, touch.writes)


def _compared(pasts: _Pasts, touch: Touch, at: int, second: int | None, stream: int, clocks: Clocks) -> list[Race]:
    """Return the races of an access with earlier ones; then add it to them."""
    found: list[Race] = []
    part = WHOLE if touch.part is None else touch.part
    value = touch.through if touch.through >= 0 else None
    parts = pasts.setdefault(touch.storage, {})
    met = [other for other in parts if overlap(part, other)]
    for other in met:
        past = parts[other]
        if past.writer is not None and past.writer != at and not clocks.ordered(past.writer, at):
            kind: RaceKind = "output" if second is None else "WAW" if touch.writes else "RAW"
            found.append(Race(kind, past.writer, second, value, touch.storage))
        if touch.writes:
            late = [reader for reader in past.readers.values() if reader != at and not clocks.ordered(reader, at)]
            found += [Race("WAR", reader, second, value, touch.storage) for reader in late]
    if touch.writes:
        for other in met:
            if covers(part, other):
                del parts[other]
        parts[part] = _Past(at)
    else:
        parts.setdefault(part, _Past()).readers[stream] = at
    return found


def is_reported_elsewhere(reading: StreamReading, race: Race) -> bool:
    """Whether another check reports the same race: the check of order, if the host has not reached the wait for a
    communication; the check of memory, if the host uses storage that it has freed."""
    if race.first == BEGINNING:
        return False
    if reading.ops[race.first].op == DEALLOCATE:
        return True
    if reading.ops[race.first].stream not in reading.teams:
        return False
    second = reading.output if race.second is None else reading.ops[race.second]
    wait = reading.landed.get(race.first)
    return wait is None or (second is not None and wait[0] > second.number)


# ------------------------------------------------------------------------------------------------------------- in words


def host_race(reading: StreamReading, races: list[Race], rank: int) -> Finding:
    """Report the first of the races of a graph."""
    race = races[0]
    first = reading.ops[race.first] if race.first != BEGINNING else None
    second = reading.ops[race.second] if race.second is not None else None
    lines = [*(stream_around(reading, op) for op in (first, second) if op is not None), *hints(races)]
    data = {
        "kind": race.kind,
        "first": first.name if first is not None else None,
        "second": second.name if second is not None else None,
        "streams": [op.queued_on if op is not None else MAIN_STREAM for op in (first, second)],
        "value": reading.names[race.value]
        if race.value is not None and first is not None
        else reading.inputs.get(race.storage),
    }
    blamed = first if race.kind == "output" else second
    name = blamed.name if blamed is not None else None
    return Finding("race", "happens-before", describe_race(reading, race), "\n".join(lines), name, rank, data)


def stream_around(reading: StreamReading, op: IssuedOp) -> str:
    """What a stream runs before and after an op; for a communication, the stream on which it is issued."""
    queue = [other for other in reading.ops if op.queued_on in (other.stream, other.queued_on)]
    return excerpt(stream_words(reading, op.queued_on), queue, op)


def describe_race(reading: StreamReading, race: Race) -> str:
    """Describe a race in one sentence: both accesses, where they run, and the missing order between them."""
    first = reading.ops[race.first] if race.first != BEGINNING else None
    second = reading.ops[race.second] if race.second is not None else reading.output
    value = reading.names[race.value] if race.value is not None else reading.inputs.get(race.storage, "?")
    if first is None:
        value = reading.inputs.get(race.storage, value)
    missing = _missing(reading, race, first, second)
    if first is None:
        access = f"its write on {stream_words(reading, MAIN_STREAM)}"
    else:
        what = "read" if race.kind == "WAR" else "write"
        by = "" if first.name == value else f" by '{first.name}'"
        access = f"its {what}{by} {describe_place(reading, first)}"
    if race.kind == "output":
        what = f"output '{value}'" if race.value is not None else f"input '{value}', which the graph mutates,"
        return f"{what} is read on {stream_words(reading, MAIN_STREAM)} before {access} is complete: {missing}"
    me = f"'{second.name}' {describe_place(reading, second)}" if second is not None else "the caller"
    frees = second is not None and second.op == DEALLOCATE
    verb = "frees" if frees else "reads" if race.kind == "RAW" else "writes into"
    known = "input " if first is None else ""
    return f"{me} {verb} {known}'{value}' before {access} is complete: {missing}"


def describe_place(reading: StreamReading, op: IssuedOp) -> str:
    """Where an op runs: "on worker stream 1", "on the stream of team [0, 1]"."""
    return f"on {stream_words(reading, op.stream)}"


def stream_words(reading: StreamReading, stream: int) -> str:
    """A stream in the terms of the source program."""
    if stream in reading.teams:
        return f"the stream of team {list(reading.teams[stream])}"
    return "the caller's stream" if stream == MAIN_STREAM else f"worker stream {stream - 1}"


def _missing(reading: StreamReading, race: Race, first: IssuedOp | None, second: IssuedOp | None) -> str:
    """The wait or synchronization that is missing between two accesses."""
    waiting = stream_words(reading, second.queued_on if second is not None else MAIN_STREAM)
    if first is None:
        return f"{waiting} is not synchronised with {stream_words(reading, MAIN_STREAM)} before"
    if first.stream in reading.teams:
        missing = f"{waiting} does not wait for '{first.name}'"
        number, stream = reading.landed.get(race.first, (-1, MAIN_STREAM))
        if number < 0 or (second is not None and number > second.number):
            return missing
        wait = reading.names[number]
        return f"{missing}, and is not synchronised with {stream_words(reading, stream)}, which does, behind '{wait}'"
    return f"{waiting} is not synchronised with {stream_words(reading, first.queued_on)} behind '{first.name}'"


__all__ = [
    "describe_place",
    "describe_race",
    "host_race",
    "host_races_of",
    "is_reported_elsewhere",
    "stream_around",
    "stream_words",
]
