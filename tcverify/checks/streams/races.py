"""Races: two unordered accesses to one storage, at least one of them a write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tcverify.checks.streams.clocks import Clocks
from tcverify.checks.streams.reading import BEGINNING, IssuedOp, StreamReading
from tcverify.program import Contract
from tcverify.program.stream_options import MAIN_STREAM

#: Kinds of races; see `Race`.
RaceKind: TypeAlias = Literal["RAW", "WAR", "WAW", "output"]


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that are not ordered.

    Attributes:
        kind: "RAW", "WAR" or "WAW", by issue order; "output" if the second access is the caller's.
        first, second: ops, by index in `StreamReading.ops`; the first may be `BEGINNING` (inputs that are written on the main
            stream), the second is None for the output node.
        value: the node (by number) through which the second reaches the storage; None for an input that the graph mutates
            and does not return.
        storage: which storage.
    """

    kind: RaceKind
    first: int
    second: int | None
    value: int | None
    storage: int


def clocks_of(reading: StreamReading, *, positional: bool = False) -> Clocks:
    """The order of the ops of a reading, with the output node last."""
    ops, output = reading.ops, [reading.output] if reading.output is not None else []
    end = [MAIN_STREAM for _ in output]
    if positional:
        return Clocks([op.positional_stream for op in ops] + end, [op.positional_after for op in (*ops, *output)])
    return Clocks([op.stream for op in ops] + end, [op.after for op in (*ops, *output)])


def races_of(reading: StreamReading, clocks: Clocks, contract: Contract) -> list[Race]:
    """Return the races of a graph in issue order, by data flow. Linear in ops (times streams).

    An access is compared with the last write of its storage and, if it writes, with the last read of every stream since
    then: if these are ordered, so are all earlier ones.
    """
    found: list[Race] = []
    written: dict[int, int] = {}
    if contract.inputs == "stream0":
        written = dict.fromkeys(reading.inputs, BEGINNING)
    readers: dict[int, dict[int, int]] = {}  # storage -> stream -> its last reader since the last write
    for index, op in enumerate(reading.ops):
        through = dict(op.reads)
        for storage, value in op.reads:
            writer = written.get(storage)
            if writer is not None and not clocks.ordered(writer, index) and storage not in op.writes:
                found.append(Race("RAW", writer, index, value, storage))
        for storage in op.writes:
            value_or_none = through.get(storage)
            writer = written.get(storage)
            if writer is not None and not clocks.ordered(writer, index):
                found.append(Race("WAW", writer, index, value_or_none, storage))
            for reader in readers.pop(storage, {}).values():
                if reader != index and not clocks.ordered(reader, index):
                    found.append(Race("WAR", reader, index, value_or_none, storage))
            written[storage] = index
        for storage, _ in op.reads:
            if storage not in op.writes:
                readers.setdefault(storage, {})[op.stream] = index
    if reading.output is not None and contract.boundary == "strict":
        found += _unjoined(reading, reading.output, clocks, written)
    return found


def _unjoined(reading: StreamReading, output: IssuedOp, clocks: Clocks, written: dict[int, int]) -> list[Race]:
    """Writes that the caller does not wait for: it reads the outputs, and mutated inputs, on the main stream."""
    end = len(reading.ops)
    through: dict[int, int | None] = dict(output.reads)
    for storage in reading.inputs:
        if written.get(storage, BEGINNING) != BEGINNING:
            through.setdefault(storage, None)
    return [
        Race("output", writer, None, value, storage)
        for storage, value in through.items()
        if (writer := written.get(storage)) is not None and not clocks.ordered(writer, end)
    ]


def describe_race(reading: StreamReading, race: Race) -> str:
    """Describe a race in one sentence: both accesses, their streams, and the missing order."""
    first = reading.ops[race.first] if race.first != BEGINNING else None
    value = reading.names[race.value] if race.value is not None else reading.inputs.get(race.storage, "?")
    stream = first.stream if first is not None else MAIN_STREAM
    by = "" if first is None or first.name == value else f" by '{first.name}'"
    if race.kind == "output":
        what = f"output '{value}'" if race.value is not None else f"input '{value}', which the graph mutates,"
        missing = f"no wait of the outputs follows a record of '{first.name}'" if first is not None else ""
        return f"{what} is read on stream {MAIN_STREAM} before its write{by} on stream {stream} is complete: {missing}"
    second = reading.ops[race.second or 0]
    me = f"'{second.name}' on stream {second.stream}"
    if first is None:
        missing = f"no wait of '{second.name}' follows a record of an op of stream {MAIN_STREAM}"
        verb = "reads" if race.kind == "RAW" else "writes into"
        return f"{me} {verb} input '{value}' before its write on stream {MAIN_STREAM} is complete: {missing}"
    missing = f"no wait of '{second.name}' follows a record of '{first.name}'"
    if race.kind == "RAW":
        return f"{me} reads '{value}' before its write{by} on stream {stream} is complete: {missing}"
    access = f"its read by '{first.name}'" if race.kind == "WAR" else f"its write{by}"
    return f"{me} writes into '{value}' before {access} on stream {stream} is complete: {missing}"


#: Number of ops that a detail shows on a stream before and after the op in question.
AROUND = 3


def stream_around(reading: StreamReading, op: IssuedOp) -> str:
    """What a stream runs before and after an op."""
    return excerpt(f"stream {op.stream}", [other for other in reading.ops if other.stream == op.stream], op)


def excerpt(words: str, queue: Sequence[IssuedOp], op: IssuedOp) -> str:
    """The part of a queue around one of its ops, which is marked, after the label of the queue."""
    at = next(i for i, other in enumerate(queue) if other is op)
    start, end = max(0, at - AROUND), at + AROUND + 1
    shown = [f"[{other.name}]" if other is op else other.name for other in queue[start:end]]
    return f"{words}: " + ("… " if start else "") + ", ".join(shown) + (" …" if end < len(queue) else "")


def hints(races: Sequence[Race]) -> list[str]:
    """What the user can declare if the first race is none, and how many more races there are."""
    lines = []
    if races[0].kind == "output":
        lines.append("a caller that waits for all streams before it reads: --contract boundary=lenient")
    if races[0].first == BEGINNING:
        lines.append("inputs that are complete before the graph begins: --contract inputs=ready")
    if len(races) > 1:
        lines.append(f"{len(races) - 1} more of this graph's accesses are not ordered")
    return lines


__all__ = ["AROUND", "Race", "clocks_of", "describe_race", "excerpt", "hints", "races_of", "stream_around"]
