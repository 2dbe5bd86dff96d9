"""How an op may be called that no program has shown: operands and constants that its signature and its shape rules take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.node import map_aggregate

from tcverify.campaign.search.calls import CallPattern, Hole, Role
from tcverify.errors import TcverifyError
from tcverify.ops import TensorSpec, infer, resolve
from tcverify.program import RankConstant

#: Shapes of operands that are tried, the first operand's first: all alike; a matrix behind it; a vector behind it; and, alike
#: again, square matrices, batches of them, and images or heads.
_ROWS, _COLUMNS = 2, 4
_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((_ROWS, _COLUMNS), (_ROWS, _COLUMNS)),
    ((_ROWS, _COLUMNS), (_COLUMNS, _COLUMNS)),
    ((_ROWS, _COLUMNS), (_COLUMNS,)),
    *((alike, alike) for alike in ((_COLUMNS, _COLUMNS), (_ROWS, _COLUMNS, _COLUMNS), (1, _ROWS, _COLUMNS, _COLUMNS))),
)

#: Constants by the name of the argument, the likeliest first.
_INTEGERS = {"dim": (0, 1), "dim0": (0,), "dim1": (1,), "axis": (0, 1)}
_LISTS = {"size": [_ROWS, _COLUMNS], "shape": [_ROWS, _COLUMNS], "dims": [1, 0]}
_FLOATS = {"eps": 1e-6}
#: What arguments that are texts may say.
TEXTS = {
    "reduce_op": ("sum", "max", "avg", "min", "product"),
    "reduce": ("sum", "amax", "mean", "amin", "prod"),
    "reduction": ("mean",),
    "rounding_mode": ("floor", "trunc"),
    "approximate": ("none", "tanh"),
}

#: What stands for the rank, and for its group.
_RANK, _GROUP = RankConstant("rank"), RankConstant("group")


def synthesise_calls(name: str) -> list[CallPattern]:
    """Return calls of an op that its shape rules take; none where no guess fits."""
    try:
        target = resolve(name)
    except TcverifyError:
        return []
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    found: list[CallPattern] = []
    for choice, shapes in itertools.product(range(2), _SHAPES):
        pattern = _pattern(target, schema, choice, shapes)
        if pattern is not None and all(pattern.args != one.args for one in found):
            found.append(pattern)
    return found


def _pattern(target: Any, schema: Any, choice: int, shapes: tuple[tuple[int, ...], ...]) -> CallPattern | None:
    holes = itertools.count()
    args: list[Any] = []
    for argument in schema.arguments:
        if argument.has_default_value() or argument.kwarg_only:
            break
        value = _value(argument, choice, holes)
        if value is None:
            return None
        args.append(value)
    number = next(holes)
    if number == 0:
        return None
    types = [(shapes[min(place, len(shapes) - 1)], torch.float32) for place in range(number)]
    fresh = itertools.count().__next__
    specs = [TensorSpec.contiguous(shape, dtype) for shape, dtype in types]

    def leaf(value: Any) -> Any:
        if isinstance(value, Hole):
            return specs[value.number]
        return {_RANK.name: 0, _GROUP.name: [0, 1]}[value.name] if isinstance(value, RankConstant) else value

    try:
        result = infer(target, map_aggregate(tuple(args), leaf), {}, fresh)
    except (TcverifyError, RuntimeError, TypeError, ValueError, IndexError, KeyError):
        return None
    if not isinstance(result, (TensorSpec, tuple, list)):
        return None
    constants = {
        name: role for name, role in ((_RANK.name, Role("rank")), (_GROUP.name, Role("group"))) if _names(args, name)
    }
    return CallPattern(target, tuple(args), {}, tuple(types), result, constants)


def _names(args: list[Any], name: str) -> bool:
    return any(isinstance(value, RankConstant) and value.name == name for value in args)


def _value(argument: Any, choice: int, holes: Iterator[int]) -> Any:
    """A value for an argument of a signature; None where there is none to guess."""
    optional = (
        argument.real_type.getElementType() if argument.real_type.kind() == "OptionalType" else argument.real_type
    )
    kind, name = str(optional), argument.name
    if kind == "Tensor":
        return Hole(next(holes))
    if kind == "List[Tensor]":
        return [Hole(next(holes)), Hole(next(holes))]
    if kind in ("int", "SymInt"):
        options = _INTEGERS.get(name, (1, 2))
        return _RANK if name == "rank" else options[choice % len(options)]
    if kind in ("List[int]", "List[SymInt]"):
        return _GROUP if "group" in name or name == "ranks" else [*_LISTS.get(name, [0])]
    if kind in ("float", "number", "Scalar"):
        return _FLOATS.get(name, (2.0, 0.5)[choice])
    return {"bool": False, "str": TEXTS.get(name, (None,))[0], "ScalarType": (torch.bfloat16, torch.int64)[choice]}.get(
        kind
    )


__all__ = ["TEXTS", "synthesise_calls"]
