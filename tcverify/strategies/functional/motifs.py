"""Parts of asynchronous programs besides layers: collectives, compute, writes, views, and typical causes of bugs in passes."""

from __future__ import annotations

from dataclasses import replace

import torch

from tcverify.program import Recipe, shard
from tcverify.strategies.draft import DraftValue, NoSite
from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.collectives import KINDS, WAIT, companion, schedule_wait, start_collective
from tcverify.strategies.functional.writing import (
    ADD,
    MUL,
    FunctionalWriter,
    add,
    bound_value,
    is_floating,
    matmul,
    new_input,
    partner,
    pick_operand,
    unary,
    weight,
    write_into_value,
    write_norm,
)
from tcverify.strategies.transformer.sites import pick_recent


def collective(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A collective of any kind, of a value or directly of an input."""
    kind, dim = KINDS[r.how % len(KINDS)], w.dim(r.group)
    multiple = w.roles.multiple(dim)

    def fits(value: DraftValue) -> bool:
        shape = w.draft.spec(value).shape
        return bool(shape) and (kind != "reduce_scatter" or shape[0] % multiple == 0)

    first = pick_operand(w, r.a, fits)
    if r.how // 8 % 8 == 7 and w.draft.writable(first):
        w.draft.call("aten::mul_.Tensor", first, 0.5)
        w.labels.append("write-before")
    operands = [first]
    if r.form.startswith("coalesced"):
        other = companion(w, first, r.b)
        if fits(other):
            operands.append(other)
    schedule_wait(w, r, start_collective(w, kind, operands, dim, r.form, r.how // 8), operands)


def compute(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """An elementwise op on one or two values; most often on the main activation."""
    if r.how % 2 == 0:
        w.pool.append(w.main)
        w.main = unary(w, w.main, r.how // 2)
        return
    value = pick_operand(w, r.a)
    if r.how // 2 % 2:
        w.pool.append(unary(w, value, r.how // 4))
        return
    other = partner(w, value, r.b)
    ops = (ADD, MUL, "aten::sub.Tensor", "aten::maximum", "tensor_cast::swiglu", ADD)
    op = ops[r.how // 4 % len(ops)]
    rms = value.rms * other.rms if op == MUL else value.rms + other.rms
    w.pool.append(bound_value(w, w.draft.call(op, value, other, rms=rms)))


def product(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A matrix product with a new weight; wide ones are far larger than anything else."""
    hidden = w.setting.hidden
    width = (hidden, 4 * hidden, 2, 128, hidden, 16)[r.how // 2 % 6]
    if r.how % 2 == 0 and width == hidden:
        w.pool.append(w.main)
        w.main = matmul(w, w.main, width)
        return
    value = pick_operand(w, r.a, lambda value: len(w.draft.spec(value).shape) == 2)
    made = matmul(w, value, width)
    if r.how % 4 == 1 and width > 16:  # and back, so that much lives for a short while
        made = matmul(w, unary(w, made, r.b), hidden)
    w.pool.append(made)


def norm(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A norm, of the main activation or of another."""
    if r.how % 2 == 0:
        w.pool.append(w.main)
        w.main = write_norm(w, w.main, r.how // 2)
    else:
        w.pool.append(write_norm(w, pick_operand(w, r.a, lambda v: len(w.draft.spec(v).shape) == 2), r.how // 2))


def write(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A write into a value that others may read, or into one view of it."""
    target = pick_operand(w, r.a, w.draft.writable)
    if r.how // 4 % 3 == 2 and (w.draft.spec(target).shape or (0,))[0] > 1:
        target = w.draft.call("aten::slice.Tensor", target, 0, 0, 1)
    write_into_value(
        w, target, r.how, None if r.how % 8 else pick_operand(w, r.b, lambda v: w.draft.same_type(v, target))
    )
    w.labels.append("write")


def view(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Another view of a value, or two that overlap."""
    value = pick_operand(w, r.a, lambda v: len(w.draft.spec(v).shape) == 2)
    rows, columns = w.draft.shape(value)
    call = w.draft.call
    kind = r.how % 5
    if kind == 0:
        w.pool.append(call("aten::view", value, [columns, rows]))
    elif kind == 1 and rows > 1:
        w.pool += [call("aten::slice.Tensor", value, 0, 0, rows - 1), call("aten::slice.Tensor", value, 0, 1, rows)]
    elif kind == 2:
        turned = call("aten::transpose.int", value, 0, 1)
        w.pool.append(call("aten::clone", turned, memory_format=torch.contiguous_format))
    elif kind == 3 and rows % 2 == 0 and rows:
        both = call("aten::split.Tensor", value, rows // 2)
        w.pool += [w.draft.item(both, i) for i in (0, 1)]
    else:
        w.pool.append(call("aten::select.int", value, 0, 0))


def pair(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Two neighbouring collectives that differ only in kind; or one that depends on the other."""
    dim = w.dim(r.group)
    multiple = w.roles.multiple(dim)

    def divides(value: DraftValue) -> bool:
        shape = w.draft.spec(value).shape
        return bool(shape) and shape[0] % multiple == 0

    first = pick_operand(w, r.a, divides)
    if r.how % 2:
        (one,) = start_collective(w, "all_gather", [first], dim)
        arrived = w.draft.call(WAIT, one)
        w.pool.append(unary(w, arrived, r.how // 2))
        second = unary(w, pick_operand(w, r.b, lambda v: bool(w.draft.spec(v).shape)), r.how // 4)
        schedule_wait(w, r, start_collective(w, "all_gather", [second], dim), [second])
        return
    second = pick_operand(w, r.b, divides)
    kinds = (("reduce_scatter", "all_reduce"), ("all_gather", "reduce_scatter"), ("all_reduce", "all_gather"))
    for kind, value in zip(kinds[r.how // 2 % 3], (first, second), strict=True):
        schedule_wait(w, r, start_collective(w, kind, [value], dim, how=r.how // 8), [value])


def unshard(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A weight that is gathered, and multiplied with twice; the gathered one may be far larger than anything else."""
    dim = w.dim(r.group)
    hidden = w.setting.hidden
    rows = (2, 4, 8, 16)[r.how % 4] if hidden <= 16 else 2
    part = new_input(w, "shard", (rows, hidden), "varying", dim)
    (started,) = start_collective(w, "all_gather", [part], dim, r.form if r.form == "out" else "new")
    between = unary(w, w.main, r.b) if r.how // 4 % 2 else w.main
    full = w.draft.call(WAIT, started)
    turned = w.draft.call("aten::transpose.int", full, 0, 1)
    scale = 1.0 / (max(w.roles.sizes(dim)) * rows)
    scores = w.draft.call(MUL, w.draft.call("aten::mm", between, turned), scale, rms=0.6)
    made = w.draft.call("aten::mm", unary(w, scores, r.how // 8), full, rms=0.6)
    w.pool.append(w.main)
    w.main = add(w, made, between)


def uneven_collectives(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Collectives of values whose sizes differ between ranks, on groups whose members agree."""
    dims = w.dims
    over = dims[r.group % len(dims)]
    cut = dims[(r.group + 1) % len(dims)]
    hidden = w.setting.hidden
    rows = max(w.roles.sizes(cut)) * w.tokens
    uneven = len(set(w.roles.sizes(cut))) > 1
    if cut == over and not uneven:
        raise NoSite
    w.labels.append("ragged")
    for number, more in enumerate((0, 0) if uneven and cut == over else (-1, 1)):
        placements = w.roles.declared([(cut, shard(0))])
        shape = (rows + more, hidden * (number + 1))
        part = w.draft.input("part", shape, w.dtype, placements, rms=0.6)
        kind = "all_gather" if r.how // 2 % 4 == 3 else "all_reduce"
        (item,) = start_collective(w, kind, [part], over, how=r.how)
        schedule_wait(w, r, (item,), [part])


def integers(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A reduction of integers."""
    dim = w.dim(r.group)
    dtype = (torch.int64, torch.int32)[r.b % 2]
    shape = ((w.tokens,), (1,), (w.tokens, 3))[r.how % 3]
    value = new_input(w, "counts", shape, "varying", dim, dtype, Recipe("integers", 50.0))
    op = ("sum", "max", "min", "band", "bor", "bxor")[r.how // 3 % 6]
    (item,) = start_collective(w, "all_reduce", [value], dim, r.form, reduce_op=op)
    w.labels.append("integers")
    schedule_wait(w, r, (item,), [value])


def buffer(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A buffer that two collectives write into, one after the other, and that is read in between."""
    dim = w.dim(r.group)
    value = pick_operand(w, r.a, lambda v: bool(w.draft.spec(v).shape) and w.draft.writable(v))
    own = w.draft.call("aten::clone", value)
    (first,) = start_collective(w, "all_reduce", [own], dim, "in-place", how=0)
    arrived = w.draft.call(WAIT, first)
    w.pool.append(unary(w, arrived, r.how))
    if r.how % 2:
        other = partner(w, value, r.b)
        w.draft.call("aten::copy_", arrived, other)
    else:
        w.draft.call("aten::mul_.Tensor", arrived, 0.5)
    again = w.draft.call("_c10d_functional::all_reduce_", arrived, "sum", dim, rms=arrived.rms)
    w.labels.append("buffer")
    schedule_wait(w, r, (bounded_in_place(again, w, dim),), [value])


def bounded_in_place(value: DraftValue, w: FunctionalWriter, dim: str) -> DraftValue:
    return replace(value, rms=value.rms * max(w.roles.sizes(dim)))


def inputs(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Inputs directly into a collective, whose result is an output unchanged."""
    dim = w.dim(r.group)
    value = new_input(w, "x", (w.roles.multiple(dim) * (1 + r.b % 3),), "partial", dim)
    (item,) = start_collective(w, KINDS[r.how % 3], [value], dim)
    w.outputs.append(w.draft.call(WAIT, item))


def declared_order(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """An order of the latest call and an earlier one that only metadata declares."""
    calls = w.draft.calls()
    moved = {number for swap in w.draft.swaps for number in swap[:2]}
    found = [number for number in calls if number not in moved]
    if len(found) < 2:
        raise NoSite
    later, earlier = found[-1 - r.b % 2], pick_recent(found[:-2], r.a)
    w.draft.after.append((later, earlier))
    w.labels.append("after")


__all__ = [
    "buffer",
    "collective",
    "compute",
    "declared_order",
    "inputs",
    "integers",
    "is_floating",
    "norm",
    "pair",
    "product",
    "uneven_collectives",
    "unshard",
    "view",
    "weight",
    "write",
]  # fmt: skip
