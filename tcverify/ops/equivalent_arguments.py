"""Arguments of ATen calls that can be written in several ways: dims and indices counted from the end, slices with an open end,
sizes left to be inferred. Captured graphs have them as the user wrote them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tcverify.ops.spec import TensorSpec
from tcverify.ops.table import qualified_name

#: The end of a slice that has none: `x[1:]` is captured as `slice(x, 0, 1, OPEN_END)`.
OPEN_END = 2**63 - 1

_DIM = frozenset({"dim", "dim0", "dim1", "dim2", "start_dim", "end_dim", "dimension"})
_DIMS = frozenset({"dim", "dims"})

#: Ops that count dims in their result, which has one more than the operand.
_ADDS_A_DIM = frozenset({"aten::unsqueeze", "aten::stack", "aten::diag_embed"})


def equivalent_arguments(target: Any, args: Sequence[Any], operand: Any) -> dict[int, list[Any]]:
    """Return the ways to write positional arguments of a call.

    Args:
        operand: what is known of the first operand: its spec, or those of a list.

    Returns:
        By position, at least two equivalent values, of which the plainest is first: no dim or index counted from the end, no open
        end, no size to be inferred. Empty where nothing is known.
    """
    schema = getattr(target, "_schema", None)
    name = qualified_name(target).partition(".")[0]
    # Of gradients, dims are often those of what the gradient belongs to.
    if schema is None or not name.startswith("aten::") or "backward" in name:
        return {}
    specs = operand if isinstance(operand, (list, tuple)) else [operand]
    if not specs or not all(isinstance(one, TensorSpec) for one in specs):
        return {}
    shape = max((one.shape for one in specs), key=len)  # cat skips empty tensors of one dim
    if not shape:
        return {}
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    found: dict[int, list[Any]] = {}
    for place, argument in enumerate(schema.arguments[: len(args)]):
        ways = _ways(name, argument.name, args[place], given, tuple(shape))
        if len(ways) > 1:
            found[place] = ways
    return found


def _ways(op: str, name: str, value: Any, given: Mapping[str, Any], shape: tuple[int, ...]) -> list[Any]:
    rank = len(shape) + (op in _ADDS_A_DIM)
    if name in _DIM and _is_int(value):
        return _either(value, rank)
    if isinstance(value, (list, tuple)) and value and all(map(_is_int, value)):
        if name in _DIMS:
            ways = [_either(one, rank) for one in value]
            return [[way[k] for way in ways] for k in (0, 1)] if all(ways) else []
        return _INFERS[op](list(value), shape) if name in ("size", "shape") and op in _INFERS else []
    dim = given.get("dim", 0)
    if not _is_int(value) or not _is_int(dim) or not -len(shape) <= dim < len(shape):
        return []
    size = shape[dim]
    if name == "index" and op in ("aten::select", "aten::select_scatter"):
        return _either(value, size)
    return _bound(name, value, size) if op in ("aten::slice", "aten::slice_scatter") else []


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _either(value: int, count: int) -> list[int]:
    """A number counted from the front and from the end; nothing where it is out of range."""
    return [value % count, value % count - count] if -count <= value < count else []


def _bound(name: str, value: int, size: int) -> list[int]:
    """A bound of a slice along a dim of this size."""
    place = min(max(value + size if value < 0 else value, 0), size)
    if place < size:
        return [place, place - size] if name in ("start", "end") else []
    return [size, OPEN_END] if name == "end" else []


def _viewed(sizes: list[int], shape: tuple[int, ...]) -> list[list[int]]:
    """The sizes of a view, with none and with one of them to be inferred."""
    known, count = math.prod(one for one in sizes if one != -1), math.prod(shape)
    if not known or not count or sizes.count(-1) > 1:
        return []
    plain = [count // known if one == -1 else one for one in sizes]
    return [plain, *([*plain[:k], -1, *plain[k + 1 :]] for k in range(len(plain)))]


def _expanded(sizes: list[int], shape: tuple[int, ...]) -> list[list[int]]:
    """The sizes of an expansion, and with those that the operand has already left out."""
    new = len(sizes) - len(shape)
    kept = [i >= new and size in (-1, shape[i - new]) for i, size in enumerate(sizes)]
    pairs = list(enumerate(zip(sizes, kept, strict=True)))
    plain = [shape[i - new] if keep else size for i, (size, keep) in pairs]
    return [plain, [-1 if keep else size for _, (size, keep) in pairs]] if any(kept) else []


#: Ops that infer a size given as -1, and the ways to write their sizes.
_INFERS = {
    "aten::view": _viewed,
    "aten::reshape": _viewed,
    "aten::_unsafe_view": _viewed,
    "aten::expand": _expanded,
}

__all__ = ["OPEN_END", "equivalent_arguments"]
