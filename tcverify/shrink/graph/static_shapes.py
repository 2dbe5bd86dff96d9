"""Static shapes in the arguments of views: how they change when the operand gets another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tcverify.ops import TensorSpec, merged_runs, qualified_name
from tcverify.shrink.graph.sketch import SketchStep

Shape = tuple[int, ...]

_RESHAPES = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view"})


def refit_call(step: SketchStep, before: Shape, result: Any, after: Shape, prefer: str) -> SketchStep:
    """Return the call with the static shape adapted to its operand; the call itself if there is nothing to adapt.

    Args:
        before, after: the shape of the first operand.
        result: what the call produced before.
        prefer: see `reshape_like`.
    """
    name = qualified_name(step.target)
    if len(step.args) < 2 or not isinstance(result, TensorSpec):
        return step
    new: Shape | None = None
    if name in _RESHAPES:
        new = reshape_like(before, result.shape, after, prefer)
    elif name == "aten::expand" and len(result.shape) == len(before) == len(after):
        sizes = zip(before, result.shape, after, strict=True)
        new = tuple(now if old == made else made for old, made, now in sizes)
    elif name == "_c10d_functional::all_to_all_single" and before and after:
        return _resplit(step, before[0], after[0])
    if new is None:
        return step
    given = step.args[1]
    open_dims = [isinstance(given, (list, tuple)) and i < len(given) and given[i] == -1 for i in range(len(new))]
    shape = [-1 if free else size for free, size in zip(open_dims, new, strict=True)]
    return replace(step, args=(step.args[0], shape, *step.args[2:]))


def _resplit(step: SketchStep, before: int, after: int) -> SketchStep:
    """The call with splits that are what the old ones were to the rows, where they can be."""
    splits = [list(split) if isinstance(split, (list, tuple)) else None for split in step.args[1:3]]
    new: list[Any] = []
    for split in splits:
        if split is None or not before or any(rows * after % before for rows in split):
            return step
        new.append([rows * after // before for rows in split])
    return replace(step, args=(step.args[0], *new, *step.args[3:]))


def reshape_like(before: Shape, result: Shape, after: Shape, prefer: str = "first") -> Shape | None:
    """The shape of a view of `after` that corresponds to `result` as a view of `before`: the same dims are merged and split.

    Args:
        prefer: which of the dims that one was split into gives way where several could, the "first" or the "last".

    Returns:
        None if there is no such shape.

    Example:
        >>> reshape_like((2, 6, 4), (12, 4), (1, 6, 4))
        (6, 4)
    """
    if len(before) != len(after) or 0 in before or 0 in after or math.prod(before) != math.prod(result):
        return None
    made: list[int] = []
    for merged, split in merged_runs(before, result):
        part = _resized(result[split], math.prod(after[merged]), before[merged], after[merged], prefer)
        if part is None:
            return None
        made += part
    return tuple(made)


def _resized(dims: Sequence[int], total: int, before: Shape, after: Shape, prefer: str) -> list[int] | None:
    """Change one of `dims` so that they multiply to `total`."""
    if math.prod(dims) == total:
        return list(dims)
    if len(dims) == len(before):
        same = [now if old == dim else dim for dim, old, now in zip(dims, before, after, strict=True)]
        if math.prod(same) == total:
            return same
    order = range(len(dims)) if prefer == "first" else reversed(range(len(dims)))
    for k in order:
        others = math.prod(dims[:k]) * math.prod(dims[k + 1 :])
        if dims[k] > 1 and total % others == 0:
            return [*dims[:k], total // others, *dims[k + 1 :]]
    for k in range(len(dims)):
        others = math.prod(dims[:k]) * math.prod(dims[k + 1 :])
        if total % others == 0:
            return [*dims[:k], total // others, *dims[k + 1 :]]
    return None


__all__ = ["refit_call", "reshape_like"]
