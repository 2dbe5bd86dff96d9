"""Functional programs, as AOTAutograd hands them to passes of compilers: nothing is written but inputs, by copies at the end.

They hold what such passes look for: results of collectives and of indexed writes that could be written in place, products
behind gathers and before scatters, gradients that are divided and reduced, copies into inputs, waits for what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from tcverify.program import InputSpec, Mesh, Program, Recipe
from tcverify.strategies.functional.choices import FunctionalRecord, FunctionalSetting
from tcverify.strategies.functional.collectives import KINDS, WAIT, companion, start_collective
from tcverify.strategies.functional.flow import (
    ADD,
    FunctionalFlow,
    bound_value,
    group_size,
    is_floating,
    multiply_by_weight,
    new_input,
    partner,
    pick_operand,
    pick_recent,
    unary,
    weight,
)
from tcverify.strategies.functional.programs import close_flow, open_flow
from tcverify.strategies.functional.script import ScriptValue
from tcverify.strategies.transformer.sites import NoSite

RECORDS, RECORD_WIDTH, HEADER_WIDTH = 10, 7, 5
WIDTH = HEADER_WIDTH + RECORDS * RECORD_WIDTH

_HIDDEN = (4, 8, 2, 6, 3)
_KINDS = (
    "none", "collective", "collective", "compute", "scatter", "update", "gather-product", "product-scatter", "gradients",
    "wait", "view", "swap", "scatter", "gather-product", "product-scatter", "update", "collective", "gradients",
)  # fmt: skip


@dataclass(slots=True)
class Epilogue:
    """What is copied into inputs at the end: (input, value); and inputs that may be."""

    copies: list[tuple[ScriptValue, ScriptValue]] = field(default_factory=list)
    inputs: list[ScriptValue] = field(default_factory=list)
    late: list[ScriptValue] = field(default_factory=list)


def decode_compiled(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a functional program. What does not fit is left out."""
    choices = choices.ljust(WIDTH, b"\0")
    head = choices[:HEADER_WIDTH]
    hidden = _HIDDEN[head[0] % len(_HIDDEN)]
    data = ("varying", "partial", "varying", "shard")[head[1] % 4]
    setting = FunctionalSetting("any", 1, hidden, 1 + head[2] % 3, "f32", bool(head[3] % 2), data, 6, head[4])
    flow = open_flow(mesh, setting)
    end = Epilogue(inputs=[flow.main])
    for number in range(RECORDS):
        row = choices[HEADER_WIDTH + number * RECORD_WIDTH :][:RECORD_WIDTH]
        kind = _KINDS[row[0] % len(_KINDS)]
        flow.number = number
        _land(flow, end, number)
        if kind != "none" and len(flow.script) < 48:
            record = _record(kind, row)
            flow.attempt(lambda inner, r: _MOTIFS[r.kind](inner, r, end), record)
    _land(flow, end, RECORDS + 4)
    for value in end.late:
        flow.attempt(partial(_returned, value), _record("none", bytes(RECORD_WIDTH)))
    copied: set[int] = set()
    for target, source in end.copies:
        if target.number not in copied and flow.script.same_type(target, source):
            copied.add(target.number)
            flow.script.call("aten::copy_", target, source)
    program = close_flow(flow)
    return replace(program, labels=("compiled", *(one for one in program.labels if one not in ("functional", "any"))))


def _record(kind: str, row: bytes) -> FunctionalRecord:
    return FunctionalRecord(kind, row[1], row[2], row[3], "new", row[4], row[5] % 4, str(row[6]))


def _keep(flow: FunctionalFlow, end: Epilogue, value: ScriptValue, r: FunctionalRecord) -> None:
    """Let a value be read by others, returned, copied into an input, or several of these."""
    use = int(r.use) % 8
    if use in (0, 1, 4):
        flow.pool.append(value)
    if use in (1, 2, 5) or not is_floating(flow, value):
        flow.outputs.append(value)
    if use in (3, 4, 5):
        _copied(flow, end, value, r.b)
    if use == 6:
        end.late.append(value)
    if use == 7:
        first = unary(flow, value, r.how)
        flow.pool += [value, first]


