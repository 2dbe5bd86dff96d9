"""Growths of wild programs: each function adds one or two values, or raises if it does not fit.

A growth is a function of the program, the values, the first operand and two bytes, which select further operands and a variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tcverify.program import Recipe
from tcverify.strategies.draft import RANK, DraftGroup, DraftValue, NoSite, PerRank, attempt
from tcverify.strategies.transformer.sites import (
    ADD,
    ADD_RMS_NORM,
    ADD_RMS_NORM2,
    MARKERS,
    RMS_NORM,
    VIEW,
    call,
    chunk,
    gain,
    gather,
    new_input,
    pick,
    pick_recent,
    reduce,
    scatter,
    spec_of,
)
from tcverify.strategies.transformer.writing import TransformerWriter
from tcverify.strategies.wild.quantised import grow_quantised

Growth = Callable[[TransformerWriter, Sequence[DraftValue], DraftValue, int, int], list[DraftValue]]

KINDS = ("replicated", "partial", "varying", "shard")


def _partner(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int) -> DraftValue:
    """Another operand of the shape and dtype of `a`: an existing value, or a new input."""
    spec = spec_of(w, a)
    found = [
        v for v in values if w.draft.specs(v)[0].layout[::2] == spec.layout[::2] and w.draft.shape(v) == spec.shape
    ]
    if b % 4 == 3 or not found:
        dims = [dim.name for dim in w.draft.mesh.dims]
        return new_input(
            w, "x", spec.shape, spec.dtype, pick(KINDS, b // 4), b // 16 % max(1, len(spec.shape)), dim=pick(dims, b)
        )
    return pick_recent(found, b)


def _group(w: TransformerWriter, choice: int) -> tuple[str, DraftGroup]:
    dim = w.roles.main if choice % 3 < 2 or w.roles.other is None else w.roles.other
    return dim, DraftGroup(dim)


def _axis(w: TransformerWriter, a: DraftValue, choice: int) -> int:
    """A dim of the tensor; the second from the right most often."""
    rank = len(spec_of(w, a).shape)
    if rank == 0:
        raise NoSite
    return max(0, rank - 2) if choice % 4 < 2 else choice // 4 % rank


def unary(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """An elementwise op."""
    ops = [
        "tensor_cast::gelu",
        "tensor_cast::silu",
        "aten::tanh",
        "aten::neg",
        "aten::relu",
        "aten::abs",
        "aten::sin",
        "aten::clone",
    ]
    return [call(w, pick(ops, how), a)]


def binary(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """An op on two values of one shape."""
    other = _partner(w, values, a, b)
    op = pick((ADD, ADD, "aten::sub.Tensor", "aten::mul.Tensor", "aten::maximum", "tensor_cast::swiglu"), how)
    first, second = (a, other) if how // 8 % 2 == 0 else (other, a)
    made = call(w, op, first, second)
    rms = a.rms * other.rms if op == "aten::mul.Tensor" else a.rms + other.rms
    return [replace(made, rms=rms)]


def constant(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A number, or a vector that is broadcast."""
    spec = spec_of(w, a)
    shapes: list[tuple[int, ...]] = [
        spec.shape[-1:],
        (1,),
        (*spec.shape[:-1], 1),
        (1,) * (len(spec.shape) - 1) + spec.shape[-1:],
    ]
    other = 0.5 if how % 4 == 3 else new_input(w, "c", pick(shapes, b), spec.dtype)
    op = pick((ADD, "aten::mul.Tensor", "aten::sub.Tensor"), how // 4)
    return [replace(call(w, op, a, other), rms=a.rms + 0.6)]


def matmul(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A product with a weight, or with another value."""
    spec = spec_of(w, a)
    inner = spec.shape[-1]
    scale = 2.0 ** round(-math.log2(math.sqrt(max(inner, 1)) * max(a.rms, 1e-2)))
    found = [
        v
        for v in values
        if w.draft.shape(v)[:1] == (inner,)
        and len(w.draft.shape(v)) == 2
        and w.draft.specs(v)[0].dtype is spec.dtype
        and v.rms <= 1
    ]
    if b % 4 == 3 and found:
        return [replace(call(w, "aten::matmul", a, pick_recent(found, how)), rms=a.rms * math.sqrt(max(inner, 1)))]
    shape = (inner, (inner, 4, 8, 2, 6)[how % 5])
    kind = pick(("replicated", "replicated", "varying", "shard"), b // 4)
    other = new_input(w, "w", shape, spec.dtype, kind, how // 8 % 2, Recipe(scale=scale))
    return [replace(call(w, "aten::matmul", a, other), rms=0.6)]


def norm(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A norm of the rows."""
    if how % 4 == 3:
        made = call(w, "tensor_cast::layer_norm", a, gain(w, a), None, w.setting.eps)
    else:
        made = call(w, RMS_NORM, a, gain(w, a), w.setting.eps)
    return [replace(made, rms=1.0)]


def fused_norm(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A sum and its norm; of two results the residual, too."""
    other = _partner(w, values, a, b)
    first, second = (a, other) if how % 4 < 2 else (other, a)
    if how % 2:
        return [replace(call(w, ADD_RMS_NORM, first, second, gain(w, a), w.setting.eps), rms=1.0)]
    both = call(w, ADD_RMS_NORM2, first, second, gain(w, a), w.setting.eps)
    index = 0 if how // 4 % 4 else -2
    items = [replace(w.draft.item(both, index + i), dtype=first.dtype) for i in (0, 1)]
    return [replace(items[1], rms=a.rms + other.rms), replace(items[0], rms=1.0)]


def all_reduce(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A sum over a group."""
    dim, over = _group(w, how)
    return [replace(reduce(w, a, over), rms=a.rms * w.roles.size(dim))]


def reduce_scatter(
    w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int
) -> list[DraftValue]:
    """A sum over a group, of which every member keeps a part, along any dim."""
    dim, over = _group(w, how)
    return [replace(scatter(w, a, _axis(w, a, b), over), rms=a.rms * w.roles.size(dim))]


def all_gather(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """The parts of a group, along any dim."""
    return [gather(w, a, _axis(w, a, b), _group(w, how)[1])]


def all_to_all(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """Equal parts of the first dim are exchanged within a group."""
    dim, over = _group(w, how)
    rows = (spec_of(w, a).shape or (0,))[0]
    if any(rows % size for size in w.roles.sizes(dim)) or not rows:
        raise NoSite
    found = w.draft.mesh.dim(dim)

    def splits(rank: int) -> list[int]:
        size = len(found.group(rank))
        return [rows // size] * size

    even = PerRank(f"{dim}_splits{rows}", splits)
    return [call(w, "tensor_cast::all_to_all", a, even, even, RANK, over)]


def view(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """Another shape of the same elements."""
    shape = list(spec_of(w, a).shape)
    axis = b % max(1, len(shape))
    forms: list[list[int]] = [[1, *shape], [-1]]
    if shape:
        forms += [[-1, shape[-1]], [*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :]]]
        forms.append([*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :]])
    if len(shape) > 1:
        forms += [[*shape[:-2], shape[-2] * shape[-1]], [shape[0] * shape[1], *shape[2:]]] * 2
    if 1 in shape:
        forms += [[size for size in shape if size != 1]] * 2
    return [call(w, VIEW, a, pick(forms, how))]


def transpose(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """Two dims are swapped; perhaps also in memory."""
    rank = len(spec_of(w, a).shape)
    turned = call(w, "aten::transpose.int", a, b % max(1, rank), how % max(1, rank))
    return [call(w, "aten::clone", turned, memory_format=torch.contiguous_format) if how // 8 % 2 else turned]


def slices(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """This rank's part, or the same part on all ranks."""
    axis = _axis(w, a, b)
    size = spec_of(w, a).shape[axis]
    if how % 2:
        return [chunk(w, a, axis, _group(w, how // 2)[0])]
    return [
        call(w, "aten::slice.Tensor", a, axis, *[(0, max(1, size // 2)), (size // 2, size), (0, size)][how // 2 % 3])
    ]


def cat(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """Two values, concatenated."""
    other = _partner(w, values, a, b)
    made = call(w, "tensor_cast::cat", [a, other][:: 1 if how % 2 else -1], _axis(w, a, how // 2))
    return [replace(made, rms=max(a.rms, other.rms))]


def marker(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A region begins or ends, or is copied."""
    return [call(w, pick(MARKERS, how), a, w.region())]


def softmax(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A softmax along any dim."""
    return [replace(call(w, "aten::softmax.int", a, _axis(w, a, how)), rms=0.5)]


def reduction(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A mean or maximum along any dim, or what is left without it."""
    op = pick(("aten::mean.dim", "aten::amax", "aten::mean.dim"), how)
    reduced = call(w, op, a, [_axis(w, a, b)], True)
    return [call(w, "aten::sub.Tensor", a, reduced) if how // 4 % 2 else reduced]


def cast(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """The other floating dtype."""
    dtype = spec_of(w, a).dtype
    return [call(w, "aten::_to_copy", a, dtype=torch.bfloat16 if dtype is torch.float32 else torch.float32)]


def attention(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """Without projections, of rows that are normed first so that logits stay small."""
    shape = spec_of(w, a).shape
    if len(shape) not in (2, 3) or shape[-1] % 2:
        raise NoSite
    rows = norm(w, values, a, b, 0)[0]
    keys = call(w, VIEW, rows, [*shape[:-1], -1, 2])
    return [call(w, "tensor_cast::attention", rows, keys, keys, None, None, None, None, None)]


def in_place(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """Write into a value; all that share its storage change with it."""
    op = pick(("aten::mul_.Tensor", "aten::add_.Tensor"), how)
    made = call(w, op, a, 0.5)
    w.draft.change(made, on=a)
    return [replace(made, rms=a.rms + 0.5)]


def write(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A sum with an input, into which the sum is written afterwards: only the caller has to notice."""
    spec = spec_of(w, a)
    inputs = [v for v in values if w.draft.step(v) is None and v.number != a.number]
    alike = [v for v in inputs if w.draft.shape(v) == spec.shape and w.draft.specs(v)[0].dtype is spec.dtype]
    target = pick(alike, b)
    total = call(w, ADD, a, target)
    w.draft.change(call(w, pick(("aten::copy_", "aten::add_.Tensor"), how), target, total), on=target)
    return [replace(total, rms=a.rms + 1.0)]


def fused_reduce(
    w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int
) -> list[DraftValue]:
    """A product that is summed over a group by the same op."""
    spec = spec_of(w, a)
    inner = spec.shape[-1] if spec.shape else 0
    scale = 2.0 ** round(-math.log2(math.sqrt(max(inner, 1)) * max(a.rms, 1e-2)))
    width = (inner, 4, 8)[how % 3]
    dim, over = _group(w, b)
    matrix = new_input(w, "w", (inner, width), spec.dtype, ("replicated", "varying")[b % 2], recipe=Recipe(scale=scale))
    vector = new_input(w, "bias", (width,), spec.dtype) if how // 4 % 4 == 0 else None
    made = call(w, "tensor_cast::matmul_all_reduce", a, matrix, vector, RANK, over)
    return [replace(made, rms=(0.6 if vector is None else 1.2) * w.roles.size(dim))]


def quantised(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A linear with a quantised weight, perhaps summed over a group by the same op."""
    return [grow_quantised(w, a, b, how, _group(w, b // 16))]


def operator(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A Python operator on two values, or on one and a number."""
    other = 0.5 if how % 4 == 3 else _partner(w, values, a, b)
    op = pick(("python::add", "python::sub", "python::mul"), how // 4)
    rms = other.rms if isinstance(other, DraftValue) else 0.5
    return [replace(call(w, op, a, other), rms=a.rms * rms if op == "python::mul" else a.rms + rms)]


def index(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """A tensor indexed as Python does: one row, rows, or all of it with a dim more."""
    rank = len(spec_of(w, a).shape)
    forms: list[Any] = [0, slice(0, None, 2), slice(None), (Ellipsis, None), -1]
    if rank > 1:
        forms.append((slice(None), slice(0, 1)))
    return [replace(call(w, "python::getitem", a, pick(forms, how)), dense=False)]


def filled_tensor(
    w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int
) -> list[DraftValue]:
    """A newly created tensor, added to a value."""
    spec = spec_of(w, a)
    made = w.draft.call("aten::full", list(spec.shape[-1:]), 0.5, dtype=spec.dtype, like=a)
    return [replace(call(w, ADD, a, made), rms=a.rms + 0.5)]


def split(w: TransformerWriter, values: Sequence[DraftValue], a: DraftValue, b: int, how: int) -> list[DraftValue]:
    """Two halves along any dim, each a view of the whole."""
    axis = _axis(w, a, b)
    size = spec_of(w, a).shape[axis]
    if size < 2:
        raise NoSite
    both = call(w, "aten::split.Tensor", a, (size + 1) // 2, axis)
    return [replace(w.draft.item(both, i), dense=False, dtype=a.dtype) for i in (how % 2, 1 - how % 2)]


GROWTHS: dict[str, Growth] = {
    "unary": unary,
    "binary": binary,
    "constant": constant,
    "matmul": matmul,
    "norm": norm,
    "fused-norm": fused_norm,
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
    "all-to-all": all_to_all,
    "view": view,
    "transpose": transpose,
    "slice": slices,
    "cat": cat,
    "marker": marker,
    "softmax": softmax,
    "reduction": reduction,
    "cast": cast,
    "attention": attention,
    "in-place": in_place,
    "write": write,
    "fused-reduce": fused_reduce,
    "quantised": quantised,
    "operator": operator,
    "index": index,
    "filled": filled_tensor,
    "split": split,
}

#: Largest number of elements of a value, and largest magnitude before values are scaled down.
MOST_ELEMENTS = 2048
MOST_RMS = 6.0


def grow(
    w: TransformerWriter, op: str, values: Sequence[DraftValue], a: DraftValue, b: int, how: int
) -> list[DraftValue]:
    """The values that a growth adds; none if it does not fit, and then the program is unchanged."""
    found: list[DraftValue] = []
    attempt(w, _grow, found, op, values, a, b, how)
    w.draft.scope = ()
    return found


def _grow(
    w: TransformerWriter,
    found: list[DraftValue],
    op: str,
    values: Sequence[DraftValue],
    a: DraftValue,
    b: int,
    how: int,
) -> None:
    w.draft.scope = (op,)
    grown = GROWTHS[op](w, values, a, b, how)
    for i, value in enumerate(grown):
        if math.prod(w.draft.shape(value) or (MOST_ELEMENTS + 1,)) > MOST_ELEMENTS:
            raise NoSite
        if value.rms > MOST_RMS:
            grown[i] = replace(call(w, "aten::mul.Tensor", value, 0.125), rms=value.rms / 8)
    found += grown


def ends_of(w: TransformerWriter, values: Sequence[DraftValue]) -> list[DraftValue]:
    """The unused values; steps that only write do not count as readers."""
    known = {value.number for value in values}
    steps = [step for made, step in w.draft.steps(values) if step.on is None or made.number in known]
    read = {number for step in steps for number in step.reads}
    return [value for value in values if value.number not in read]
