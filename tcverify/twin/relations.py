"""Reads what holds between the sizes of a program from its graphs: what views merge and split, what is put together and cut."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.ops import TensorSpec, lookup, qualified_name
from tcverify.program import Program, RankConstant
from tcverify.twin.sizes import Sizes

#: Ops of which a dim of an operand, or of a result, is the sum of those at the same place of several.
_JOINS = frozenset({"aten::cat"})
_SPLITS = frozenset(
    {"aten::split", "aten::split_with_sizes", "aten::chunk", "aten::split_with_sizes_copy", "aten::tensor_split"}
)

#: Ops that take a part of a dim, from a start to an end.
_SLICES = frozenset({"aten::slice", "aten::slice_scatter", "aten::slice_copy", "aten::slice_backward"})

#: Ops of which a dim of the result is a multiple of the dim at the same place of an operand.
_REPEATS = frozenset({"aten::repeat"})


def relate(program: Program, sizes: Sizes) -> None:
    """Tell `sizes` what holds between the numbers of a program."""
    for spec in program.inputs:
        sizes.add(*spec.shape)
        for local in {spec.local_shape(program.mesh, rank) for rank in _examples(program)}:
            for whole, part in zip(spec.shape, local, strict=True):
                if part != whole:
                    sizes.tie(whole, part)
                sizes.add(part)
    for number, graph in enumerate(program.graphs):
        values = [dict(binding.constants) for binding in program.ranks if binding.graph == number]
        for node in graph.nodes:
            for value in specs_of(node):
                sizes.add(*value.shape)
            if node.op == "call_function":
                _relate_call(node, values, sizes)


def _examples(program: Program) -> list[int]:
    """Ranks, one for each place in the groups of the mesh: few, of many."""
    found: dict[Any, int] = {}
    for rank in range(program.world_size):
        place = tuple(
            (len(dim.group(rank)), dim.position(rank) in (0, len(dim.group(rank)) - 1)) for dim in program.mesh.dims
        )
        found.setdefault(place, rank)
    return list(found.values())


def specs_of(value: Any) -> list[TensorSpec]:
    """The tensors that a node gives, as they are described."""
    val = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(val, TensorSpec):
        return [val]
    return [leaf for leaf in pytree.tree_leaves(val) if isinstance(leaf, TensorSpec)]


def base_name(node: fx.Node) -> str:
    """The name of an op without its overload."""
    return qualified_name(node.target).split(".")[0]


def _relate_call(node: fx.Node, constants: Sequence[Mapping[str, Any]], sizes: Sizes) -> None:
    name = base_name(node)
    operands = [spec.shape for read in node.all_input_nodes for spec in specs_of(read)]
    results = [spec.shape for spec in specs_of(node)]
    if len(operands) == 1 and len(results) == 1:
        _relate_view(operands[0], results[0], sizes)
    if name in _REPEATS or lookup(node.target).collective:
        for result in results:
            for operand in operands:
                _relate_resized(operand, result, sizes)
    elif name in _JOINS and results:
        _relate_parts(results[0], _read_shapes(node), sizes)
    elif name in _SPLITS and operands:
        _relate_parts(operands[0], results, sizes)
    elif name in _SLICES and operands and results:
        _relate_slice(node, operands[0], results[0], constants, sizes)


def _read_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """The shapes of what a call is given in a list, those that it is given twice also twice."""
    listed = next((arg for arg in node.args if isinstance(arg, (list, tuple))), ())
    return [spec.shape for read in listed if isinstance(read, fx.Node) for spec in specs_of(read)]


def _relate_parts(whole: Sequence[int], parts: Sequence[Sequence[int]], sizes: Sizes) -> None:
    """The dim in which parts differ from the whole is the sum of theirs."""
    if any(len(part) != len(whole) for part in parts):
        return
    for place, size in enumerate(whole):
        own = [part[place] for part in parts]
        if sum(own) == size:
            sizes.sum_up(size, own)


def _relate_view(before: Sequence[int], after: Sequence[int], sizes: Sizes) -> None:
    """Products of dims that a view merges or splits stay equal."""
    if tuple(before) == tuple(after) or 0 in before or math.prod(before) != math.prod(after):
        return
    if sorted(n for n in before if n != 1) == sorted(n for n in after if n != 1):
        return
    for merged, split in groups_of(before, after):
        sizes.multiply([n for n in merged if n != 1], [n for n in split if n != 1])


def groups_of(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """The least runs of dims of two shapes of as many elements that are of as many elements themselves."""
    i = j = 0
    while i < len(before) or j < len(after):
        start, other = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (left := math.prod(before[start:i])) != (right := math.prod(after[other:j])):
            if left < right:
                i += 1
            else:
                j += 1
        yield before[start:i], after[other:j]


def _relate_resized(operand: Sequence[int], result: Sequence[int], sizes: Sizes) -> None:
    """A dim that is another one in the result is a part or a multiple of it."""
    if len(operand) != len(result):
        return
    for before, after in zip(operand, result, strict=True):
        if before != after and 1 not in (before, after) and 0 not in (before, after):
            sizes.tie(before, after)


def _relate_slice(
    node: fx.Node, operand: Sequence[int], result: Sequence[int], constants: Sequence[Mapping[str, Any]], sizes: Sizes
) -> None:
    """Positions are sums: the end of its start and of what lies between them."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dim = given.get("dim", 0)
    if type(dim) is not int or not -len(operand) <= dim < len(operand):
        return
    whole = max(operand[dim], result[dim]) if len(operand) == len(result) else operand[dim]
    starts, ends = _values(given.get("start") or 0, constants), _values(given.get("end"), constants) or [whole]
    for start, end in itertools.zip_longest(starts, ends, fillvalue=None):
        first = start if start is not None else starts[0]
        last = min(end if end is not None else ends[0], whole)
        first, last = (n + whole if n < 0 else n for n in (first, last))
        if 0 <= first < last <= whole:
            sizes.sum_up(last, [first, last - first])
            sizes.sum_up(whole, [last, whole - last])


