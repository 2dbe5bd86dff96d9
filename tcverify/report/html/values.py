"""The values of every node, per rank, before and after the pass: elements of small tensors; minimum, mean and maximum
of large ones; and where the two differ. Data only, of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tcverify.execution import Run
from tcverify.explain.relations import Relation
from tcverify.report.html.tensors import Numbers, ValueEntry, entries_of
from tcverify.report.sanitize import plural

#: Number of different values of one node that are shown; ranks whose values agree count once.
MAX_ENTRIES = 8

#: Number of characters of all values of a page together; nodes nearest to the difference come first.
MAX_CHARACTERS = 300_000


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """The values of a node and its counterpart.

    Attributes:
        before, after: their names; "" if there is none.
        entries: per rank.
        more: what is omitted, in words.
    """

    before: str
    after: str
    entries: tuple[ValueEntry, ...]
    more: str

    @property
    def size(self) -> int:
        """Its approximate size in characters."""
        texts = [n for e in self.entries for n in (e.before, e.after) if n is not None]
        return 80 + sum(
            60 + sum(len(t) + 1 for t in n.elements) + len(n.summary) + 60 * (n.sample is not None) for n in texts
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """Both runs, and the ranks to show, most informative first."""

    before: Run | None
    after: Run | None
    ranks: Sequence[int]


def record(runs: Runs, before: str, after: str, comparable: bool) -> ValueRecord | None:
    """Return the values of a node; None if none is known.

    Args:
        before, after: its names in the two graphs; "" if it is not in one.
        comparable: whether both should be equal, so that a difference is wrong.
    """
    old, new = _by_rank(runs.before, before), _by_rank(runs.after, after)
    groups: dict[tuple[object, ...], tuple[list[int], list[ValueEntry]]] = {}
    left_out = 0
    for rank in runs.ranks:
        if rank not in old and rank not in new:
            continue
        entries = entries_of(old.get(rank), new.get(rank), comparable)
        key = tuple(entries)
        if key not in groups and len(groups) >= MAX_ENTRIES:
            left_out += 1
        else:
            groups.setdefault(key, ([], entries))[0].append(rank)
    if not groups or not any(entries for _, entries in groups.values()):
        return None
    known = (old.keys() | new.keys()) - set(runs.ranks)
    found = [
        ValueEntry(rank_text(ranks), e.part, e.before, e.after, e.differing, e.worst, e.verdict, e.wrong)
        for ranks, entries in groups.values()
        for e in entries
    ]
    more = left_out + len(known)
    return ValueRecord(before, after, tuple(found), f"{plural(more, 'further rank')}" if more else "")


def is_comparable(relation: Relation) -> bool:
    """Whether two values of this relation can be compared element by element: they are equal, or should be."""
    return relation.kind == "equal" or not relation.explained


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks as text, with ranges: "0–3, 6"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 0", "ranks 0–3"."""
    listed = list(ranks)
    return f"rank{'s' * (len(listed) != 1)} {rank_text(listed)}"


def _by_rank(run: Run | None, name: str) -> dict[int, Any]:
    if run is None or not name:
        return {}
    return {r.rank: r.values[name] for r in run.ranks if r.values is not None and name in r.values}


def as_data(found: ValueRecord) -> dict[str, Any]:
    """The record as read by the page's script: see `showValues` in report.js."""

    def numbers(value: Numbers | None) -> list[Any] | None:
        if value is None:
            return None
        found = [list(value.shape), " ".join(value.elements) if value.elements else value.summary, bool(value.elements)]
        if value.sample is not None:
            index, elements, worst = value.sample
            found += [index, " ".join(elements), worst]
        return found

    return {
        "b": found.before,
        "a": found.after,
        "e": [
            [e.ranks, e.part, numbers(e.before), numbers(e.after), list(e.differing), e.worst, e.verdict, e.wrong]
            for e in found.entries
        ],
        "m": found.more,
    }


__all__ = ["Runs", "ValueRecord", "as_data", "is_comparable", "rank_text", "ranks_text", "record"]
