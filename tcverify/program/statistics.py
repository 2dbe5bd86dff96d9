"""What a pass reports about its effect on each collective. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class CollectiveStatistics:
    """One asynchronous collective before and after a pass that moved it. Times in seconds; None if unknown.

    Attributes:
        node: name of the node that starts it; of passes that move waits, `wait` is the node that was moved.
        op: the name of the collective op.
        group: the name of its group, or "".
        moves: how many nodes it moved past.
        grouped: how many nodes moved with it.
        limit: what stopped it, in words.
        communication_s: how long the communication takes.
        overlapped_s: how much of that time overlaps with compute, after the pass.
        initial_exposed_s, final_exposed_s: how long compute stalls waiting for it, before and after the pass.
        wait: see `node`; "" if the start was moved.
    """

    node: str
    op: str
    group: str
    moves: int
    grouped: int
    limit: str
    communication_s: float | None = None
    overlapped_s: float | None = None
    initial_exposed_s: float | None = None
    final_exposed_s: float | None = None
    wait: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible data."""
        return asdict(self)


def decode_statistics(rows: Any) -> tuple[CollectiveStatistics, ...]:
    """Read rows of statistics from plain data; malformed rows are skipped."""
    found = []
    for row in rows if isinstance(rows, (list, tuple)) else ():
        if isinstance(row, CollectiveStatistics):
            found.append(row)
        elif isinstance(row, Mapping) and all(_fits(row.get(name), kind) for name, kind in _KINDS.items()):
            found.append(CollectiveStatistics(**{name: row[name] for name in _KINDS if name in row}))
    return tuple(found)


_KINDS = {field.name: str(field.type) for field in fields(CollectiveStatistics)}


def _fits(value: Any, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "int":
        return type(value) is int
    return value is None or type(value) in (int, float)


#: Headings of the columns of `table_rows`. Times are in µs.
TABLE_HEADINGS = ("collective", "group", "takes", "covered", "exposed", "before", "moves", "grouped", "kept back by")


def table_rows(statistics: tuple[CollectiveStatistics, ...]) -> list[tuple[str, ...]]:
    """Statistics as rows of text, one per collective; see `TABLE_HEADINGS`."""
    return [
        (
            each.wait or each.node,
            each.group or "–",
            _time(each.communication_s),
            _time(each.overlapped_s),
            _time(each.final_exposed_s),
            _time(each.initial_exposed_s),
            str(each.moves),
            str(each.grouped),
            each.limit,
        )
        for each in statistics
    ]


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:.4g}"


__all__ = ["TABLE_HEADINGS", "CollectiveStatistics", "decode_statistics", "table_rows"]
