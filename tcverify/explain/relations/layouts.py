"""Relations that explain a value on every rank: the same, a shard, a gathered whole, a partial sum, and two of these, nested.

All compare flat contents as well, so that what is divided may be a view of the original's value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tcverify.explain.relations.grouping import Grouping
from tcverify.explain.relations.relation import Relation
from tcverify.explain.relations.tensors import (
    FLOATING,
    Measure,
    Values,
    concatenate_or_none,
    strip_leading_ones,
    sum_tensors,
    values_close,
    view_or_none,
)

#: Larger values are not examined for permuted dims, or for two divisions at once.
MAX_NESTED = 1 << 20

#: Dims of a value whose orders are tried.
MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class RelationContext:
    """What relations are looked for in.

    Attributes:
        groupings: over which values may be divided.
        measure: when two values are the same.
        nested: whether two divisions at once are looked for.
    """

    groupings: Sequence[Grouping]
    measure: Measure = FLOATING
    nested: bool = True


def layout(new: Values, old: Values, name: str, setting: RelationContext) -> Relation | None:
    """The relation that explains one node's values by another's, or None.

    Args:
        new: by rank.
        old: by rank; of all ranks of `new` at least.
    """
    measure = setting.measure
    if all(values_close(new[r], old[r], measure) for r in new):
        return Relation("equal", name, f"equal to the original's '{name}'")
    if all(_flat(new[r], old[r], measure) for r in new):
        return Relation("reshaped", name, f"the original's '{name}' in another shape")
    for grouping in setting.groupings:
        if grouping.groups.keys() >= new.keys() and grouping.groups.keys() <= old.keys():
            found = _divided(new, old, name, grouping, setting)
            if found is not None:
                return found
    if not setting.nested or sum(v.numel() for v in (*new.values(), *old.values())) > MAX_NESTED:
        return None
    return _transposed(new, old, name, measure) or _nested(new, old, name, setting)


def _flat(value: torch.Tensor, expected: torch.Tensor, measure: Measure) -> bool:
    return value.numel() == expected.numel() and values_close(value.reshape(-1), expected.reshape(-1), measure)


def _divided(new: Values, old: Values, name: str, grouping: Grouping, setting: RelationContext) -> Relation | None:
    """One division over one grouping."""
    measure, where, groups = setting.measure, grouping.where, grouping.groups
    for dim in _dims(new, old, grouping):
        if all(_is_part(new, old, r, dim, grouping, measure) for r in new):
            varies = not all(values_close(old[m], old[r], measure) for r in new for m in groups[r])
            view = _view(new, old, dim, grouping)
            seen = f", seen as {list(view)}," if view else ""
            text = f"a shard of the original's '{name}'{seen} along dim {dim} {where}"
            if varies:
                text += ", each rank's of its own value"
            return Relation("shard", name, text, dim, groups=groups, loses=varies, view=view)
    for dim in _dims(old, new, grouping):
        if all(_is_whole(new[r], [old[m] for m in groups[r]], dim, measure) for r in new):
            rank = grouping.example(new)
            view = _otherwise(new[rank].shape, concatenate_or_none([old[m] for m in groups[rank]], dim))
            text = f"the original's '{name}' gathered along dim {dim} {where}{_in_shape(view)}"
            return Relation("gathered", name, text, dim, groups=groups, view=view)
    if all(m in new for r in new for m in groups[r]) and all(
        _is_sum(old[r], [new[m] for m in groups[r]], measure) for r in new
    ):
        view = _otherwise(next(iter(new.values())).shape, old[next(iter(new))])
        alike = all(values_close(new[m], new[r], measure) for r in new for m in groups[r])
        text = f"a partial sum of the original's '{name}' {where}{_in_shape(view)}"
        return Relation("partial", name, text, groups=groups, view=view, alike=alike)
    varying = not all(values_close(old[m], old[r], measure) for r in new for m in groups[r])
    if varying and all(_is_sum(new[r], [old[m] for m in groups[r]], measure) for r in new):
        view = _otherwise(next(iter(new.values())).shape, old[next(iter(new))])
        text = f"the sum of the original's '{name}' {where}{_in_shape(view)}"
        return Relation("reduced", name, text, groups=groups, view=view)
    return None


def _view(new: Values, old: Values, dim: int, grouping: Grouping) -> tuple[int, ...]:
    """The shape in which a value is divided along a dim, if different from its own."""
    rank = grouping.example(new)
    shape = list(new[rank].shape)
    shape[dim] = sum(sizes_along(new, old, dim, rank, grouping))
    return _otherwise(shape, old[rank])


def _otherwise(shape: Sequence[int], value: torch.Tensor | None) -> tuple[int, ...]:
    """A shape, where a value has another one."""
    return () if value is None or strip_leading_ones(shape) == strip_leading_ones(value.shape) else tuple(shape)


def _in_shape(view: Sequence[int]) -> str:
    return f", in shape {list(view)}" if view else ""


def _dims(part: Values, whole: Values, grouping: Grouping) -> Iterator[int]:
    """The dims along which `part` may be divided: those that give the whole's shape, then those that give a view of it."""
    rank = grouping.example(part)
    if rank not in whole:
        return
    shape, total_shape = part[rank].shape, whole[rank].shape
    views = []
    for dim in range(len(shape)):
        joined_shape = list(shape)
        joined_shape[dim] = sum(sizes_along(part, whole, dim, rank, grouping))
        if strip_leading_ones(joined_shape) == strip_leading_ones(total_shape):
            yield dim
        else:
            views.append(dim)
    yield from views