def _kept(end: Epilogue, value: ScriptValue, flow: FunctionalFlow, r: FunctionalRecord) -> None:
    _keep(flow, end, bound_value(flow, value), r)


def _returned(value: ScriptValue, flow: FunctionalFlow, r: FunctionalRecord) -> None:
    flow.outputs.append(unary(flow, value, 0))


def _copied(flow: FunctionalFlow, end: Epilogue, value: ScriptValue, choice: int) -> None:
    found = [one for one in end.inputs if flow.script.same_type(one, value)]
    target = pick_recent(found, choice) if found and choice % 4 != 3 else None
    if target is None:
        spec = flow.script.spec(value)
        target = new_input(flow, "state", flow.script.shape(value), "varying", dtype=spec.dtype)
        end.inputs.append(target)
    if flow.script.spec(value).alias == flow.script.spec(target).alias:
        value = flow.script.call("aten::clone", value)
    flow.labels.append("update")
    end.copies.append((target, value))


def _operand(
    flow: FunctionalFlow, end: Epilogue, r: FunctionalRecord, need: Callable[[ScriptValue], bool] = lambda value: True
) -> ScriptValue:
    """What a motif works on; an input more often than elsewhere, since those are what is written into."""
    found = [one for one in end.inputs if flow.script.readable(one) and is_floating(flow, one) and need(one)]
    if r.a % 3 == 2 and found:
        return pick_recent(found, r.a)
    value = pick_operand(flow, r.a, need)
    if isinstance(flow.script.makers[value.number], InputSpec) and value not in end.inputs:
        end.inputs.append(value)
    return value


