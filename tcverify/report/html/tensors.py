"""Two tensors side by side: their numbers as text, and which elements differ by more than rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tcverify.explain.relations import TOLERANCE
from tcverify.report.sanitize import plural

#: Tensors with up to this many elements are shown whole.
MAX_ELEMENTS = 64

#: Integers below this are shown with all digits: the primes of the exact domain are smaller.
MAX_WHOLE = 1 << 24

#: For larger tensors that differ, number of elements shown around the worst.
MAX_SAMPLE = 8

#: Number of elements of a tuple that are shown.
MAX_PARTS = 4


@dataclass(frozen=True, slots=True)
class Numbers:
    """One tensor.

    Attributes:
        shape: of the tensor; empty for other values.
        elements: all of them if they are few, in row-major order.
        summary: of a large tensor: minimum, mean, maximum.
        sample: of a large tensor, the elements around the one that differs most: their index, the elements, and the position of
            that one.
    """

    shape: tuple[int, ...]
    elements: tuple[str, ...]
    summary: str
    sample: tuple[str, tuple[str, ...], int] | None = None

    @property
    def rows(self) -> list[tuple[str, tuple[str, ...], int]]:
        """The elements as rows along the last dim: the index of each row, its elements, and the number of its first element."""
        width = self.shape[-1] if self.shape else 1
        if not self.elements or not width:
            return []
        return [
            (_row_index(self.shape, i), self.elements[i : i + width], i) for i in range(0, len(self.elements), width)
        ]


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """What one rank computed, or several ranks with equal results.

    Attributes:
        ranks: as text: "0–3, 6".
        part: of a tuple: "[1]"; else "".
        before, after: None if there is none.
        differing: numbers of the elements that differ, if all are shown.
        worst: number of the element that differs most, if all are shown.
        verdict: how they compare, in words; "" if the relation says it.
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


def entries_of(before: Any, after: Any, comparable: bool) -> list[ValueEntry]:
    """Compare two values: one entry, or one per element of a tuple.

    Args:
        before, after: None if there is none.
        comparable: whether they should be equal.
    """
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


def _entry(part: str, before: Any, after: Any, comparable: bool) -> ValueEntry | None:
    old, new = (_tensor(v) for v in (before, after))
    if old is None and new is None:
        return None
    both = old is not None and new is not None
    if not both or not comparable:
        return ValueEntry("", part, _numbers(old), _numbers(new), (), None, "", False)
    assert old is not None
    assert new is not None
    if old.shape != new.shape:
        verdict = f"of shape {list(new.shape)}, where the original has {list(old.shape)}"
        return ValueEntry("", part, _numbers(old), _numbers(new), (), None, verdict, True)
    differ = _differ(old, new)
    if not bool(differ.any()):
        return ValueEntry("", part, _numbers(old), _numbers(new), (), None, "equal", False)
    numbers, flat_old, flat_new = differ.reshape(-1).nonzero().reshape(-1), old.reshape(-1), new.reshape(-1)
    distance = (flat_new.double() - flat_old.double()).abs()
    worst = int(numbers[int(torch.nan_to_num(distance[numbers], nan=math.inf, posinf=math.inf).argmax())])
    one, other = _apart(flat_old[worst].item(), flat_new[worst].item())
    gap = float(distance[worst])
    verdict = f"{len(numbers)} of {plural(old.numel(), 'element')} differ, most at {_index(old.shape, worst)}: {one} ⇒ {other}"
    if math.isfinite(gap):
        verdict += f", difference {gap:.3g}"
    few = old.numel() <= MAX_ELEMENTS
    pair = _distinct(old, new, differ) if few else _sampled(old, new, differ, worst)
    return ValueEntry("", part, *pair, tuple(numbers.tolist()) if few else (), worst if few else None, verdict, True)


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
    """Both as numbers, with enough digits to show a difference."""
    shape = tuple(old.shape)
    one, other = _texts(old.reshape(-1), new.reshape(-1), differ.reshape(-1))
    return Numbers(shape, one, ""), Numbers(shape, other, "")


def _sampled(old: torch.Tensor, new: torch.Tensor, differ: torch.Tensor, worst: int) -> tuple[Numbers, Numbers]:
    """Summaries of both, and the elements around the worst one, along the last dim."""
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
        assert numbers is not None  # at least one is a tensor
        found.append(Numbers(shape, (), numbers.summary, (index, elements, worst - first)))
    return found[0], found[1]


def _texts(old: torch.Tensor, new: torch.Tensor, differ: torch.Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    pairs = [
        _apart(a, b) if apart else (_number(a), _number(b))
        for a, b, apart in zip(old.tolist(), new.tolist(), differ.tolist(), strict=True)
    ]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def _number(value: Any, digits: int = 4) -> str:
    """A number as text. Residues of the exact domain are integers, and all their digits matter."""
    if not isinstance(value, float):
        return str(value)
    whole = value.is_integer() and abs(value) < MAX_WHOLE
    return str(int(value)) if whole else f"{value:.{digits}g}"


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


__all__ = ["MAX_ELEMENTS", "MAX_SAMPLE", "Numbers", "ValueEntry", "entries_of"]
