"""What one op computes at one index of its result's stream axis, and of which parts of its operands.

The axis is followed from the result to the dim of each operand that it comes from. An operand without such a dim is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import Layout, Resharding, TensorSpec, lookup, schema_of
from tcverify.passes.editing import known_spec, named_arguments, op_name
from tcverify.passes.resharding.layouts import layout_of, resharding_of

#: Reductions over dims that need not be the stream axis; `dim` names them.
_REDUCTIONS = frozenset({"aten::sum.dim_IntList", "aten::mean.dim", "aten::amax", "aten::amin"})
#: Ops that mix the positions along one `dim`, and have a result of the operand's shape.
_ALONG = frozenset(
    f"aten::{name}"
    for name in ("softmax.int", "_softmax", "log_softmax.int", "_log_softmax", "cumsum", "cumprod", "logcumsumexp")
)
_PRODUCTS = frozenset({"aten::matmul", "aten::mm", "aten::bmm", "aten::linear"})
#: Ops that make one dim of several, or several of one, also where they copy.
_REGROUPING = frozenset(
    f"aten::{name}" for name in ("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int")
)


@dataclass(frozen=True, slots=True, eq=False)
class OperandSlice:
    """An operand, at the index of the trip.

    Attributes:
        dim: of the operand, what the index counts.
        repeated: the dim has one position, which every trip reads.
        widened: a dim of size 1 that is put in afterwards, or None.
    """

    node: fx.Node
    dim: int
    repeated: bool = False
    widened: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SlicedOp:
    """An op, cut along its result's stream axis.

    Attributes:
        trips: size of the axis.
        local: shape, strides and dtype of the result on this rank, or None if it gets none of it.
        op: what computes one index, by qualified name, with `args` and `kwargs` that hold an `OperandSlice` where they read one.
        narrowed: a dim of size 1 of what `op` returns that is taken out, or None.
        addend: what is added at last.
        communicates: whether other ranks take part.
    """

    node: fx.Node
    axis: int
    trips: int
    local: TensorSpec | None
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    narrowed: int | None = None
    addend: OperandSlice | None = None
    communicates: bool = False

    @property
    def parts(self) -> list[OperandSlice]:
        """All that it reads at the index, the same operand once for each place."""
        found = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, OperandSlice)]
        return found if self.addend is None else [*found, self.addend]


def slice_op(node: fx.Node, axis: int) -> SlicedOp:
    """Cut an op along a dim of its result.

    Raises:
        Unsupported: its parts along the dim cannot be computed one by one.
    """
    made = resharding_of(node)
    if made is not None:
        return _resharding(node, axis, made)
    name = op_name(node)
    schema = schema_of(node.target) if node.op == "call_function" else None
    spec = known_spec(node)
    if schema is None:
        _refuse(node, f"'{name or node.op}' cannot be split", "mark results of local ops, of set and of reduce")
    if len(schema.returns) != 1 or isinstance(node.meta.get("val"), (tuple, list)):
        _refuse(node, f"{name} has several results", "mark results of ops that have one")
    if schema.is_mutable:
        _refuse(node, f"{name} writes into an operand", "use the form that makes a new tensor")
    if spec is None:
        _refuse(node, "its shape is not known", "run shape propagation before the pass")
    _check_axis(node, axis, len(spec.shape))
    layout = layout_of(node)
    if layout is not None and layout.parts(axis) > 1:
        _refuse_sharded(node, axis, layout)
    if name in _REGROUPING or lookup(node.target).aliases:
        _refuse_view(node, axis, name)
    return _rule(node, name)(node, axis, spec)


def _rule(node: fx.Node, name: str) -> Callable[[fx.Node, int, TensorSpec], SlicedOp]:
    if name in _PRODUCTS:
        return _linear if name == "aten::linear" else _product
    if name in _REDUCTIONS:
        return _reduction
    if name in _ALONG:
        return _along
    tags = {tag.name for tag in getattr(node.target, "tags", ())}
    if name.startswith("aten::") and "pointwise" in tags and "nondeterministic_seeded" not in tags:
        return _elementwise
    _refuse(
        node,
        f"nothing is known of how {name} treats the positions along a dim",
        "mark elementwise ops, products of matrices, sums over other dims, sets and reduces",
    )


# ------------------------------------------------------------------------------------------------------- rules by op


def _resharding(node: fx.Node, axis: int, made: Resharding) -> SlicedOp:
    """The same change of layout for what lies at the index, by which every rank that takes part makes the same trips."""
    _check_axis(node, axis, len(made.result_shape))
    read = axis if made.dim is None or axis < made.dim else axis + 1
    for layout, dim in ((made.target, axis), (made.source, read)):
        if layout.parts(dim) > 1:
            _refuse_sharded(node, axis, layout)
    given = named_arguments(node)
    if given["x"] is not None:
        _shape(node, given["x"])
        given["x"] = OperandSlice(given["x"], read)
    given["shape"] = [size for dim, size in enumerate(made.shape) if dim != read]
    given["source"], given["target"] = str(_without(made.source, read)), str(_without(made.target, axis))
    if made.dim is not None:
        given["dim"] = made.dim - (made.dim > read)
    local = None
    if given["rank"] in made.target.mesh:
        _shape(node, node)
        local = TensorSpec.contiguous(made.target.local_shape(made.result_shape), given["dtype"])
    return SlicedOp(
        node, axis, made.result_shape[axis], local, op_name(node), tuple(given.values()), {},
        communicates=len(made.ranks) > 1,
    )  # fmt: skip


def _without(layout: Layout, dim: int) -> Layout:
    """The layout of a tensor that has lost a dim, which is in one part."""
    kept = (None if d is None or d == dim else d - (d > dim) for d in layout.sharding)
    return Layout(layout.mesh, tuple(kept))


def _elementwise(node: fx.Node, axis: int, spec: TensorSpec) -> SlicedOp:
    given = {name: value for name, value in named_arguments(node).items() if name != "memory_format"}
    operands = {name: value for name, value in given.items() if isinstance(value, fx.Node)}
    for name, value in operands.items():
        given[name] = _aligned(node, value, axis - len(spec.shape), spec.shape[axis])
    if len({known.dtype for value in operands.values() if (known := known_spec(value))}) == 1:
        return _cut(node, axis, spec, op_name(node), given)
    # Of several dtypes, that of a tensor without dims counts less: none loses its last one.
    for name, value in operands.items():
        if isinstance(part := given[name], OperandSlice) and len(_shape(node, value)) == 1:
            given[name] = replace(part, widened=0)
    return replace(_cut(node, axis, spec, op_name(node), given), narrowed=0 if len(spec.shape) == 1 else None)


def _aligned(node: fx.Node, operand: fx.Node, position: int, trips: int) -> OperandSlice | fx.Node:
    """The part of an operand that is broadcast, given the position of the axis from the right (negative)."""
    shape = _shape(node, operand)
    dim = len(shape) + position
    return OperandSlice(operand, dim, repeated=shape[dim] != trips) if dim >= 0 else operand


def _reduction(node: fx.Node, axis: int, spec: TensorSpec) -> SlicedOp:
    given = named_arguments(node)
    operand, kept = given["self"], bool(given.get("keepdim", False))
    size = len(_shape(node, operand))
    named = given.get("dim")
    dims = [dim % size for dim in ([named] if isinstance(named, int) else named or range(size))]
    if kept and axis in dims:
        _refuse_mixing(node, axis)
    read = axis if kept else [dim for dim in range(size) if dim not in dims][axis]
    given.update(self=OperandSlice(operand, read), dim=[dim - (dim > read) for dim in dims])
    return _cut(node, axis, spec, op_name(node), given)


def _along(node: fx.Node, axis: int, spec: TensorSpec) -> SlicedOp:
    given = named_arguments(node)
    dim = given["dim"] % len(spec.shape)
    if dim == axis:
        _refuse_mixing(node, axis)
    given.update(self=OperandSlice(given["self"], axis), dim=dim - (dim > axis))
    return _cut(node, axis, spec, op_name(node), given)


def _product(node: fx.Node, axis: int, spec: TensorSpec) -> SlicedOp:
    """The axis is that of the rows (M), of the columns (N), or one of the batch, which operands may lack or repeat."""
    given = named_arguments(node)
    left, right = given["self"], given["other" if "other" in given else "mat2"]
    a, b = len(_shape(node, left)), len(_shape(node, right))
    columns, rows = int(b > 1), int(a > 1)
    behind = len(spec.shape) - axis
    if columns and behind == 1:
        # A vector for the columns would be taken for a batch of rows where the right side has a batch.
        args: tuple[Any, ...] = (left, OperandSlice(right, b - 1, widened=b - 1 if b > 2 else None))
        narrowed = len(spec.shape) - 1 if b > 2 else None
    elif rows and behind == columns + 1:
        both = a > 2 and b > 2
        args = (OperandSlice(left, a - 2, widened=a - 2 if both else None), right)
        narrowed = axis if both else None
    else:
        batch = columns + rows - behind  # from the right, negative
        sides = ((left, a, rows), (right, b, columns))
        args = tuple(
            _aligned(node, side, batch - 1 - free, spec.shape[axis]) if size > 1 + free else side
            for side, size, free in sides
        )
        narrowed = None
    return SlicedOp(node, axis, spec.shape[axis], spec, "aten::matmul", args, {}, narrowed)


def _linear(node: fx.Node, axis: int, spec: TensorSpec) -> SlicedOp:
    given = named_arguments(node)
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if len(_shape(node, weight)) != 2 or (bias is not None and _shape(node, bias) != spec.shape[-1:]):
        _refuse(
            node,
            "its weight is not a matrix, or its bias not a vector with one number for each column of the result",
            "multiply with matmul, and add the bias with add",
        )
    if axis < len(spec.shape) - 1:
        args = (OperandSlice(x, axis), weight) if bias is None else (OperandSlice(x, axis), weight, bias)
        return SlicedOp(node, axis, spec.shape[axis], spec, op_name(node), args, {})
    args = (x, OperandSlice(weight, 0))
    addend = None if bias is None else OperandSlice(bias, 0)
    return SlicedOp(node, axis, spec.shape[axis], spec, "aten::matmul", args, {}, addend=addend)


def _cut(node: fx.Node, axis: int, spec: TensorSpec, op: str, given: dict[str, Any]) -> SlicedOp:
    """The same op of parts, with arguments passed the way they were."""
    count = len(node.args)
    positional, named = list(given.items())[:count], list(given.items())[count:]
    return SlicedOp(node, axis, spec.shape[axis], spec, op, tuple(value for _, value in positional), dict(named))


# ----------------------------------------------------------------------------------------------------------- refusals


def _shape(node: fx.Node, operand: fx.Node) -> tuple[int, ...]:
    spec = known_spec(operand)
    if spec is None:
        _refuse(node, f"the shape of '{operand.name}' is not known", "run shape propagation before the pass")
    return spec.shape


def _check_axis(node: fx.Node, axis: int, dims: int) -> None:
    if not 0 <= axis < dims:
        _refuse(node, f"its result has {dims} dims, and the axis is {axis}", "count dims of the result, from 0")


def _refuse_sharded(node: fx.Node, axis: int, layout: Layout) -> NoReturn:
    _refuse(
        node,
        f"its stream axis {axis} is sharded over ranks in layout '{layout}'",
        "give each rank all positions of the axis, or mark another dim",
    )


def _refuse_mixing(node: fx.Node, axis: int) -> NoReturn:
    _refuse(
        node,
        f"{op_name(node)} mixes the positions along its stream axis {axis}",
        "mark a dim whose positions are computed independently",
    )


def _refuse_view(node: fx.Node, axis: int, name: str) -> NoReturn:
    operand, spec = node.all_input_nodes[0], known_spec(node)
    if name in _REGROUPING and spec is not None and not _survives(_shape(node, operand), spec.shape, axis):
        _refuse(
            node,
            f"its stream axis {axis} is split or merged from dims of '{operand.name}' by {name}",
            "mark a dim that is one dim of the operand, or mark the op that reads the result instead",
        )
    _refuse(node, f"{name} gives a view, and computes nothing", "mark the op that reads it instead")


def _survives(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> bool:
    """Whether a dim of a regrouped shape is one dim of the shape before, with the same number of elements ahead of it."""
    reached = {(math.prod(before[:dim]), size) for dim, size in enumerate(before)}
    return (math.prod(after[:axis]), after[axis]) in reached


def _refuse(node: fx.Node, message: str, hint: str) -> NoReturn:
    raise Unsupported(f"'{node.name}' cannot be computed along a stream axis: {message}", hint)


__all__ = ["OperandSlice", "SlicedOp", "slice_op"]
