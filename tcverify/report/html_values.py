"""What every node computed, per rank, before and after the pass: numbers of small tensors, least, mean and greatest of large
ones, and where the two differ. Data only, and bounded whatever the program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tcverify.execution import Run
from tcverify.relations import TOLERANCE, Relation
from tcverify.report.plain import count

#: Tensors of so many elements are shown whole.
MAX_ELEMENTS = 64

#: Of larger ones that differ, so many elements around the worst.
MAX_SAMPLE = 8

#: Different values of one node that are shown; ranks whose values agree count once.
MAX_ENTRIES = 8

#: Elements of a tuple that are shown.
MAX_PARTS = 4

#: Characters of all values of a page together; the nodes nearest to the difference come first.
MAX_CHARACTERS = 300_000


@dataclass(frozen=True, slots=True)
class Numbers:
    """One tensor.

    Attributes:
        shape: of the tensor; empty for other values.
        elements: all of them where they are few, in row-major order.
        summary: of many: least, mean, greatest.
        sample: of many, those around the one that differs most: their index, the elements, and which of them that is.
    """

    shape: tuple[int, ...]
    elements: tuple[str, ...]
    summary: str
    sample: tuple[str, tuple[str, ...], int] | None = None

    @property
    def rows(self) -> list[tuple[str, tuple[str, ...], int]]:
        """The elements as rows along the last dim: the index of each row, its elements, and the number of the first."""
        width = self.shape[-1] if self.shape else 1
        if not self.elements or not width:
            return []
        return [
            (_row_index(self.shape, i), self.elements[i : i + width], i) for i in range(0, len(self.elements), width)
        ]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank computed, or several ranks alike.

    Attributes:
        ranks: as text: "0–3, 6".
        part: of a tuple: "[1]"; else "".
        before, after: None where there is none.
        differing: numbers of the elements that differ, where all are shown.
        worst: number of the element that differs most, where all are shown.
        verdict: how they compare, in words; "" where the relation says it.
        wrong: whether they should be equal and are not.
    """

    ranks: str
    part: str
    before: Numbers | None
    after: Numbers | None
    differing: tuple[int, ...]
    worst: int | None
    verdict: str
    wrong: bool


