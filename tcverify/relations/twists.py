"""Relations that no sound rewrite is known to leave behind, but that say what went wrong: a multiple, a lost addend, …"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeAlias

import torch

from tcverify.relations.forms import Form, forms
from tcverify.relations.grouping import Grouping
from tcverify.relations.layouts import Setting, part_of
from tcverify.relations.relation import Relation
from tcverify.relations.tensors import Measure, Values, same, total, viewed

#: Values of the original, by node name, that could have been added or left out.
Pool: TypeAlias = Sequence[tuple[str, Values]]

#: Larger values are not searched for linear combinations and orders of rows.
MAX_ELEMENTS = 1 << 18

#: Most rows whose order is told.
MAX_ROWS = 64

#: Values with fewer elements are multiples of each other by chance: then factors must be simple.
FEW = 3

#: A factor is simple when it is that close to a fraction of a denominator that small, and no larger than that.
SIMPLE, DENOMINATOR, LARGEST = 1e-7, 16, 64


def twist(new: Values, old: Values, name: str, pool: Pool, setting: Setting) -> Relation | None:
    """What is wrong with values that should be those of the original's node `name`, or None where nothing is recognised.

    Args:
        pool: what the original's node reads, among others.
    """
    found = list(forms(new, old, name, setting))
    for form in found:
        differing = tuple(r for r in new if not same(new[r], form.expected[r], setting.measure))
        if not differing or any(new[r].numel() == 0 for r in differing):
            continue
        for look in (_dtype, _wrong_shard, _not_finite, _scaled, _addends, _sum, _permuted, _other_rank):
            relation = look(new, old, name, form, differing, pool, setting)
            if relation is not None:
                return relation
    for form in found:
        differing = tuple(r for r in new if not same(new[r], form.expected[r], setting.measure))
        if differing:
            relation = _partly(new, form, name, differing, setting)
            if relation is not None:
                return relation
    return None


# ------------------------------------------------------------------------------------------------------- one value alone


def _dtype(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
) -> Relation | None:
    if not all(new[r].dtype != old[r].dtype for r in differing):
        return None
    if not all(same(new[r].double(), form.expected[r].double(), setting.measure) for r in differing):
        return None
    rank = differing[0]
    was, now = (str(v.dtype).removeprefix("torch.") for v in (old[rank], new[rank]))
    return Relation("dtype", name, f"{form.text}, but {now} and not {was}", form.dim, tuple(differing))


def _wrong_shard(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
) -> Relation | None:
    if form.dim is None or form.grouping is None or form.sizes is None:
        return None
    placed: dict[int, int] = {}
    for rank in differing:
        sizes = form.sizes(rank)
        parts = [part_of(old[rank], new[rank].shape, form.dim, sizes, i) for i in range(len(sizes))]
        at = next((i for i, p in enumerate(parts) if p is not None and same(new[rank], p, setting.measure)), None)
        if at is None:
            return None
        placed[rank] = at
    rank = differing[0]
    text = (
        f"shard {placed[rank]} of the original's '{name}' along dim {form.dim} on rank {rank}, "
        f"whose position {form.grouping.where} is {form.grouping.position(rank)}"
    )
    return Relation("wrong-shard", name, text, form.dim, tuple(differing), groups=form.grouping.groups)


def _not_finite(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
) -> Relation | None:
    rank = differing[0]
    value, expected = new[rank], form.expected[rank]
    if not value.is_floating_point() or not expected.is_floating_point():
        return None
    lost = ~value.isfinite() & expected.isfinite()
    count = int(lost.sum())
    if not count:
        return None
    what = "NaN" if bool(value.isnan().any()) else "infinite"
    text = f"{what} in {count} of {value.numel()} elements where {form.text} is finite on rank {rank}"
    return Relation("not-finite", name, text, form.dim, tuple(differing))


def _permuted(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
) -> Relation | None:
    rank = differing[0]
    value, expected = new[rank], form.expected[rank]
    if value.numel() > MAX_ELEMENTS or value.dtype != expected.dtype:
        return None
    for dim in range(value.dim()):
        order = _order(value, expected, dim, setting.measure)
        if order is None:
            continue
        for grouping in setting.groupings:
            chunks = _chunks(order, len(grouping.groups.get(rank, ())))
            if chunks is not None:
                text = f"{form.text} with its chunks along dim {dim} in order {chunks} on rank {rank} {grouping.where}"
                return Relation("permuted", name, text, dim, tuple(differing), groups=grouping.groups)
        listed = f" in order {order}" if len(order) <= DENOMINATOR else " in another order"
        text = f"{form.text} with its rows along dim {dim}{listed} on rank {rank}"
        return Relation("permuted", name, text, dim, tuple(differing))
    return None


def _order(value: torch.Tensor, expected: torch.Tensor, dim: int, measure: Measure) -> list[int] | None:
    """Which rows of `expected` stand in `value`, where all do and where not all are distinct in nothing but place."""
    size = value.shape[dim]
    if not 2 <= size <= MAX_ROWS:
        return None
    rows, known = value.movedim(dim, 0), expected.movedim(dim, 0)
    found: list[int] = []
    for i in range(size):
        tried = [i, *range(size)]
        at = next((j for j in tried if same(rows[i], known[j], _absolute(known[j], expected, measure))), None)
        if at is None:
            return None
        found.append(at)
    return found


def _absolute(row: torch.Tensor, whole: torch.Tensor, measure: Measure) -> Measure:
    """The measure that forgives a row what it forgives the whole."""
    if measure.modulus or not row.is_floating_point() or not row.numel():
        return measure
    own, scale = float(row.abs().max()), float(whole.abs().max())
    return (
        replace(measure, tolerance=min(1e-6, measure.tolerance * scale / own))
        if 0 < own <= scale < float("inf")
        else measure
    )


def _chunks(order: Sequence[int], parts: int) -> list[int] | None:
    """The order of equal chunks, where that is what an order of rows comes to."""
    if parts < 2 or len(order) % parts:
        return None
    size = len(order) // parts
    starts = order[::size]
    if any(start % size for start in starts) or any(
        order[i] != starts[i // size] + i % size for i in range(len(order))
    ):
        return None
    return [start // size for start in starts]


def _other_rank(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
) -> Relation | None:
    rank = differing[0]
    members = dict.fromkeys(m for g in setting.groupings for m in g.groups.get(rank, ()) if m != rank and m in old)
    for member in members:
        there = form.local(old[member], rank)
        if there is not None and same(new[rank], there, setting.measure):
            text = f"on rank {rank} what {form.text} is on rank {member}"
            return Relation("other-rank", name, text, form.dim, tuple(differing))
    return None


def _partly(new: Values, form: Form, name: str, differing: Sequence[int], setting: Setting) -> Relation | None:
    rank = differing[0]
    value, expected = new[rank], form.expected[rank]
    if value.dtype != expected.dtype or value.shape != expected.shape or not value.dim() or value.numel() <= FEW:
        return None
    if setting.measure.modulus or not value.is_floating_point():
        other = value != expected
    else:
        scale = float(expected.abs().max())
        other = ~((value - expected).abs() <= setting.measure.tolerance * scale) & ~(value.isnan() & expected.isnan())
    best: tuple[int, list[int]] | None = None
    for dim in range(value.dim()):
        rows = other.movedim(dim, 0).reshape(value.shape[dim], -1).any(1).nonzero().flatten().tolist()
        if len(rows) < value.shape[dim] and (
            best is None or len(rows) * value.shape[best[0]] < len(best[1]) * value.shape[dim]
        ):
            best = dim, rows
    if best is None:
        return None
    dim, rows = best
    listed = f"index {rows[0]}" if len(rows) == 1 else f"{len(rows)} of {value.shape[dim]} indices"
    text = f"{form.text}, except at {listed} along dim {dim} on rank {rank}"
    return Relation("partly", name, text, dim, tuple(differing))


# --------------------------------------------------------------------------------------------------- linear combinations


def _scaled(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
) -> Relation | None:
    rank = differing[0]
    if not all(_linear(new[r], form.expected[r]) for r in differing):
        return None
    for factor in _factors(new[rank], form.expected[rank], setting, rank):
        if all(same(new[r], form.expected[r] * factor, setting.measure) for r in differing):
            where = next((f" {g.where}" for g in _of_size(factor, setting.groupings, rank)), "")
            text = f"{times(factor)} {form.text}{where if form.grouping is None else ''}"
            return Relation("scaled", name, text, form.dim, tuple(differing))
    return None


def _linear(value: torch.Tensor, expected: torch.Tensor) -> bool:
    floating = value.is_floating_point() and expected.is_floating_point()
    return floating and value.shape == expected.shape and value.numel() <= MAX_ELEMENTS


def _factors(value: torch.Tensor, expected: torch.Tensor, setting: Setting, rank: int) -> Iterator[float]:
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


def times(factor: float) -> str:
    """A factor in words."""
    near = Fraction(factor).limit_denominator(DENOMINATOR)
    if abs(factor - 1) < 1e-6 and factor != 1:
        return f"(1 {'+' if factor > 1 else '−'} {abs(factor - 1):.2g}) times"
    if float(near) != factor:
        return f"{factor:.9g} times"
    if near == -1:
        return "the negative of"
    return f"{near.numerator} times" if near.denominator == 1 else f"{near} of"


def _addends(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
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
            whole = total([values[m] for m in group])
            seen = None if whole is None else viewed(whole, old[rank].shape)
            if seen is None or not same(seen, old[rank], setting.measure):
                continue
            parts = [form.local(v, rank) for m in group if (v := viewed(values[m], old[rank].shape)) is not None]
            counts = _combination(new[rank], [p for p in parts if p is not None], setting.measure)
            if counts is not None and len(counts) == len(group):
                text = f"{form.text} on rank {rank}, {_told(counts, group, source)} {grouping.where}"
                return Relation("addends", name, text, form.dim, tuple(differing), groups=grouping.groups)
    return None


def _combination(value: torch.Tensor, parts: Sequence[torch.Tensor], measure: Measure) -> list[float] | None:
    """Simple coefficients that make a value of parts of one shape; None where there are none."""
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


def _told(counts: Sequence[float], group: Sequence[int], source: str) -> str:
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


def _sum(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: Setting
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
        if all(same(new[r], form.expected[r] + parts[r] * factor, setting.measure) for r in differing):
            return Relation("sum", name, f"{form.text} {_plus(factor)} '{source}'", form.dim, tuple(differing))
    return None


def _plus(factor: float) -> str:
    sign = "plus" if factor > 0 else "minus"
    return sign if abs(factor) == 1 else f"{sign} {times(abs(factor))}"


def _broadcast(value: torch.Tensor, form: Form, like: torch.Tensor, rank: int) -> torch.Tensor | None:
    """A value in the form of one of another shape, as far as it extends over that."""
    if value.dim() > like.dim() and value.numel() != like.numel():
        return None
    if value.numel() != like.numel():
        try:
            value = value.expand(like.shape)
        except RuntimeError:
            return None
    seen = viewed(value, like.shape)
    return None if seen is None else form.local(seen, rank)
