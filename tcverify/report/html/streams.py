"""Draws when a rank runs its ops, before and after the pass: streams as lanes, ops as bars, tokens as arrows.
Asynchronous graphs get one lane for compute, with its stalls, and one for communication, with the time for which it
queues. Data only: the template turns it into SVG.

Data only: the template turns it into SVG. Both charts share a time scale, so that lengths can be compared. For long graphs, only
the ops around the finding are drawn, so that the size of the drawing is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tcverify.cases.counterexample import Counterexample
from tcverify.program.finding import Finding
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.report.sanitize import plural, sanitize
from tcverify.report.timetable import ScheduledOp, Timetable, marked_ops, microseconds, time_facts, timetables

#: Graphs with up to this many ops are drawn whole; number of ops drawn of longer ones.
MAX_WHOLE = 120
MAX_BARS = 80
#: Number of rows of the table below the drawing.
MAX_ROWS = 240
#: Largest number of arrows in a chart.
MAX_LINKS = 400

#: Widths in pixels: the minimum of the drawing, the desired one of a bar, and the maximum of the drawing.
WIDTH, ROOM, MAX_WIDTH = 1000.0, 36.0, 1900.0
#: Margins: left of the lanes, for their names; and right of them, for labels at the last bar.
GUTTER, MARGIN = 118.0, 26.0
LANE, BAR = 48.0, 26.0
CAPTION, AXIS, BETWEEN = 30.0, 30.0, 26.0
#: Height of a label.
PIN = 16.0
#: Width of a character, in a bar and in the label above one.
CHARACTER = 7.3


@dataclass(frozen=True, slots=True)
class Bar:
    """One op.

    Attributes:
        kind: "compute", "comm" or "both"; "stall", which is not an op: compute waits.
        node: its name.
        text: its name, truncated to fit.
        title: everything about it, in one line.
        mark: "first", "second" or "finding" if the finding is about it, else "".
        pin: the label for that.
    """

    x: float
    y: float
    width: float
    kind: str
    node: str
    text: str
    title: str
    mark: str
    pin: Pin | None


@dataclass(frozen=True, slots=True)
class Pin:
    """The label above or below an op that the finding is about."""

    x: float
    y: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream."""

    y: float
    name: str
    role: str


#: Kinds of arrows; see `Link`.
LinkKind: TypeAlias = Literal["token", "missing", "queue"]


