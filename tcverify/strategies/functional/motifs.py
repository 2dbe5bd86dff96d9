"""What asynchronous programs are made of besides layers: collectives, compute, writes, views, and what passes stumble over."""

from __future__ import annotations

import torch

from tcverify.program import InputSpec, Recipe, shard
from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.collectives import KINDS, WAIT, companion, schedule_wait, start_collective
from tcverify.strategies.functional.flow import (
    ADD,
    MUL,
    RANK,
    FunctionalFlow,
    add,
    bound_value,
    group_of,
    is_floating,
    matmul,
    new_input,
    partner,
    pick_operand,
    pick_recent,
    unary,
    weight,
    write_into_value,
    write_norm,
)
from tcverify.strategies.functional.script import ScriptValue
from tcverify.strategies.transformer.sites import NoSite


def collective(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A collective of any kind, of a value or straight of an input."""
    kind, dim = KINDS[r.how % len(KINDS)], flow.dim(r.group)
    multiple = flow.roles.multiple(dim)

    def fits(value: ScriptValue) -> bool:
        shape = flow.script.spec(value).shape
        return bool(shape) and (kind != "reduce_scatter" or shape[0] % multiple == 0)

    first = pick_operand(flow, r.a, fits)
    if r.how // 8 % 8 == 7 and flow.script.writable(first):
        flow.script.call("aten::mul_.Tensor", first, 0.5)
        flow.labels.append("write-before")
    operands = [first]
    if r.form.startswith("coalesced"):
        other = companion(flow, first, r.b)
        if fits(other):
            operands.append(other)
    schedule_wait(flow, r, start_collective(flow, kind, operands, dim, r.form, r.how // 8), operands)


def compute(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """An op on every element of a value, or of two; of the main activation most often."""
    if r.how % 2 == 0:
        flow.pool.append(flow.main)
        flow.main = unary(flow, flow.main, r.how // 2)
        return
    value = pick_operand(flow, r.a)
    if r.how // 2 % 2:
        flow.pool.append(unary(flow, value, r.how // 4))
        return
    other = partner(flow, value, r.b)
    ops = (ADD, MUL, "aten::sub.Tensor", "aten::maximum", "tensor_cast::swiglu", ADD)
    op = ops[r.how // 4 % len(ops)]
    rms = value.rms * other.rms if op == MUL else value.rms + other.rms
    flow.pool.append(bound_value(flow, flow.script.call(op, value, other, rms=rms)))


def product(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A matrix product with a new weight; wide ones are far larger than anything else."""
    hidden = flow.setting.hidden
    width = (hidden, 4 * hidden, 2, 128, hidden, 16)[r.how // 2 % 6]
    if r.how % 2 == 0 and width == hidden:
        flow.pool.append(flow.main)
        flow.main = matmul(flow, flow.main, width)
        return
    value = pick_operand(flow, r.a, lambda value: len(flow.script.spec(value).shape) == 2)
    made = matmul(flow, value, width)
    if r.how % 4 == 1 and width > 16:  # and back, so that much lives for a short while
        made = matmul(flow, unary(flow, made, r.b), hidden)
    flow.pool.append(made)


def norm(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A norm, of the main activation or of another."""
    if r.how % 2 == 0:
        flow.pool.append(flow.main)
        flow.main = write_norm(flow, flow.main, r.how // 2)
    else:
        flow.pool.append(
            write_norm(flow, pick_operand(flow, r.a, lambda v: len(flow.script.spec(v).shape) == 2), r.how // 2)
        )


def write(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A write into a value that others may read, or into one view of it."""
    target = pick_operand(flow, r.a, flow.script.writable)
    if r.how // 4 % 3 == 2 and (flow.script.spec(target).shape or (0,))[0] > 1:
        target = flow.script.call("aten::slice.Tensor", target, 0, 0, 1)
    write_into_value(
        flow, target, r.how, None if r.how % 8 else pick_operand(flow, r.b, lambda v: flow.script.same_type(v, target))
    )
    flow.labels.append("write")


def view(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Another view of a value, or two that overlap."""
    value = pick_operand(flow, r.a, lambda v: len(flow.script.spec(v).shape) == 2)
    rows, columns = flow.script.shape(value)
    call = flow.script.call
    kind = r.how % 5
    if kind == 0:
        flow.pool.append(call("aten::view", value, [columns, rows]))
    elif kind == 1 and rows > 1:
        flow.pool += [call("aten::slice.Tensor", value, 0, 0, rows - 1), call("aten::slice.Tensor", value, 0, 1, rows)]
    elif kind == 2:
        turned = call("aten::transpose.int", value, 0, 1)
        flow.pool.append(call("aten::clone", turned, memory_format=torch.contiguous_format))
    elif kind == 3 and rows % 2 == 0 and rows:
        both = call("aten::split.Tensor", value, rows // 2)
        flow.pool += [flow.script.item(both, i) for i in (0, 1)]
    else:
        flow.pool.append(call("aten::select.int", value, 0, 0))


def pair(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Two collectives beside each other: alike but in kind; or the second of what is computed behind the first."""
    dim = flow.dim(r.group)
    multiple = flow.roles.multiple(dim)

    def divides(value: ScriptValue) -> bool:
        shape = flow.script.spec(value).shape
        return bool(shape) and shape[0] % multiple == 0

    first = pick_operand(flow, r.a, divides)
    if r.how % 2:
        (one,) = start_collective(flow, "all_gather", [first], dim)
        arrived = flow.script.call(WAIT, one)
        flow.pool.append(unary(flow, arrived, r.how // 2))
        second = unary(flow, pick_operand(flow, r.b, lambda v: bool(flow.script.spec(v).shape)), r.how // 4)
        schedule_wait(flow, r, start_collective(flow, "all_gather", [second], dim), [second])
        return
    second = pick_operand(flow, r.b, divides)
    kinds = (("reduce_scatter", "all_reduce"), ("all_gather", "reduce_scatter"), ("all_reduce", "all_gather"))
    for kind, value in zip(kinds[r.how // 2 % 3], (first, second), strict=True):
        schedule_wait(flow, r, start_collective(flow, kind, [value], dim, how=r.how // 8), [value])


def unshard(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A weight that is gathered, and multiplied with twice; the gathered one may be far larger than anything else."""
    dim = flow.dim(r.group)
    hidden = flow.setting.hidden
    rows = (2, 4, 8, 16)[r.how % 4] if hidden <= 16 else 2
    part = new_input(flow, "shard", (rows, hidden), "varying", dim)
    (started,) = start_collective(flow, "all_gather", [part], dim, r.form if r.form == "out" else "new")
    between = unary(flow, flow.main, r.b) if r.how // 4 % 2 else flow.main
    full = flow.script.call(WAIT, started)
    turned = flow.script.call("aten::transpose.int", full, 0, 1)
    scale = 1.0 / (max(flow.roles.sizes(dim)) * rows)
    scores = flow.script.call(MUL, flow.script.call("aten::mm", between, turned), scale, rms=0.6)
    made = flow.script.call("aten::mm", unary(flow, scores, r.how // 8), full, rms=0.6)
    flow.pool.append(flow.main)
    flow.main = add(flow, made, between)


def uneven_collectives(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Collectives of values whose sizes differ between ranks, on groups whose members agree."""
    dims = flow.dims
    over = dims[r.group % len(dims)]
    cut = dims[(r.group + 1) % len(dims)]
    hidden = flow.setting.hidden
    rows = max(flow.roles.sizes(cut)) * flow.tokens
    uneven = len(set(flow.roles.sizes(cut))) > 1
    if cut == over and not uneven:
        raise NoSite
    flow.labels.append("ragged")
    for number, more in enumerate((0, 0) if uneven and cut == over else (-1, 1)):
        placements = flow.roles.declared([(cut, shard(0))])
        shape = (rows + more, hidden * (number + 1))
        part = flow.script.input(InputSpec("part", shape, flow.dtype, placements), 0.6)
        kind = "all_gather" if r.how // 2 % 4 == 3 else "all_reduce"
        (item,) = start_collective(flow, kind, [part], over, how=r.how)
        schedule_wait(flow, r, (item,), [part])


def integers(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A reduction of integers."""
    dim = flow.dim(r.group)
    dtype = (torch.int64, torch.int32)[r.b % 2]
    shape = ((flow.tokens,), (1,), (flow.tokens, 3))[r.how % 3]
    value = new_input(flow, "counts", shape, "varying", dim, dtype, Recipe("integers", 50.0))
    op = ("sum", "max", "min", "band", "bor", "bxor")[r.how // 3 % 6]
    (item,) = start_collective(flow, "all_reduce", [value], dim, r.form, reduce_op=op)
    flow.labels.append("integers")
    schedule_wait(flow, r, (item,), [value])


def blocking(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A collective of tensor_cast, which blocks where it stands."""
    dim = flow.dim(r.group)
    value = pick_operand(flow, r.a, lambda v: len(flow.script.spec(v).shape) == 2)
    size = max(flow.roles.sizes(dim))
    made = flow.script.call("tensor_cast::all_reduce", value, RANK, group_of(flow, dim), rms=value.rms * size)
    flow.labels.append("blocking")
    made = bound_value(flow, made)
    # What blocks stands on all ranks, whoever reads it.
    flow.outputs.append(made)
    flow.pool.append(made)


def buffer(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A buffer that two collectives write into, one after the other, and that is read in between."""
    dim = flow.dim(r.group)
    value = pick_operand(flow, r.a, lambda v: bool(flow.script.spec(v).shape) and flow.script.writable(v))
    own = flow.script.call("aten::clone", value)
    (first,) = start_collective(flow, "all_reduce", [own], dim, "in-place", how=0)
    arrived = flow.script.call(WAIT, first)
    flow.pool.append(unary(flow, arrived, r.how))
    if r.how % 2:
        other = partner(flow, value, r.b)
        flow.script.call("aten::copy_", arrived, other)
    else:
        flow.script.call("aten::mul_.Tensor", arrived, 0.5)
    again = flow.script.call("_c10d_functional::all_reduce_", arrived, "sum", dim, rms=arrived.rms)
    flow.labels.append("buffer")
    schedule_wait(flow, r, (bounded_in_place(again, flow, dim),), [value])


def bounded_in_place(value: ScriptValue, flow: FunctionalFlow, dim: str) -> ScriptValue:
    return ScriptValue(value.number, value.rms * max(flow.roles.sizes(dim)))


def inputs(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Inputs straight into a collective, whose result is an output as it comes."""
    dim = flow.dim(r.group)
    value = new_input(flow, "x", (flow.roles.multiple(dim) * (1 + r.b % 3),), "partial", dim)
    (item,) = start_collective(flow, KINDS[r.how % 3], [value], dim)
    flow.outputs.append(flow.script.call(WAIT, item))


def declared_order(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """An order that nothing but metadata says, of the latest call and an earlier one."""
    calls = flow.script.calls()
    moved = {number for swap in flow.script.swaps for number in swap[:2]}
    found = [number for number in calls if number not in moved]
    if len(found) < 2:
        raise NoSite
    later, earlier = found[-1 - r.b % 2], pick_recent([ScriptValue(n) for n in found[:-2]], r.a).number
    flow.script.after.append((later, earlier))
    flow.labels.append("after")


__all__ = [
    "blocking",
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
