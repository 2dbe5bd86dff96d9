"""Draws which rank waits for which: ranks as stations, in lines of alternating direction, so that a cycle of many ranks fits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tcverify.execution import Run
from tcverify.report.sanitize import plural, sanitize

#: Number of stations per line, and most that are drawn.
PER_LINE = 6
MAX_STATIONS = 36

#: Sizes in pixels: a station, the distance to the next, and the space for the way back.
WIDTH, HEIGHT = 134, 44
STEP_X, STEP_Y = 172, 84
LEFT, TOP = 26, 10

#: Characters that fit into a station.
ROOM = 19


@dataclass(frozen=True, slots=True)
class Station:
    """A rank, and the call in which it waits."""

    rank: int
    x: int
    y: int
    text: str


@dataclass(frozen=True, slots=True)
class WaitingCycle:
    """Ranks that wait forever, each for the next.

    Attributes:
        stations: the ranks that are drawn.
        arrows: SVG path data.
        sentences: the call in which each rank waits.
        cycle: whether the last waits for the first; else the last has finished.
    """

    stations: tuple[Station, ...]
    arrows: tuple[str, ...]
    sentences: tuple[str, ...]
    cycle: bool
    width: int
    height: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(s.rank for s in self.stations)


def describe_waiting(run: Run) -> WaitingCycle | None:
    """Describe the ranks of a run that wait forever."""
    hang = run.hang
    if hang is None:
        return None
    known = [(wait.rank, wait.call.node) for wait in hang.waits]
    sentences = [sanitize(f"{wait} (node '{wait.call.node}')") for wait in hang.waits[:MAX_STATIONS]]
    if len(hang.waits) > MAX_STATIONS:
        sentences.append(f"and {plural(len(hang.waits) - MAX_STATIONS, 'further rank')}")
    if hang.finished is not None:
        known.append((hang.finished, "has finished"))
        sentences.append(f"rank {hang.finished} has finished without joining")
    stations = [_station(i, rank, text) for i, (rank, text) in enumerate(known[:MAX_STATIONS])]
    arrows = [_arrow(a, b) for a, b in pairwise(stations)]
    lines = -(-len(stations) // PER_LINE)
    if hang.cycle and len(stations) > 1:
        arrows.append(_way_back(stations[-1], stations[0]))
    return WaitingCycle(
        tuple(stations),
        tuple(arrows),
        tuple(sentences),
        hang.cycle,
        LEFT + min(len(stations), PER_LINE) * STEP_X,
        TOP + lines * STEP_Y - (STEP_Y - HEIGHT) + 30,
    )


def _station(number: int, rank: int, text: str) -> Station:
    line, at = divmod(number, PER_LINE)
    column = at if line % 2 == 0 else PER_LINE - 1 - at
    text = sanitize(text)
    shown = text if len(text) <= ROOM else f"{text[: ROOM - 1]}…"
    return Station(rank, LEFT + column * STEP_X, TOP + line * STEP_Y, shown)


def _arrow(a: Station, b: Station) -> str:
    if a.y != b.y:
        return f"M{a.x + WIDTH // 2} {a.y + HEIGHT}V{b.y}"
    middle = a.y + HEIGHT // 2
    return f"M{a.x + WIDTH} {middle}H{b.x}" if a.x < b.x else f"M{a.x} {middle}H{b.x + WIDTH}"


def _way_back(last: Station, first: Station) -> str:
    """Below the last line, along the left, into the first station."""
    x, bottom = last.x + WIDTH // 2, last.y + HEIGHT
    return f"M{x} {bottom}V{bottom + 18}H8V{first.y + HEIGHT // 2}H{first.x}"


__all__ = ["Station", "WaitingCycle", "describe_waiting"]