@dataclass(frozen=True, slots=True)
class Link:
    """An arrow from the end of an op to the beginning of another op, or to the output.

    Attributes:
        kind: "token", "missing" for the order that a race lacks, or "queue" for communication that was issued but has not begun.
    """

    kind: LinkKind
    path: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One version of the graph.

    Attributes:
        y: its top.
        bottom: of its lanes, where the axis is.
        ticks: (x, label).
        join: where the outputs are read, as (x, y), if anything has to complete first.
    """

    caption: str
    y: float
    bottom: float
    lanes: tuple[Lane, ...]
    bars: tuple[Bar, ...]
    links: tuple[Link, ...]
    ticks: tuple[tuple[float, str], ...]
    join: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class ScheduleDrawing:
    """The drawing, the text above it and the table below it.

    Attributes:
        facts: (what, how long).
        note: what is omitted, or how to read the drawing, in one or two sentences.
        rows: per op: number, node, op, stream, start, end, what it waits for, mark.
        unit: of the axis and the rows.
        heading: of the section.
        kinds: kinds of arrows that occur, for the legend.
        streams: whether lanes are streams, and arrows their tokens.
        missing: whether the order that a race lacks is drawn.
        queues: whether communication that queues is drawn.
        summary: the drawing in one line.
    """

    rank: int
    width: float
    height: float
    charts: tuple[Chart, ...]
    facts: tuple[tuple[str, str], ...]
    note: str
    rows: tuple[tuple[str, ...], ...]
    rows_left_out: int
    unit: str
    kinds: tuple[str, ...]
    missing: bool
    summary: str
    heading: str
    streams: bool
    queues: bool


@dataclass(frozen=True, slots=True)
class _Window:
    """The ops of one version that are drawn, their start time, and the width of a unit of time."""

    ops: tuple[ScheduledOp, ...]
    origin: float
    scale: float
    width: float

    def x(self, time: float) -> float:
        return GUTTER + (time - self.origin) * self.scale


def draw_schedule(case: Counterexample, rank: int) -> ScheduleDrawing | None:
    """Draw the streams of a rank, or return None if its rewritten graph has none."""
    found = timetables(case, rank)
    if found is None:
        return None
    before, after = found
    marks = marked_ops(case.finding) if case.finding.rank in (None, rank) else {}
    chosen = _chosen(after, marks)
    names = {op.node for op in chosen}
    whole = len(chosen) == len(after.ops)
    tables = []
    if before is not None:
        kept = _chosen(before, {}) if whole else [op for op in before.ops if op.node in names]
        tables.append(("Before the pass", before, kept))
    tables.append(("After the pass", after, chosen))
    span = max((_span(ops)[1] - _span(ops)[0] for _, _, ops in tables), default=0.0) or 1.0
    width = min(max(WIDTH, GUTTER + MARGIN + ROOM * len(chosen)), MAX_WIDTH)
    scale = (width - GUTTER - MARGIN) / span
    charts = []
    top = 0.0
    for caption, table, ops in tables:
        window = _Window(tuple(ops), _span(ops)[0], scale, width)
        late = table is after
        drawn = _chart(caption, table, window, top, marks if late else {}, case.finding if late else None)
        charts.append(drawn)
        top = drawn.bottom + AXIS + BETWEEN
    left_out = len(after.ops) - len(chosen)
    bars = [bar for chart in charts for bar in chart.bars]
    rows = _rows(after, chosen[:MAX_ROWS], marks)
    return ScheduleDrawing(
        rank=rank,
        width=width,
        height=top - BETWEEN,
        charts=tuple(charts),
        facts=tuple(time_facts(after)),
        note=_note(after, before, left_out),
        rows=rows,
        rows_left_out=len(after.ops) - len(rows),
        unit="µs" if after.timed else "steps",
        kinds=tuple(kind for kind in ("compute", "comm", "both", "stall") if any(bar.kind == kind for bar in bars)),
        missing=any(link.kind == "missing" for chart in charts for link in chart.links),
        summary=f"{plural(len(after.ops), 'op')} on {plural(len({op.stream for op in after.ops}), 'stream')} of rank {rank}"
        if not after.asynchronous
        else f"{plural(len(after.ops), 'op')} of rank {rank}, communication beside compute",
        heading=f"{'Timeline' if after.asynchronous else 'Streams'} of rank {rank}",
        streams=not after.asynchronous,
        queues=any(link.kind == "queue" for chart in charts for link in chart.links),
    )


def _chosen(table: Timetable, marks: Mapping[str, str]) -> list[ScheduledOp]:
    """All ops, or those around the ones that the finding is about."""
    if len(table.ops) <= MAX_WHOLE:
        return list(table.ops)
    marked = [i for i, op in enumerate(table.ops) if op.node in marks]
    if not marked:
        return list(table.ops[:MAX_BARS])
    # Two accesses of a race may be far apart: the second, at which the race occurs, is always among the drawn ones.
    middle = (marked[0] + marked[-1]) // 2 if marked[-1] - marked[0] < MAX_BARS - 8 else marked[-1] - MAX_BARS // 2 + 8
    start = min(max(0, middle - MAX_BARS // 2), len(table.ops) - MAX_BARS)
    return list(table.ops[start : start + MAX_BARS])


def _span(ops: Sequence[ScheduledOp]) -> tuple[float, float]:
    return min((op.start for op in ops), default=0.0), max((op.end for op in ops), default=0.0)


def _note(after: Timetable, before: Timetable | None, left_out: int) -> str:
    sentences = []
    if not after.timed:
        sentences.append(
            "Not every op has a cost: each op takes one step, in an order that its stream and tokens allow."
        )
    if before is None:
        sentences.append("The ops of the original have no costs, so its timeline is not drawn.")
    if left_out:
        sentences.append(f"{plural(left_out, 'op')} unrelated to the finding are not drawn.")
    return " ".join(sentences)


def _chart(
    caption: str, table: Timetable, window: _Window, top: float, marks: Mapping[str, str], finding: Finding | None
) -> Chart:
    first = top + CAPTION
    lanes = {stream: first + i * LANE + (LANE - BAR) for i, stream in enumerate(table.streams)}
    # Labels are above their bars, and those of the last lane below: between lanes they would hide arrows.
    lowest = table.streams[-1] if len(lanes) > 1 else None
    bars = tuple(_bar(op, table, window, lanes[op.stream], marks, op.stream == lowest) for op in window.ops)
    bars = (*_stalls(table, window, lanes[MAIN_STREAM], marks), *bars)
    below = any(op.stream == lowest and op.node in marks for op in window.ops)
    bottom = first + len(lanes) * LANE + 6 + (PIN + 4 if below else 0)
    end = window.x(table.join) if _span(window.ops)[1] >= table.join >= window.origin else None
    links = _links(table, window, lanes, end)
    missing = _missing(table, window, lanes, finding, end) if finding is not None else None
    joins = table.output in {*(arrow.target for arrow in table.arrows), *marks} or _at_the_end(table, finding)
    length = microseconds(table.end) if table.timed else f"{table.end:.0f} steps"
    return Chart(
        caption=f"{caption}: {length}",
        y=top,
        bottom=bottom,
        lanes=tuple(Lane(y, *table.lane(stream)) for stream, y in lanes.items()),
        bars=bars,
        links=(*links, *_queues(table, window, lanes), *([missing] if missing is not None else [])),
        ticks=_ticks(window, table.timed),
        join=(end, lanes[MAIN_STREAM]) if joins and end is not None else None,
    )


def _stalls(table: Timetable, window: _Window, y: float, marks: Mapping[str, str]) -> list[Bar]:
    """When compute waits, as far as it is drawn. Blocking ops have a bar already."""
    low, high = window.origin, _span(window.ops)[1]
    found = []
    for stall in table.stalls:
        start, end = max(stall.start_s, low), min(stall.end_s, high)
        if stall.node == stall.awaited or end <= start:
            continue
        x = window.x(start)
        width = max(1.5, (end - start) * window.scale - 2)
        length = microseconds(stall.end_s - stall.start_s)
        mark = marks.get(stall.node, "")
        pin = None
        if mark:
            label = f"▼ {mark}: {sanitize(stall.node)[:40]}"
            size = CHARACTER * len(label) + 8
            pin = Pin(min(max(GUTTER, x + width / 2 - size / 2), window.width - size), y - PIN - 2, size, label)
        title = f"{stall.node}: compute waits {length} for {stall.awaited or 'communication'}"
        found.append(
            Bar(x, y, width, "stall", sanitize(stall.node), _fit(stall.node, width), sanitize(title), mark, pin)
        )
    return found


def _queues(table: Timetable, window: _Window, lanes: Mapping[int, float]) -> list[Link]:
    """From the time when communication is issued to its start."""
    links: list[Link] = []
    for op in window.ops:
        if op.issued is not None and op.start > op.issued and len(links) < MAX_LINKS:
            y = lanes[op.stream] + BAR + 2.5
            start, end = max(GUTTER, window.x(op.issued)), window.x(op.start)
            length = microseconds(op.start - op.issued) if table.timed else f"{op.start - op.issued:.0f} steps"
            title = f"'{op.node}' is issued {length} before its communication begins"
            links.append(Link("queue", f"M{start:.1f} {y:.1f}H{end:.1f}", sanitize(title)))
    return links


def _bar(op: ScheduledOp, table: Timetable, window: _Window, y: float, marks: Mapping[str, str], low: bool) -> Bar:
    x = window.x(op.start)
    width = max(1.5, (op.end - op.start) * window.scale - 2)  # a gap separates neighbours
    kind = "both" if len(op.resources) > 1 else "comm" if "comm" in op.resources else "compute"
    mark = marks.get(op.node, "")
    pin = None
    if mark:
        label = f"{'▲' if low else '▼'} {mark}: {sanitize(op.node)[:40]}"
        size = CHARACTER * len(label) + 8
        left = min(max(GUTTER, x + width / 2 - size / 2), window.width - size)
        pin = Pin(left, y + BAR + 4 if low else y - PIN - 2, size, label)
    return Bar(x, y, width, kind, sanitize(op.node), _fit(op.node, width), sanitize(_told(op, table)), mark, pin)


def _told(op: ScheduledOp, table: Timetable) -> str:
    show = microseconds if table.timed else "{:.0f}".format
    when = f"{show(op.start)} to {show(op.end)}"
    if table.timed:
        when += f" ({microseconds(op.end - op.start)})"
    where = "" if table.asynchronous else f" on {table.lane(op.stream)[0]}"
    return f"{op.node}: {op.op}{where}, {when}, {' and '.join(op.resources)}"


def _fit(name: str, width: float) -> str:
    room = int((width - 5) / CHARACTER)
    text = sanitize(name)
    if len(text) <= room:
        return text
    return f"{text[: room - 1]}…" if room >= 4 else ""


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    """From the edge of one lane's bar that faces the other lane to the edge of the other's."""
    down = to_y > y
    start, end = (y + BAR, to_y) if down else (y, to_y + BAR)
    bend = 14.0 if down else -14.0
    return f"M{x:.1f} {start:.1f}C{x:.1f} {start + bend:.1f} {to_x:.1f} {end - bend:.1f} {to_x:.1f} {end:.1f}"


def _links(table: Timetable, window: _Window, lanes: Mapping[int, float], end: float | None) -> list[Link]:
    """Arrows between streams. A token within a stream adds no order."""
    drawn = {op.node: op for op in window.ops}
    links: list[Link] = []
    for arrow in table.arrows:
        source, target = drawn.get(arrow.source), drawn.get(arrow.target)
        stream = target.stream if target is not None else MAIN_STREAM
        x = window.x(target.start) if target is not None else end if arrow.target == table.output else None
        if source is None or x is None or source.stream == stream or len(links) >= MAX_LINKS:
            continue
        path = _curve(window.x(source.end) - 2, lanes[source.stream], x + 2, lanes[stream])
        how = f"record '{arrow.record}', wait '{arrow.wait}'" if arrow.record else f"by '{arrow.wait}'"
        title = f"'{arrow.target}' waits for '{arrow.source}' ({how})"
        links.append(Link("token", path, sanitize(title)))
    return links


def _missing(
    table: Timetable, window: _Window, lanes: Mapping[int, float], finding: Finding, end: float | None
) -> Link | None:
    """The missing order of a race, or of two collectives."""
    if finding.kind not in ("race", "unordered-collectives"):
        return None
    drawn = {op.node: op for op in window.ops}
    first = str(finding.data.get("first"))
    second = table.output if _at_the_end(table, finding) else str(finding.data.get("second"))
    source, target = drawn.get(first), drawn.get(second)
    x = window.x(target.start) if target is not None else end if second == table.output else None
    stream = target.stream if target is not None else MAIN_STREAM
    if source is None or x is None or stream == source.stream:
        return None
    what = f"'{second}'" if target is not None else "the output"
    path = _curve(window.x(source.end) - 2, lanes[source.stream], x + 2, lanes[stream])
    return Link("missing", path, sanitize(f"missing order: {what} does not wait for '{first}'"))


def _at_the_end(table: Timetable, finding: Finding | None) -> bool:
    """Whether the caller of a host program reads its outputs too early."""
    return bool(table.lanes) and finding is not None and finding.data.get("kind") == "output"


def _ticks(window: _Window, timed: bool) -> tuple[tuple[float, str], ...]:
    """Round numbers of µs (or steps), about ten across the drawing."""
    factor = 1e6 if timed else 1.0
    whole = (window.width - GUTTER - MARGIN) / window.scale * factor / 10
    size = 10.0 ** math.floor(math.log10(whole)) if whole > 0 and math.isfinite(whole) else 1.0
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= whole * 0.999)
    if not timed:
        step = max(1.0, step)
    low, high = window.origin * factor, _span(window.ops)[1] * factor
    first = math.ceil(low / step - 1e-9)
    numbers = range(first, first + 12)
    return tuple((window.x(n * step / factor), f"{n * step:.6g}") for n in numbers if n * step <= high + step * 1e-6)


def _rows(table: Timetable, ops: Sequence[ScheduledOp], marks: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    waits: dict[str, list[str]] = {}
    for arrow in table.arrows:
        waits.setdefault(arrow.target, []).append(arrow.source)
    factor = 1e6 if table.timed else 1.0
    for stall in table.stalls:
        if stall.awaited != stall.node:
            waits.setdefault(stall.node, []).append(stall.awaited)
    numbers = {op.node: i + 1 for i, op in enumerate(table.ops)}
    rows = []
    for op in ops:
        after = ", ".join(dict.fromkeys(waits.get(op.node, [])))
        times = (f"{op.start * factor:.6g}", f"{op.end * factor:.6g}")
        lane = table.lane(op.stream)[0] if table.asynchronous or table.lanes else str(op.stream)
        texts = (str(numbers[op.node]), op.node, op.op, lane, *times, after, marks.get(op.node, ""))
        rows.append(tuple(map(sanitize, texts)))
    return tuple(rows)


__all__ = ["BAR", "Bar", "Chart", "Lane", "Link", "Pin", "ScheduleDrawing", "draw_schedule"]
