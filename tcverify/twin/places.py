"""Relates what a call is given and what it gives dim by dim, where its arguments say which is which: joins, cuts and views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import fx

from tcverify.ops import merged_runs, qualified_name
from tcverify.twin.sizes import Size

if TYPE_CHECKING:
    from tcverify.twin.relations import Related

#: The sizes of each tensor that a call gives, and those that its second argument lists, if that lists sizes.
Made: TypeAlias = tuple[list[list[Size]], list[Size]]

#: Ops that are given the sizes of all parts that they cut a tensor into.
_CUTS = frozenset({"aten::split_with_sizes", "aten::split_with_sizes_copy"})

#: Ops that are given the shape of a view.
_VIEWS = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::view_copy"})


def by_places(node: fx.Node, related: Related) -> Made | None:
    """Relate the sizes at a call; None where its op is none of these, or is given something else than numbers."""
    name = qualified_name(node.target).split(".")[0]
    if name == "aten::cat":
        return _joined(node, related)
    if name not in _CUTS | _VIEWS or len(node.args) < 2:
        return None
    operand, numbers = node.args[0], node.args[1]
    own = related.of.get(operand, []) if isinstance(operand, fx.Node) else []
    if len(own) != 1 or not isinstance(numbers, (list, tuple)) or not all(type(n) is int for n in numbers):
        return None
    return _cut(node, numbers, own[0], related) if name in _CUTS else _viewed(node, own[0], related)


def _joined(node: fx.Node, related: Related) -> Made | None:
    listed = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else ()
    parts = [related.of.get(one, []) if isinstance(one, fx.Node) else [] for one in listed]
    results = related.specs(node)
    if len(results) != 1 or not parts or any(len(p) != 1 or len(p[0]) != len(results[0].shape) for p in parts):
        return None
    return [[_whole(n, [part[0][place] for part in parts], related) for place, n in enumerate(results[0].shape)]], []


def _whole(number: int, parts: Sequence[Size], related: Related) -> Size:
    """The size of a dim of what is put together: that of all parts, or their sum."""
    sizes = related.sizes
    if all(sizes.number[part] == number for part in parts):
        sizes.tie(*parts)
        return parts[0]
    whole = sizes.new(number)
    sizes.sum_up(whole, parts)
    return whole


def _cut(node: fx.Node, numbers: Sequence[Any], own: Sequence[Size], related: Related) -> Made | None:
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if type(dim) is not int or not -len(own) <= dim < len(own):
        return None
    parts = [related.sizes.new(n) for n in numbers]
    related.sizes.sum_up(own[dim], parts)
    place = dim % len(own)
    return [[*own[:place], part, *own[place + 1 :]] for part in parts], parts


def _viewed(node: fx.Node, own: Sequence[Size], related: Related) -> Made | None:
    sizes, results = related.sizes, related.specs(node)
    before = [sizes.number[size] for size in own]
    if len(results) != 1 or math.prod(before) != math.prod(results[0].shape) or 0 in before:
        return None
    made: list[Size] = []
    for merged, split in merged_runs(before, results[0].shape):
        numbers = results[0].shape[split]
        if len(own[merged]) == len(numbers) == 1:
            made += own[merged]
            continue
        new = [sizes.new(n) for n in numbers]
        made += new
        sizes.pin(
            s for s in (*own[merged], *new) if sizes.number[s] in related.ranks
        )  # by member, of what collectives give
        left, right = ([s for s in some if sizes.number[s] != 1] for some in (own[merged], new))
        if left or right:
            sizes.multiply(left, right)
    return [made], made


__all__ = ["Made", "by_places"]