def _values(literal: Any, constants: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers that a literal stands for, on all ranks."""
    if isinstance(literal, RankConstant):
        found = [values.get(literal.name) for values in constants]
        flat = [n for one in found for n in (one if isinstance(one, (list, tuple)) else [one])]
    else:
        flat = [literal]
    return list(dict.fromkeys(n for n in flat if type(n) is int))


def mapped_literals(node: fx.Node, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with `change` applied to the numbers that may be sizes or positions.

    These are what the schema calls symbolic integers, and numbers that ops without operands, or on integers, are given.
    """

    def leaf(value: Any) -> Any:
        return change(value) if type(value) is int or isinstance(value, RankConstant) else value

    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args, dict(node.kwargs)
    sizes = _symbolic(node.target) | (_SCALARS if _on_numbers(node) else frozenset())
    names = [argument.name for argument in schema.arguments]
    args = tuple(
        map_aggregate(value, leaf) if name in sizes else value for name, value in zip(names, node.args, strict=False)
    )
    return args, {name: map_aggregate(v, leaf) if name in sizes else v for name, v in node.kwargs.items()}


def _on_numbers(node: fx.Node) -> bool:
    """Whether a scalar argument may be a size: of ops that make tensors, and of those that compare or offset integers."""
    specs = [spec for read in node.all_input_nodes for spec in specs_of(read)]
    return all(not spec.dtype.is_floating_point and not spec.dtype.is_complex for spec in specs)


#: A symbolic integer, or several, in the text of a schema.
_SYMBOLIC = re.compile(r"SymInt(?:\[\d*\])?\?? (\w+)")


@cache
def _symbolic(target: Any) -> frozenset[str]:
    return frozenset(_SYMBOLIC.findall(str(target._schema)))


#: Arguments of ops that make tensors or compare integers which may be sizes.
_SCALARS = frozenset({"end", "start", "other", "length", "high", "low", "size"})


__all__ = ["base_name", "groups_of", "mapped_literals", "relate", "specs_of"]
