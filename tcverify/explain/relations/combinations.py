"""Relations that are linear combinations: a multiple, a sum whose addends are lost or doubled, something added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

import torch

from tcverify.explain.relations.forms import Form
from tcverify.explain.relations.grouping import Grouping
from tcverify.explain.relations.layouts import RelationContext
from tcverify.explain.relations.relation import Relation
from tcverify.explain.relations.tensors import Measure, Values, sum_tensors, values_close, view_or_none

#: Values of the original, by node name, that could have been added or left out.
Pool: TypeAlias = Sequence[tuple[str, Values]]

#: Larger values are not searched for linear combinations.
MAX_ELEMENTS = 1 << 18

#: Values with fewer elements are multiples of each other by chance: then factors must be simple.
FEW = 3

#: A factor is simple when it is that close to a fraction of a denominator that small, and no larger than that.
SIMPLE, DENOMINATOR, LARGEST = 1e-7, 16, 64


def relate_scaled(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
) -> Relation | None:
    rank = differing[0]
    if not all(_linear(new[r], form.expected[r]) for r in differing):
        return None
    for factor in _factors(new[rank], form.expected[rank], setting, rank):
        if all(values_close(new[r], form.expected[r] * factor, setting.measure) for r in differing):
            where = next((f" {g.where}" for g in _of_size(factor, setting.groupings, rank)), "")
            text = f"{format_factor(factor)} {form.text}{where if form.grouping is None else ''}"
            return Relation("scaled", name, text, form.dim, tuple(differing))
    return None


def _linear(value: torch.Tensor, expected: torch.Tensor) -> bool:
    floating = value.is_floating_point() and expected.is_floating_point()
    return floating and value.shape == expected.shape and value.numel() <= MAX_ELEMENTS


def _factors(value: torch.Tensor, expected: torch.Tensor, setting: RelationContext, rank: int) -> Iterator[float]:
    """Factors by which a value could be a multiple of another."""
    modulus = setting.measure.modulus
    sizes = dict.fromkeys(len(g.groups[rank]) for g in setting.groupings if rank in g.groups)
    if modulus:
        for n in dict.fromkeys([*sizes, 2, 3, 4]):
            yield float(n)
            yield float(pow(n, -1, modulus))
        yield -1.0
        return
    factor = _fitted(value, expected)
    simple = _simple(factor) if factor is not None else None
    if simple:
        yield simple
    if factor and value.numel() >= FEW:
        yield factor


def _quotient(value: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The factor that fits best; rounded when it is simple; None when values are so few that any factor fits."""
    factor = _fitted(value, expected)
    if factor is None:
        return None
    simple = _simple(factor)
    return simple if simple is not None else factor if value.numel() >= FEW else None


