"""Relates operands and results of a call dim by dim, if its arguments define the relation: joins, splits, views, fills."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol, TypeAlias

from torch import fx
from torch.utils import _pytree as pytree

from tcverify.ops import TensorSpec, lookup, merged_runs, qualified_name
from tcverify.scaled_down.sizes import Size, Sizes

#: The sizes of each tensor that a call returns; those that one of its arguments lists, and which argument that is.
Made: TypeAlias = tuple[list[list[Size]], list[Size], int]

#: Ops whose arguments include the sizes of all parts into which they split a tensor.
_CUTS = frozenset({"aten::split_with_sizes", "aten::split_with_sizes_copy"})

#: Ops whose arguments include the shape of a view.
_VIEWS = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::view_copy"})

#: Ops whose arguments include the shape up to which they expand dims of one element.
_EXPANSIONS = frozenset({"aten::expand", "aten::expand_copy", "aten::broadcast_to"})


class RelatedSoFar(Protocol):
    """The sizes of a program up to a node; see `tcverify.scaled_down.relations.SizeRelations`."""

    @property
    def sizes(self) -> Sizes:
        """The solver for all of them."""
        ...

    @property
    def of(self) -> Mapping[fx.Node, list[list[Size]]]:
        """Of the tensors that each node returns, in order."""
        ...

    @property
    def ranks(self) -> Set[int]:
        """Numbers of ranks of groups."""
        ...

    @property
    def beside(self) -> Set[fx.Node]:
        """The nodes at which a dim may correspond to the members of a group."""
        ...

    def specs(self, node: fx.Node) -> list[TensorSpec]:
        """The tensors that a node returns."""
        ...


def by_places(node: fx.Node, related: RelatedSoFar) -> Made | None:
    """Relate the sizes at a call; None if its op is not supported here, or an argument is not a number."""
    name = qualified_name(node.target).split(".")[0]
    if name == "aten::cat":
        return _joined(node, related)
    if name not in _CUTS | _VIEWS | _EXPANSIONS:
        return _filled(node, related)
    if len(node.args) < 2:
        return None
    operand, numbers = node.args[0], node.args[1]
    own = related.of.get(operand, []) if isinstance(operand, fx.Node) else []
    if len(own) != 1 or not isinstance(numbers, (list, tuple)) or not all(type(n) is int for n in numbers):
        return None
    make = _cut if name in _CUTS else _expanded if name in _EXPANSIONS else _viewed
    return make(node, own[0], related)


def _joined(node: fx.Node, related: RelatedSoFar) -> Made | None:
    listed = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else ()
    parts = [related.of.get(one, []) if isinstance(one, fx.Node) else [] for one in listed]
    results = related.specs(node)
    if len(results) != 1 or not parts or any(len(p) != 1 or len(p[0]) != len(results[0].shape) for p in parts):
        return None
    return [[_whole(n, [part[0][place] for part in parts], related) for place, n in enumerate(results[0].shape)]], [], 0


def _whole(number: int, parts: Sequence[Size], related: RelatedSoFar) -> Size:
    """The size of a dim of a concatenation: that of all parts, or their sum."""
    sizes = related.sizes
    if all(sizes.number[part] == number for part in parts):
        sizes.tie(*parts)
        return parts[0]
    whole = sizes.new(number)
    sizes.sum_up(whole, parts)
    return whole


def _cut(node: fx.Node, own: Sequence[Size], related: RelatedSoFar) -> Made | None:
    numbers: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if type(dim) is not int or not -len(own) <= dim < len(own):
        return None
    parts = [related.sizes.new(n) for n in numbers]
    related.sizes.sum_up(own[dim], parts)
    place = dim % len(own)
    return [[*own[:place], part, *own[place + 1 :]] for part in parts], parts, 1


def _viewed(node: fx.Node, own: Sequence[Size], related: RelatedSoFar) -> Made | None:
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
        if node in related.beside:  # by member, of the operands and results of collectives
            sizes.pin(s for s in (*own[merged], *new) if sizes.number[s] in related.ranks)
        left, right = ([s for s in some if sizes.number[s] != 1] for some in (own[merged], new))
        if left or right:
            sizes.multiply(left, right)
    return [made], made, 1


def beside_collectives(graph: fx.Graph) -> set[fx.Node]:
    """The nodes at which a dim may correspond to the members of a group: all that depend on the result of a collective,
    and all on which an operand depends, unless the operand is only a member's part of the result."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    found: set[fx.Node] = set()
    for node in nodes:
        if _collective(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    for node in reversed(nodes):
        if any(not _gathered(node, reader) if _collective(reader) else reader in found for reader in node.users):
            found.add(node)
    return found


def _collective(node: fx.Node) -> bool:
    return node.op == "call_function" and lookup(node.target).collective


def _gathered(read: fx.Node, node: fx.Node) -> bool:
    """Whether the result of a collective is larger than this operand."""
    results, operands = _elements(node), next(iter(node.args), None)
    own = results
    if isinstance(operands, (list, tuple)) and len(operands) == len(results):
        own = [n for one, n in zip(operands, results, strict=True) if one is read]
    return max(own, default=0) > max(_elements(read), default=0)


def _elements(node: fx.Node) -> list[int]:
    return [math.prod(val.shape) for val in pytree.tree_leaves(node.meta.get("val")) if hasattr(val, "shape")]


def _expanded(node: fx.Node, own: Sequence[Size], related: RelatedSoFar) -> Made | None:
    sizes, results = related.sizes, related.specs(node)
    if len(results) != 1 or len(results[0].shape) != len(node.args[1]):  # type: ignore[arg-type]
        return None
    new = len(results[0].shape) - len(own)
    places = zip(results[0].shape, [None] * new + list(own), strict=True)
    made = [size if size is not None and sizes.number[size] == n else sizes.new(n) for n, size in places]
    return [made], made, 1


def _filled(node: fx.Node, related: RelatedSoFar) -> Made | None:
    """A tensor of a given shape: equal numbers in the shape may be different sizes."""
    schema, results = getattr(node.target, "_schema", None), related.specs(node)
    if schema is None:
        return None
    names = [argument.name for argument in schema.arguments]
    if "size" not in names or "stride" in names or len(results) != 1:
        return None
    place = names.index("size")
    if place >= len(node.args) or not _lists(node.args[place], results[0].shape):
        return None
    if any(isinstance(arg, fx.Node) for arg in node.args) and not schema.name.startswith("aten::new_"):
        return None  # an operand, which has its own sizes
    made = [related.sizes.new(n) for n in results[0].shape]
    return [made], made, place


def _lists(argument: object, shape: Sequence[int]) -> bool:
    return isinstance(argument, (list, tuple)) and tuple(argument) == tuple(shape)


__all__ = ["Made", "beside_collectives", "by_places"]