@dataclass(frozen=True, slots=True)
class Record:
    """The values of a node and its counterpart.

    Attributes:
        before, after: their names; "" where there is none.
        entries: per rank.
        more: what is left out, in words.
    """

    before: str
    after: str
    entries: tuple[Entry, ...]
    more: str

    @property
    def size(self) -> int:
        """Characters that it takes, about."""
        texts = [n for e in self.entries for n in (e.before, e.after) if n is not None]
        return 80 + sum(
            60 + sum(len(t) + 1 for t in n.elements) + len(n.summary) + 60 * (n.sample is not None) for n in texts
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """Both runs, and the ranks to show, the most telling first."""

    before: Run | None
    after: Run | None
    ranks: Sequence[int]


def record(runs: Runs, before: str, after: str, comparable: bool) -> Record | None:
    """Return the values of a node; None where none is known.

    Args:
        before, after: its names in the two graphs; "" where it has none.
        comparable: whether both are to be equal, so that a difference is wrong.
    """
    old, new = _by_rank(runs.before, before), _by_rank(runs.after, after)
    groups: dict[tuple[object, ...], tuple[list[int], list[Entry]]] = {}
    left_out = 0
    for rank in runs.ranks:
        if rank not in old and rank not in new:
            continue
        entries = _entries(old.get(rank), new.get(rank), comparable)
        key = tuple(entries)
        if key not in groups and len(groups) >= MAX_ENTRIES:
            left_out += 1
        else:
            groups.setdefault(key, ([], entries))[0].append(rank)
    if not groups or not any(entries for _, entries in groups.values()):
        return None
    known = (old.keys() | new.keys()) - set(runs.ranks)
    found = [
        Entry(rank_text(ranks), e.part, e.before, e.after, e.differing, e.worst, e.verdict, e.wrong)
        for ranks, entries in groups.values()
        for e in entries
    ]
    more = left_out + len(known)
    return Record(before, after, tuple(found), f"{count(more, 'further rank')}" if more else "")


def compared(relation: Relation) -> bool:
    """Whether two values of this relation are to be compared element by element: they are equal, or should be."""
    return relation.kind == "equal" or not relation.explained


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks as text, neighbours joined: "0–3, 6"."""
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


def _entries(before: Any, after: Any, comparable: bool) -> list[Entry]:
    if isinstance(before, (tuple, list)) or isinstance(after, (tuple, list)):
        old = list(before)[:MAX_PARTS] if isinstance(before, (tuple, list)) else []
        new = list(after)[:MAX_PARTS] if isinstance(after, (tuple, list)) else []
        found = []
        for i in range(max(len(old), len(new))):
            pair = (old[i] if i < len(old) else None, new[i] if i < len(new) else None)
            entry = _entry(f"[{i}]", *pair, comparable)
            found += [entry] if entry is not None else []
        return found
    entry = _entry("", before, after, comparable)
    return [entry] if entry is not None else []


def _entry(part: str, before: Any, after: Any, comparable: bool) -> Entry | None:
    old, new = (_tensor(v) for v in (before, after))
    if old is None and new is None:
        return None
    both = old is not None and new is not None
    if not both or not comparable:
        return Entry("", part, _numbers(old), _numbers(new), (), None, "", False)
    assert old is not None
    assert new is not None
    if old.shape != new.shape:
        verdict = f"of shape {list(new.shape)}, where the original has {list(old.shape)}"
        return Entry("", part, _numbers(old), _numbers(new), (), None, verdict, True)
    differ = _differ(old, new)
    if not bool(differ.any()):
        return Entry("", part, _numbers(old), _numbers(new), (), None, "equal", False)
    numbers, flat_old, flat_new = differ.reshape(-1).nonzero().reshape(-1), old.reshape(-1), new.reshape(-1)
    distance = (flat_new.double() - flat_old.double()).abs()
    worst = int(numbers[int(torch.nan_to_num(distance[numbers], nan=math.inf, posinf=math.inf).argmax())])
    one, other = _apart(flat_old[worst].item(), flat_new[worst].item())
    gap = float(distance[worst])
    verdict = (
        f"{len(numbers)} of {count(old.numel(), 'element')} differ, most at {_index(old.shape, worst)}: {one} ⇒ {other}"
    )
    if math.isfinite(gap):
        verdict += f", difference {gap:.3g}"
    few = old.numel() <= MAX_ELEMENTS
    pair = _distinct(old, new, differ) if few else _sampled(old, new, differ, worst)
    return Entry("", part, *pair, tuple(numbers.tolist()) if few else (), worst if few else None, verdict, True)


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return None


def _differ(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Which elements differ by more than rounding explains; NaN equals NaN."""
    if not (old.is_floating_point() and new.is_floating_point()):
        return old != new
    finite = old[old.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return ~torch.isclose(new.double(), old.double(), rtol=0.0, atol=TOLERANCE * scale, equal_nan=True)


def _numbers(value: torch.Tensor | None) -> Numbers | None:
    if value is None:
        return None
    shape = tuple(value.shape)
    if value.numel() <= MAX_ELEMENTS:
        return Numbers(shape, tuple(map(_number, value.reshape(-1).tolist())), "")
    if value.is_complex():
        return Numbers(shape, (), f"{value.numel()} complex numbers")
    wide = value.double()
    finite = wide[wide.isfinite()]
    parts: list[str] = []
    if finite.numel():
        parts = [f"{name} {_number(float(f(finite)))}" for name, f in _STATISTICS]
    strange = value.numel() - finite.numel()
    if strange:
        parts.append(f"{strange} not finite")
    return Numbers(shape, (), ", ".join(parts))


_STATISTICS = (("least", torch.min), ("mean", torch.mean), ("greatest", torch.max))


def _distinct(old: torch.Tensor, new: torch.Tensor, differ: torch.Tensor) -> tuple[Numbers, Numbers]:
    """Both as numbers, with so many digits that what differs looks different."""
    shape = tuple(old.shape)
    one, other = _texts(old.reshape(-1), new.reshape(-1), differ.reshape(-1))
    return Numbers(shape, one, ""), Numbers(shape, other, "")


def _sampled(old: torch.Tensor, new: torch.Tensor, differ: torch.Tensor, worst: int) -> tuple[Numbers, Numbers]:
    """Both in summary, and the elements around the worst one, along the last dim."""
    shape = tuple(old.shape)
    row = worst - worst % shape[-1]
    first = max(row, min(worst - MAX_SAMPLE // 2, row + shape[-1] - MAX_SAMPLE))
    part = slice(first, min(first + MAX_SAMPLE, row + shape[-1]))
    index = _row_index(shape, row).removesuffix(":]") or "["
    index += f"{first - row}:{part.stop - row}]"
    found = []
    texts = _texts(old.reshape(-1)[part], new.reshape(-1)[part], differ.reshape(-1)[part])
    for side, elements in zip((old, new), texts, strict=True):
        numbers = _numbers(side)
        assert numbers is not None  # there is a tensor
        found.append(Numbers(shape, (), numbers.summary, (index, elements, worst - first)))
    return found[0], found[1]


def _texts(old: torch.Tensor, new: torch.Tensor, differ: torch.Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    pairs = [
        _apart(a, b) if apart else (_number(a), _number(b))
        for a, b, apart in zip(old.tolist(), new.tolist(), differ.tolist(), strict=True)
    ]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def _number(value: Any, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _apart(one: Any, other: Any) -> tuple[str, str]:
    for digits in (4, 6, 9, 13):
        pair = _number(one, digits), _number(other, digits)
        if pair[0] != pair[1]:
            return pair
    return repr(one), repr(other)


def _index(shape: Sequence[int], number: int) -> str:
    found: list[int] = []
    for size in reversed(shape):
        found.append(number % size)
        number //= size
    return str(found[::-1])


def _row_index(shape: Sequence[int], number: int) -> str:
    return "" if len(shape) < 2 else f"{_index(shape, number)[:-1].rpartition(',')[0]}, :]"


def as_data(found: Record) -> dict[str, Any]:
    """The record as the page's script reads it: see `showValues` in report.js."""

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


__all__ = ["Entry", "Numbers", "Record", "Runs", "as_data", "compared", "rank_text", "ranks_text", "record"]