def _fitted(value: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The factor that fits best, if there is any."""
    square = float((expected * expected).sum())
    factor = float((value * expected).sum()) / square if square > 0 else float("nan")
    return factor if abs(factor) < float("inf") else None


def _simple(factor: float) -> float | None:
    near = Fraction(factor).limit_denominator(DENOMINATOR)
    return float(near) if abs(float(near) - factor) <= SIMPLE * max(1.0, abs(factor)) and abs(near) <= LARGEST else None


def _of_size(factor: float, groupings: Sequence[Grouping], rank: int) -> Iterator[Grouping]:
    """The groupings whose groups have as many members as a factor says."""
    for grouping in groupings:
        n = len(grouping.groups.get(rank, ()))
        if n and factor in (float(n), 1.0 / n):
            yield grouping


def format_factor(factor: float) -> str:
    """A factor in words."""
    near = Fraction(factor).limit_denominator(DENOMINATOR)
    if abs(factor - 1) < 1e-6 and factor != 1:
        return f"(1 {'+' if factor > 1 else '−'} {abs(factor - 1):.2g}) times"
    if float(near) != factor:
        return f"{factor:.9g} times"
    if near == -1:
        return "the negative of"
    return f"{near.numerator} times" if near.denominator == 1 else f"{near} of"


def relate_addends(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
) -> Relation | None:
    """Of a sum over a group: which members' addends are missing, or counted more than once."""
    rank = differing[0]
    if setting.measure.modulus or not _linear(new[rank], form.expected[rank]):
        return None
    for source, values in pool:
        for grouping in setting.groupings:
            group = grouping.groups.get(rank, ())
            if not group or not all(m in values and values[m].is_floating_point() for m in group):
                continue
            whole = sum_tensors([values[m] for m in group])
            seen = None if whole is None else view_or_none(whole, old[rank].shape)
            if seen is None or not values_close(seen, old[rank], setting.measure):
                continue
            parts = [form.local(v, rank) for m in group if (v := view_or_none(values[m], old[rank].shape)) is not None]
            counts = _combination(new[rank], [p for p in parts if p is not None], setting.measure)
            if counts is not None and len(counts) == len(group):
                text = f"{form.text} on rank {rank}, {_describe_counts(counts, group, source)} {grouping.where}"
                return Relation("addends", name, text, form.dim, tuple(differing), groups=grouping.groups)
    return None


def _combination(value: torch.Tensor, parts: Sequence[torch.Tensor], measure: Measure) -> list[float] | None:
    """Simple coefficients that combine parts of one shape to a value; None if there are none."""
    if not parts or any(p.shape != value.shape for p in parts):
        return None
    columns = torch.stack([p.reshape(-1).double() for p in parts], 1)
    if not (bool(columns.isfinite().all()) and bool(value.isfinite().all())):
        return None
    fitted = torch.linalg.lstsq(columns, value.reshape(-1, 1).double(), driver="gelsd").solution.flatten().tolist()
    counts = [_simple(c) for c in fitted]
    if any(count is None for count in counts):
        return None
    found = [count for count in counts if count is not None]
    combined = sum((p * c for p, c in zip(parts, found, strict=True)), torch.zeros_like(value))
    scale = max(float(p.abs().max()) for p in parts)
    return found if float((combined - value).abs().max()) <= measure.tolerance * scale else None


def _describe_counts(counts: Sequence[float], group: Sequence[int], source: str) -> str:
    """Which addends are missing or counted otherwise than once."""
    missing = [rank for rank, count in zip(group, counts, strict=True) if count == 0]
    told = []
    if missing:
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        told.append(f"without the addend '{source}' of {ranks}")
    for rank, count in zip(group, counts, strict=True):
        if count not in (0.0, 1.0):
            told.append(
                f"with the addend '{source}' of rank {rank} counted {Fraction(count).limit_denominator(99)} times"
            )
    return " and ".join(told)


def relate_added(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
) -> Relation | None:
    """A multiple of another value is added, or taken away."""
    rank = differing[0]
    if setting.measure.modulus or not all(_linear(new[r], form.expected[r]) for r in differing):
        return None
    for source, values in pool:
        if not all(r in values and values[r].is_floating_point() for r in differing):
            continue
        parts = {r: p for r in differing if (p := _broadcast(values[r], form, old[r], r)) is not None}
        if len(parts) < len(differing):
            continue
        factor = _quotient(new[rank] - form.expected[rank], parts[rank])
        if factor is None or abs(factor) <= setting.measure.tolerance:
            continue
        if all(values_close(new[r], form.expected[r] + parts[r] * factor, setting.measure) for r in differing):
            return Relation("sum", name, f"{form.text} {_plus(factor)} '{source}'", form.dim, tuple(differing))
    return None


def _plus(factor: float) -> str:
    sign = "plus" if factor > 0 else "minus"
    return sign if abs(factor) == 1 else f"{sign} {format_factor(abs(factor))}"


def _broadcast(value: torch.Tensor, form: Form, like: torch.Tensor, rank: int) -> torch.Tensor | None:
    """A value in the form of one of another shape, as far as it extends over that."""
    if value.dim() > like.dim() and value.numel() != like.numel():
        return None
    if value.numel() != like.numel():
        try:
            value = value.expand(like.shape)
        except RuntimeError:
            return None
    seen = view_or_none(value, like.shape)
    return None if seen is None else form.local(seen, rank)