def sizes_along(part: Values, whole: Values, dim: int, rank: int, grouping: Grouping) -> list[int]:
    """How long the parts of the members of `rank`'s group are; as torch.chunk makes them where members have none. Nothing where
    the part of `rank` has no such dim."""
    if part[rank].dim() <= dim:
        return []
    group = grouping.groups[rank]
    if all(m in part and part[m].dim() > dim for m in group):
        return [part[m].shape[dim] for m in group]
    length = part[rank].shape[dim]
    size = whole[rank].shape[dim] if whole[rank].dim() > dim else length * len(group)
    step = -(-size // len(group))
    return [max(0, min(size, (i + 1) * step) - i * step) for i in range(len(group))]


def slice_part(
    old: torch.Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int], position: int
) -> torch.Tensor | None:
    """The part of a value at a position, when it is divided along a dim of the view whose parts have this shape."""
    if not 0 <= position < len(sizes):
        return None
    whole = list(shape)
    whole[dim] = sum(sizes)
    seen = view_or_none(old, whole)
    return None if seen is None else seen.narrow(dim, sum(sizes[:position]), sizes[position])


def _is_part(new: Values, old: Values, rank: int, dim: int, grouping: Grouping, measure: Measure) -> bool:
    sizes = sizes_along(new, old, dim, rank, grouping)
    part = slice_part(old[rank], new[rank].shape, dim, sizes, grouping.position(rank))
    return part is not None and values_close(new[rank], part, measure)


def _is_whole(value: torch.Tensor, parts: Sequence[torch.Tensor], dim: int, measure: Measure) -> bool:
    if value.numel() != sum(part.numel() for part in parts):
        return False
    found = concatenate_or_none(parts, dim)
    seen = None if found is None else view_or_none(found, value.shape)
    return seen is not None and values_close(value, seen, measure)


def _is_sum(value: torch.Tensor, addends: Sequence[torch.Tensor], measure: Measure) -> bool:
    if any(addend.numel() != value.numel() for addend in addends):
        return False
    found = sum_tensors(addends)
    seen = None if found is None else view_or_none(found, value.shape)
    return seen is not None and values_close(value, seen, measure)


def _transposed(new: Values, old: Values, name: str, measure: Measure) -> Relation | None:
    """The same with its dims in another order."""
    rank = next(iter(new))
    dims = old[rank].dim()
    if new[rank].dim() != dims or not 2 <= dims <= MAX_DIMS or new[rank].numel() < 2:
        return None
    for order in itertools.permutations(range(dims)):
        if all(old[r].dim() == dims and values_close(new[r], old[r].permute(order), measure) for r in new):
            text = f"the original's '{name}' with its dims in order {list(order)}"
            return Relation("transposed", name, text)
    return None


# -------------------------------------------------------------------------------------------------------------- nested


def _nested(new: Values, old: Values, name: str, setting: RelationContext) -> Relation | None:
    """One division of what is divided over another grouping: the outer one is undone, then the inner one is looked for."""
    for outer, inner in itertools.product(setting.groupings, repeat=2):
        if not all(g.groups.keys() >= new.keys() and g.groups.keys() <= old.keys() for g in (outer, inner)):
            continue
        if outer is not inner and all(m in new for r in new for m in outer.groups[r]):
            for words, undone in _undo_outer_division(new, old, outer, inner):
                found = _divided(undone, old, name, inner, setting)
                if found is not None and found.kind in ("shard", "partial"):
                    text = f"{words} {outer.where} of {found.text}"
                    return Relation("nested", name, text, found.dim, groups=found.groups, loses=found.loses)
        summed = _summed(old, outer)
        if summed is None or all(values_close(old[m], old[r], setting.measure) for r in new for m in outer.groups[r]):
            continue  # a sum of equal values is a multiple: nothing that a sound rewrite divides
        found = _divided(new, summed, name, inner, setting)
        if found is not None and found.kind == "shard" and not found.loses:
            text = f"a shard along dim {found.dim} {inner.where} of the sum of the original's '{name}' {outer.where}"
            return Relation("nested", name, text, found.dim, groups=inner.groups)
    return None


def _undo_outer_division(new: Values, old: Values, outer: Grouping, inner: Grouping) -> Iterator[tuple[str, Values]]:
    """The values as they were before the outer division, where sizes allow that the inner one gives them."""
    rank = inner.example(new)
    size, whole = new[rank].numel(), old[rank].numel()
    members = len(inner.groups[rank])
    if size * members == whole or size == whole:
        summed = _summed(new, outer)
        if summed is not None:
            yield "a partial sum", summed
    if size * members * len(outer.groups[rank]) == whole or size * len(outer.groups[rank]) == whole:
        for dim in range(new[rank].dim()):
            put_together = _joined(new, outer, dim)
            if put_together is not None:
                yield f"a shard along dim {dim}", put_together


def _summed(values: Values, grouping: Grouping) -> Values | None:
    """Per rank the sum over its group; None where there is none."""
    found = {
        rank: sum_tensors([values[m] for m in grouping.groups[rank]]) for rank in values if rank in grouping.groups
    }
    return _complete(found, values)


def _joined(values: Values, grouping: Grouping, dim: int) -> Values | None:
    """Per rank its group's values along `dim`; None where they cannot be joined."""
    found = {rank: concatenate_or_none([values[m] for m in grouping.groups[rank]], dim) for rank in values}
    return _complete(found, values)


def _complete(found: Mapping[int, torch.Tensor | None], values: Values) -> Values | None:
    complete = {rank: made for rank, made in found.items() if made is not None}
    return complete if len(complete) == len(values) else None