def _collective(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """A collective whose wait stands behind it, or some records later; of two values at once here and there."""
    kind, dim = KINDS[r.how % len(KINDS)], flow.dim(r.group)
    multiple = flow.roles.multiple(dim)

    def fits(value: ScriptValue) -> bool:
        shape = flow.script.spec(value).shape
        return bool(shape) and (kind != "reduce_scatter" or shape[0] % multiple == 0)

    operands, form = [_operand(flow, end, r, fits)], "new"
    if r.how // 8 % 8 == 7:
        operands.append(companion(flow, operands[0], r.b))
        form = "coalesced"
        if not fits(operands[1]):
            raise NoSite
    _launch(flow, end, r, list(start_collective(flow, kind, operands, dim, form, r.how // 8)))


@dataclass(frozen=True, slots=True)
class _Flight:
    items: tuple[ScriptValue, ...]
    due: int
    record: FunctionalRecord


def _launch(flow: FunctionalFlow, end: Epilogue, r: FunctionalRecord, items: list[ScriptValue]) -> None:
    flow.pending.append(_Flight(tuple(items), flow.number + r.delay, r))  # type: ignore[arg-type]
    if r.delay == 0:
        _land(flow, end, flow.number)


def _land(flow: FunctionalFlow, end: Epilogue, number: int) -> None:
    """Wait for what is due."""
    flights: list[_Flight] = flow.pending  # type: ignore[assignment]
    due = [one for one in flights if one.due <= number]
    flow.pending = [one for one in flights if one.due > number]  # type: ignore[misc]
    for one in reversed(due) if flow.setting.late else due:
        for item in one.items:
            arrived = flow.script.call(WAIT, item)
            if not flow.attempt(partial(_kept, end, arrived), one.record):
                flow.outputs.append(arrived)


def _compute(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    value = _operand(flow, end, r)
    if r.how % 3 == 0:
        other = partner(flow, value, r.b)
        _keep(flow, end, bound_value(flow, flow.script.call(ADD, value, other, rms=value.rms + other.rms)), r)
        return
    _keep(flow, end, unary(flow, value, r.how // 3), r)


def _scatter(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """A value with some of its rows replaced."""
    call = flow.script.call
    value = _operand(flow, end, r, lambda v: len(flow.script.spec(v).shape) == 2)
    rows, columns = flow.script.shape(value)
    if not rows:
        raise NoSite
    dtype = flow.script.spec(value).dtype
    kind = r.how % 4
    if kind == 0:
        source = new_input(flow, "row", (columns,), "varying", dtype=dtype)
        made = call("aten::select_scatter", value, source, 0, r.b % rows)
    elif kind == 1:
        source = new_input(flow, "rows", (1, columns), "varying", dtype=dtype)
        made = call("aten::slice_scatter", value, source, 0, r.b % rows, r.b % rows + 1)
    else:
        index = new_input(flow, "index", (1,), dtype=torch.int64, recipe=Recipe("integers", 0.0))
        source = new_input(flow, "rows", (1, columns), "varying", dtype=dtype)
        made = call("aten::index_put", value, [index], source, kind == 3)
    flow.labels.append("scatter")
    _keep(flow, end, made, r)


def _update(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """A value is copied into an input at the end."""
    value = _operand(flow, end, r)
    if r.how % 3:
        value = unary(flow, value, r.how // 3)
    _copied(flow, end, value, r.b)


def _swap(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """Two inputs change places, by way of a copy."""
    first = _operand(flow, end, r, lambda v: v in end.inputs)
    second = new_input(flow, "state", flow.script.shape(first), "varying", dtype=flow.script.spec(first).dtype)
    end.inputs.append(second)
    kept = flow.script.call("aten::clone", first)
    flow.labels.append("swap")
    end.copies += [(first, second), (second, kept)]


def _wait(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """A wait for what is there already: an input, or what has been waited for."""
    value = _operand(flow, end, r)
    _keep(flow, end, flow.script.call(WAIT, value), replace(r, use="0"))
    flow.labels.append("waited-twice")


def _view(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    value = _operand(flow, end, r, lambda v: len(flow.script.spec(v).shape) == 2)
    rows, columns = flow.script.shape(value)
    if r.how % 3 == 0:
        flow.pool.append(flow.script.call("aten::view", value, [columns, rows]))
    elif r.how % 3 == 1 and rows > 1:
        flow.pool.append(flow.script.call("aten::slice.Tensor", value, 0, 0, rows - 1))
    else:
        flow.outputs.append(flow.script.call("aten::view", value, [-1]))


def _parts(flow: FunctionalFlow, value: ScriptValue, dim: str, along: int, order: int) -> list[ScriptValue]:
    """The chunks of a value along a dim, one for each member of the group; in another order where `order` says so."""
    extent = flow.script.shape(value)[along]
    sizes = set(flow.roles.sizes(dim))
    if len(sizes) > 1:
        raise NoSite
    (size,) = sizes
    if extent % size or not extent:
        raise NoSite
    if order % 2:
        bounds = [(extent // size * i, extent // size * (i + 1)) for i in range(size)]
        parts = [flow.script.call("aten::slice.Tensor", value, along, *one) for one in bounds]
    else:
        made = flow.script.call("aten::split.Tensor", value, extent // size, *([along] if along else []))
        parts = [flow.script.item(made, i) for i in range(size)]
    if order % 8 == 7:
        parts = parts[::-1]
        flow.labels.append("parts-reversed")
    return parts


def _gather_product(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """Products of what is gathered, along any dim, of rows or of batches of rows."""
    dim, call, hidden = flow.dim(r.group), flow.script.call, flow.setting.hidden
    deep = r.how % 2
    shape = (flow.tokens, 2, hidden) if deep else (flow.tokens, hidden)
    part = new_input(flow, "part", shape, "varying", dim)
    (started,) = start_collective(flow, "all_gather", [part], dim)
    whole = call(WAIT, started)
    along = r.how // 2 % 4 % len(shape)
    if along:
        # The form of `all_gather_tensor` for dims other than the first.
        whole = call("aten::cat", _parts(flow, whole, dim, 0, r.b), along - (len(shape) if r.b // 8 % 4 == 3 else 0))
    inner = flow.script.shape(whole)[-1]
    rows = call("aten::reshape", whole, [-1, inner]) if deep else whole
    for number in range(1 + r.how // 8 % 2):
        by = _weight(flow, rows, inner, (hidden, 5)[number], r.how // 16)
        made, _ = multiply_by_weight(flow, rows, by)
        if deep:
            back = [*flow.script.shape(whole)[:-1], (hidden, 5)[number]]
            made = call("aten::reshape", made, back[1:2] + back[:1] + back[2:] if r.a % 16 == 15 else back)
        flow.outputs.append(made)
    if r.how // 32 % 3 == 0:
        flow.outputs.append(unary(flow, whole, r.a))
    flow.labels.append("gather-product")


def _weight(flow: FunctionalFlow, value: ScriptValue, inner: int, width: int, how: int) -> ScriptValue:
    """A weight, as it is or turned; here and there one that is computed behind what came before."""
    if how % 3 == 1:
        return flow.script.call("aten::t", weight(flow, value, (width, inner)))
    made = weight(flow, value, (inner, width))
    return unary(flow, made, how) if how % 3 == 2 else made


def _product_scatter(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """A product that is reduced and scattered, along any dim, of rows or of batches of rows."""
    dim, call, hidden = flow.dim(r.group), flow.script.call, flow.setting.hidden
    deep = r.how % 2
    shape = (flow.tokens, flow.tokens, hidden) if deep else (flow.tokens, hidden)
    value = new_input(flow, "part", shape, "varying", dim)
    rows = call("aten::reshape", value, [-1, hidden]) if deep else value
    made, _ = multiply_by_weight(flow, rows, _weight(flow, rows, hidden, flow.tokens, r.b))
    if deep:
        flat = [flow.tokens, flow.tokens, flow.tokens]
        halves = [1, flow.tokens * flow.tokens, flow.tokens] if r.how // 8 % 4 == 3 else flat
        made = call("aten::reshape", made, halves)
    along = r.how // 2 % 4 % len(flow.script.shape(made))
    if along:
        made = call("aten::cat", _parts(flow, made, dim, along, r.a))
    op = ("sum", "avg", "sum", "max")[r.how // 32 % 4]
    (started,) = start_collective(flow, "reduce_scatter", [made], dim, reduce_op=op)
    flow.labels.append("product-scatter")
    _launch(flow, end, r, [started])


def _gradients(flow: FunctionalFlow, r: FunctionalRecord, end: Epilogue) -> None:
    """Gradients, divided and reduced as data-parallel hooks do it; copied into inputs, or returned."""
    call = flow.script.call
    for number in range(2 + r.how % 2):
        choice = r.how // 2 + number * (r.b % 4)
        dim = flow.dim(r.group + (number if r.b % 8 == 7 else 0))
        dtype = torch.bfloat16 if r.a % 8 == 5 and number else torch.float32
        shape = (flow.tokens, flow.setting.hidden) if choice % 3 else (flow.setting.hidden,)
        gradient = new_input(flow, "gradient", shape, "varying", dim, dtype)
        if choice % 4 == 3:
            gradient = unary(flow, gradient, choice)
        size: object = group_size(flow, dim)
        if r.b // 8 % 8 == 7 and number:
            size = 2
        divided = call("aten::div.Tensor", gradient, size)
        op = "max" if r.b // 16 % 8 == 7 and number else "sum"
        (started,) = start_collective(flow, "all_reduce", [divided], dim, reduce_op=op)
        arrived = call(WAIT, started)
        if r.how // 16 % 2:
            spec = flow.script.spec(arrived)
            parameter = new_input(flow, "parameter", flow.script.shape(arrived), "varying", dtype=spec.dtype)
            end.copies.append((parameter, arrived))
        else:
            flow.outputs.append(arrived)
    flow.labels.append("gradients")


_MOTIFS: dict[str, Callable[[FunctionalFlow, FunctionalRecord, Epilogue], None]] = {
    "collective": _collective,
    "compute": _compute,
    "scatter": _scatter,
    "update": _update,
    "swap": _swap,
    "wait": _wait,
    "view": _view,
    "gather-product": _gather_product,
    "product-scatter": _product_scatter,
    "gradients": _gradients,
}

__all__ = ["WIDTH", "decode_compiled"]
