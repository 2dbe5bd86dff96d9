"""Relations that no sound rewrite is known to leave behind, but that say what went wrong: a multiple, a lost addend, …"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tcverify.explain.relations.combinations import Pool, relate_added, relate_addends, relate_scaled
from tcverify.explain.relations.forms import Form, forms
from tcverify.explain.relations.layouts import RelationContext, slice_part
from tcverify.explain.relations.relation import Relation
from tcverify.explain.relations.tensors import Measure, Values, values_close

#: Larger values are not searched for orders of rows.
MAX_ELEMENTS = 1 << 18

#: Most rows whose order is looked for, and most that are listed.
MAX_ROWS, MAX_LISTED = 64, 16

#: Values with no more elements have some in common by chance.
FEW = 3


def recognise_mistake(new: Values, old: Values, name: str, pool: Pool, setting: RelationContext) -> Relation | None:
    """What is wrong with values that should be those of the original's node `name`, or None where nothing is recognised.

    Args:
        pool: what the original's node reads, among others.
    """
    found = list(forms(new, old, name, setting))
    for form in found:
        differing = tuple(r for r in new if not values_close(new[r], form.expected[r], setting.measure))
        if not differing or any(new[r].numel() == 0 for r in differing):
            continue
        for look in (
            _dtype,
            _wrong_shard,
            _not_finite,
            relate_scaled,
            relate_addends,
            relate_added,
            _permuted,
            _other_rank,
        ):
            relation = look(new, old, name, form, differing, pool, setting)
            if relation is not None:
                return relation
    for form in found:
        differing = tuple(r for r in new if not values_close(new[r], form.expected[r], setting.measure))
        if differing:
            relation = _partly(new, form, name, differing, setting)
            if relation is not None:
                return relation
    return None


# ------------------------------------------------------------------------------------------------------- one value alone


def _dtype(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
) -> Relation | None:
    if not all(new[r].dtype != old[r].dtype for r in differing):
        return None
    if not all(values_close(new[r].double(), form.expected[r].double(), setting.measure) for r in differing):
        return None
    rank = differing[0]
    was, now = (str(v.dtype).removeprefix("torch.") for v in (old[rank], new[rank]))
    return Relation("dtype", name, f"{form.text}, but {now} and not {was}", form.dim, tuple(differing))


def _wrong_shard(
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
) -> Relation | None:
    if form.dim is None or form.grouping is None or form.sizes is None:
        return None
    placed: dict[int, int] = {}
    for rank in differing:
        sizes = form.sizes(rank)
        parts = [slice_part(old[rank], new[rank].shape, form.dim, sizes, i) for i in range(len(sizes))]
        at = next(
            (i for i, p in enumerate(parts) if p is not None and values_close(new[rank], p, setting.measure)), None
        )
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
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
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
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
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
        listed = f" in order {order}" if len(order) <= MAX_LISTED else " in another order"
        text = f"{form.text} with its rows along dim {dim}{listed} on rank {rank}"
        return Relation("permuted", name, text, dim, tuple(differing))
    return None


def _order(value: torch.Tensor, expected: torch.Tensor, dim: int, measure: Measure) -> list[int] | None:
    """Which rows of `expected` occur in `value`, if all do and some are distinct in more than position."""
    size = value.shape[dim]
    if not 2 <= size <= MAX_ROWS:
        return None
    rows, known = value.movedim(dim, 0), expected.movedim(dim, 0)
    found: list[int] = []
    for i in range(size):
        tried = [i, *range(size)]
        at = next((j for j in tried if values_close(rows[i], known[j], _absolute(known[j], expected, measure))), None)
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
    """The order of equal chunks, if an order of rows amounts to that."""
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
    new: Values, old: Values, name: str, form: Form, differing: Sequence[int], pool: Pool, setting: RelationContext
) -> Relation | None:
    rank = differing[0]
    members = dict.fromkeys(m for g in setting.groupings for m in g.groups.get(rank, ()) if m != rank and m in old)
    for member in members:
        there = form.local(old[member], rank)
        if there is not None and values_close(new[rank], there, setting.measure):
            text = f"on rank {rank} what {form.text} is on rank {member}"
            return Relation("other-rank", name, text, form.dim, tuple(differing))
    return None


def _partly(new: Values, form: Form, name: str, differing: Sequence[int], setting: RelationContext) -> Relation | None:
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
