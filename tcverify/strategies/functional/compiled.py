"""Functional programs, as AOTAutograd passes them to compilers: only inputs are written, by copies at the end.

They contain what such passes look for: results of collectives and of indexed writes that could be in place, products after
gathers and before scatters, gradients that are divided and reduced, copies into inputs, waits for completed collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tcverify.program import Mesh, Program, Recipe
from tcverify.strategies.draft import DraftValue, NoSite, attempt
from tcverify.strategies.functional.choices import FunctionalRecord, FunctionalSetting
from tcverify.strategies.functional.collectives import KINDS, WAIT, companion, start_collective
from tcverify.strategies.functional.programs import begin_program, finish_program
from tcverify.strategies.functional.repeated import joined_pieces, made_alike
from tcverify.strategies.functional.writing import (
    FunctionalWriter,
    bound_value,
    combine,
    group_size,
    is_floating,
    multiply_by_weight,
    new_input,
    partner,
    pick_operand,
    unary,
    weight,
)
from tcverify.strategies.transformer.sites import pick_recent

RECORDS, RECORD_WIDTH, HEADER_WIDTH = 10, 7, 5
WIDTH = HEADER_WIDTH + RECORDS * RECORD_WIDTH

HIDDEN = (4, 8, 2, 6, 3)
_KINDS = (
    "none", "collective", "collective", "compute", "scatter", "update", "gather-product", "product-scatter", "gradients",
    "wait", "view", "swap", "scatter", "gather-product", "product-scatter", "update", "collective", "gradients",
    "linear", "linear", "like-ops", "pieces",
)  # fmt: skip

#: See `COMBINATIONS`.
_COMBINED = ("add", "add", "alpha", "add", "sub", "mul", "add", "sub alpha")


@dataclass(slots=True)
class CompiledWriter(FunctionalWriter):
    """The state of a functional program under construction.

    Attributes:
        copies: what is copied into inputs at the end: (input, value).
        inputs: inputs that may be written.
        late: values that are read and returned at the end.
    """

    copies: list[tuple[DraftValue, DraftValue]] = field(default_factory=list)
    inputs: list[DraftValue] = field(default_factory=list)
    late: list[DraftValue] = field(default_factory=list)


def decode_compiled(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a functional program. Parts that do not fit are left out."""
    choices = choices.ljust(WIDTH, b"\0")
    head = choices[:HEADER_WIDTH]
    hidden = HIDDEN[head[0] % len(HIDDEN)]
    data = ("varying", "partial", "varying", "shard")[head[1] % 4]
    setting = FunctionalSetting("any", 1, hidden, 1 + head[2] % 3, "f32", bool(head[3] % 2), data, 6, head[4])
    w = begin_program(mesh, setting, CompiledWriter)
    w.inputs.append(w.main)
    for number in range(RECORDS):
        row = choices[HEADER_WIDTH + number * RECORD_WIDTH :][:RECORD_WIDTH]
        kind = _KINDS[row[0] % len(_KINDS)]
        w.number = number
        _land(w, number)
        if kind != "none" and len(w.draft) < 48:
            attempt(w, _MOTIFS[kind], _record(kind, row))
    _land(w, RECORDS + 4)
    for value in w.late:
        attempt(w, _returned, value)
    copied: set[int] = set()
    for target, source in w.copies:
        if target.number not in copied and w.draft.same_type(target, source):
            copied.add(target.number)
            w.draft.call("aten::copy_", target, source)
    program = finish_program(w)
    return replace(program, labels=("compiled", *(one for one in program.labels if one not in ("functional", "any"))))


def _record(kind: str, row: bytes) -> FunctionalRecord:
    return FunctionalRecord(kind, row[1], row[2], row[3], "new", row[4], row[5] % 4, str(row[6]))


def _keep(w: CompiledWriter, value: DraftValue, r: FunctionalRecord) -> None:
    """Let a value be read by others, returned, copied into an input, or several of these."""
    use = int(r.use) % 8
    if use in (0, 1, 4):
        w.pool.append(value)
    if use in (1, 2, 5) or not is_floating(w, value):
        w.outputs.append(value)
    if use in (3, 4, 5):
        _copied(w, value, r.b)
    if use == 6:
        w.late.append(value)
    if use == 7:
        first = unary(w, value, r.how)
        w.pool += [value, first]


def _kept(w: CompiledWriter, value: DraftValue, r: FunctionalRecord) -> None:
    _keep(w, bound_value(w, value), r)


def _returned(w: CompiledWriter, value: DraftValue) -> None:
    w.outputs.append(unary(w, value, 0))


def _copied(w: CompiledWriter, value: DraftValue, choice: int) -> None:
    found = [one for one in w.inputs if w.draft.same_type(one, value)]
    target = pick_recent(found, choice) if found and choice % 4 != 3 else None
    if target is None:
        spec = w.draft.spec(value)
        target = new_input(w, "state", w.draft.shape(value), "varying", dtype=spec.dtype)
        w.inputs.append(target)
    if w.draft.spec(value).alias == w.draft.spec(target).alias:
        value = w.draft.call("aten::clone", value)
    w.labels.append("update")
    w.copies.append((target, value))


def _operand(
    w: CompiledWriter, r: FunctionalRecord, need: Callable[[DraftValue], bool] = lambda value: True
) -> DraftValue:
    """The operand of a motif; an input more often than elsewhere, since only inputs are written."""
    found = [one for one in w.inputs if w.draft.readable(one) and is_floating(w, one) and need(one)]
    if r.a % 3 == 2 and found:
        return pick_recent(found, r.a)
    value = pick_operand(w, r.a, need)
    if w.draft.step(value) is None and value not in w.inputs:
        w.inputs.append(value)
    return value


def _collective(w: CompiledWriter, r: FunctionalRecord) -> None:
    """A collective with its wait directly after it, or some records later; sometimes of two values at once."""
    kind, dim = KINDS[r.how % len(KINDS)], w.dim(r.group)
    multiple = w.roles.multiple(dim)

    def fits(value: DraftValue) -> bool:
        shape = w.draft.spec(value).shape
        return bool(shape) and (kind != "reduce_scatter" or shape[0] % multiple == 0)

    operands, form = [_operand(w, r, fits)], "new"
    if r.how // 8 % 8 == 7:
        operands.append(companion(w, operands[0], r.b))
        form = "coalesced"
        if not fits(operands[1]):
            raise NoSite
    _launch(w, r, list(start_collective(w, kind, operands, dim, form, r.how // 8)))


@dataclass(frozen=True, slots=True)
class _Flight:
    items: tuple[DraftValue, ...]
    due: int
    record: FunctionalRecord


def _launch(w: CompiledWriter, r: FunctionalRecord, items: list[DraftValue]) -> None:
    w.pending.append(_Flight(tuple(items), w.number + r.delay, r))  # type: ignore[arg-type]
    if r.delay == 0:
        _land(w, w.number)


def _land(w: CompiledWriter, number: int) -> None:
    """Wait for what is due."""
    flights: list[_Flight] = w.pending  # type: ignore[assignment]
    due = [one for one in flights if one.due <= number]
    w.pending = [one for one in flights if one.due > number]  # type: ignore[misc]
    for one in reversed(due) if w.setting.late else due:
        for item in one.items:
            arrived = w.draft.call(WAIT, item)
            if not attempt(w, _kept, arrived, one.record):
                w.outputs.append(arrived)


def _compute(w: CompiledWriter, r: FunctionalRecord) -> None:
    value = _operand(w, r)
    if r.how % 3 == 0:
        _keep(w, _combined(w, value, partner(w, value, r.b), r), r)
        return
    shape = w.draft.spec(value).shape
    if r.how % 6 == 5 and len(shape) == 2 and shape[1]:
        _keep(w, multiply_by_weight(w, value, _weight(w, value, shape[1], w.setting.hidden, r.b))[0], r)
        return
    _keep(w, unary(w, value, r.how // 3), r)


def _combined(w: CompiledWriter, one: DraftValue, other: DraftValue, r: FunctionalRecord) -> DraftValue:
    pair = (other, one) if r.how // 32 % 2 else (one, other)
    return combine(w, _COMBINED[r.how // 4 % len(_COMBINED)], *pair)


def _linear(w: CompiledWriter, r: FunctionalRecord) -> None:
    """A product and what is added to it: a bias, a value of its shape, or another product."""
    value = _operand(w, r, lambda v: len(w.draft.spec(v).shape) == 2 and w.draft.shape(v)[1] > 0)
    inner, width = w.draft.shape(value)[1], w.setting.hidden
    made, _ = multiply_by_weight(w, value, _weight(w, value, inner, width, r.b))
    if r.how % 4 == 0:
        addend = new_input(w, "bias", (width,), dtype=w.draft.spec(made).dtype)
    elif r.how % 4 == 1:
        addend, _ = multiply_by_weight(w, value, _weight(w, value, inner, width, r.b // 4))
    else:
        addend = partner(w, made, r.b)
    _keep(w, _combined(w, made, addend, r), r)


def _scatter(w: CompiledWriter, r: FunctionalRecord) -> None:
    """A value with some of its rows replaced."""
    call = w.draft.call
    value = _operand(w, r, lambda v: len(w.draft.spec(v).shape) == 2)
    rows, columns = w.draft.shape(value)
    if not rows:
        raise NoSite
    dtype = w.draft.spec(value).dtype
    kind = r.how % 4
    if kind == 0:
        source = new_input(w, "row", (columns,), "varying", dtype=dtype)
        made = call("aten::select_scatter", value, source, 0, r.b % rows)
    elif kind == 1:
        source = new_input(w, "rows", (1, columns), "varying", dtype=dtype)
        made = call("aten::slice_scatter", value, source, 0, r.b % rows, r.b % rows + 1)
    else:
        index = new_input(w, "index", (1,), dtype=torch.int64, recipe=Recipe("integers", 0.0))
        source = new_input(w, "rows", (1, columns), "varying", dtype=dtype)
        made = call("aten::index_put", value, [index], source, kind == 3)
    w.labels.append("scatter")
    _keep(w, made, r)


def _update(w: CompiledWriter, r: FunctionalRecord) -> None:
    """A value is copied into an input at the end."""
    value = _operand(w, r)
    if r.how % 3:
        value = unary(w, value, r.how // 3)
    _copied(w, value, r.b)


def _swap(w: CompiledWriter, r: FunctionalRecord) -> None:
    """Two inputs are swapped through a copy."""
    first = _operand(w, r, lambda v: v in w.inputs)
    second = new_input(w, "state", w.draft.shape(first), "varying", dtype=w.draft.spec(first).dtype)
    w.inputs.append(second)
    kept = w.draft.call("aten::clone", first)
    w.labels.append("swap")
    w.copies += [(first, second), (second, kept)]


def _wait(w: CompiledWriter, r: FunctionalRecord) -> None:
    """A redundant wait: for an input, or for a result that was waited for."""
    value = _operand(w, r)
    _keep(w, w.draft.call(WAIT, value), replace(r, use="0"))
    w.labels.append("waited-twice")


def _view(w: CompiledWriter, r: FunctionalRecord) -> None:
    value = _operand(w, r, lambda v: len(w.draft.spec(v).shape) == 2)
    rows, columns = w.draft.shape(value)
    if r.how % 3 == 0:
        w.pool.append(w.draft.call("aten::view", value, [columns, rows]))
    elif r.how % 3 == 1 and rows > 1:
        w.pool.append(w.draft.call("aten::slice.Tensor", value, 0, 0, rows - 1))
    else:
        w.outputs.append(w.draft.call("aten::view", value, [-1]))


def _parts(w: CompiledWriter, value: DraftValue, dim: str, along: int, order: int) -> list[DraftValue]:
    """The chunks of a value along a dim, one for each member of the group; in another order where `order` says so."""
    extent = w.draft.shape(value)[along]
    sizes = set(w.roles.sizes(dim))
    if len(sizes) > 1:
        raise NoSite
    (size,) = sizes
    if extent % size or not extent:
        raise NoSite
    if order % 2:
        bounds = [(extent // size * i, extent // size * (i + 1)) for i in range(size)]
        parts = [w.draft.call("aten::slice.Tensor", value, along, *one) for one in bounds]
    else:
        made = w.draft.call("aten::split.Tensor", value, extent // size, *([along] if along else []))
        parts = [w.draft.item(made, i) for i in range(size)]
    if order % 8 == 7:
        parts = parts[::-1]
        w.labels.append("parts-reversed")
    return parts


def _part(w: CompiledWriter, r: FunctionalRecord, shape: tuple[int, ...]) -> DraftValue:
    """A new input of this shape; or an earlier value with as many dims, such as the result of another product."""
    multiple = w.roles.multiple(w.dim(r.group))

    def fits(value: DraftValue) -> bool:
        found = w.draft.spec(value).shape
        return len(found) == len(shape) and found[0] > 0 and found[0] % multiple == 0

    found = [one for one in w.pool if w.draft.readable(one) and is_floating(w, one) and fits(one)]
    if r.group // 5 % 2 and found:
        return pick_recent(found, r.group)
    return new_input(w, "part", shape, "varying", w.dim(r.group))


def _gather_product(w: CompiledWriter, r: FunctionalRecord) -> None:
    """Products of gathered values, along any dim, of rows or of batches of rows."""
    dim, call, hidden = w.dim(r.group), w.draft.call, w.setting.hidden
    deep = r.how % 2
    part = _part(w, r, (w.tokens, 2, hidden) if deep else (w.tokens, hidden))
    shape = w.draft.shape(part)
    (started,) = start_collective(w, "all_gather", [part], dim)
    whole = call(WAIT, started)
    along = r.how // 2 % 4 % len(shape)
    if along:
        # The form of `all_gather_tensor` for dims other than the first.
        whole = call("aten::cat", _parts(w, whole, dim, 0, r.b), along - (len(shape) if r.b // 8 % 4 == 3 else 0))
    inner = w.draft.shape(whole)[-1]
    rows = call("aten::reshape", whole, [-1, inner]) if deep else whole
    for number in range(1 + r.how // 8 % 2):
        by = _weight(w, rows, inner, (hidden, 5)[number], r.how // 16)
        made, _ = multiply_by_weight(w, rows, by)
        if deep:
            back = [*w.draft.shape(whole)[:-1], (hidden, 5)[number]]
            made = call("aten::reshape", made, back[1:2] + back[:1] + back[2:] if r.a % 16 == 15 else back)
        _keep(w, made, r)
    if r.how // 32 % 3 == 0:
        w.outputs.append(unary(w, whole, r.a))
    elif r.how // 32 % 3 == 1:
        w.pool.append(whole)
    w.labels.append("gather-product")


def _weight(w: CompiledWriter, value: DraftValue, inner: int, width: int, how: int) -> DraftValue:
    """A weight, possibly transposed; sometimes one that is computed after earlier values."""
    if how % 3 == 1:
        return w.draft.call("aten::t", weight(w, value, (width, inner)))
    made = weight(w, value, (inner, width))
    return unary(w, made, how) if how % 3 == 2 else made


def _product_scatter(w: CompiledWriter, r: FunctionalRecord) -> None:
    """A product that is reduce_scattered, along any dim, of rows or of batches of rows."""
    dim, call, hidden = w.dim(r.group), w.draft.call, w.setting.hidden
    deep = r.how % 2
    value = _part(w, r, (w.tokens, w.tokens, hidden) if deep else (w.tokens, hidden))
    *before, inner = w.draft.shape(value)
    rows = call("aten::reshape", value, [-1, inner]) if deep else value
    made, _ = multiply_by_weight(w, rows, _weight(w, rows, inner, w.tokens, r.b))
    if deep:
        kept = [1, math.prod(before)] if r.how // 8 % 4 == 3 else before
        made = call("aten::reshape", made, [*kept, w.tokens])
    along = r.how // 2 % 4 % len(w.draft.shape(made))
    if along:
        made = call("aten::cat", _parts(w, made, dim, along, r.a))
    op = ("sum", "avg", "sum", "max")[r.how // 32 % 4]
    (started,) = start_collective(w, "reduce_scatter", [made], dim, reduce_op=op)
    w.labels.append("product-scatter")
    _launch(w, r, [started])


def _gradients(w: CompiledWriter, r: FunctionalRecord) -> None:
    """Gradients, divided and reduced as by data-parallel hooks; copied into inputs, or returned."""
    call = w.draft.call
    for number in range(2 + r.how % 2):
        choice = r.how // 2 + number * (r.b % 4)
        dim = w.dim(r.group + (number if r.b % 8 == 7 else 0))
        dtype = torch.bfloat16 if r.a % 8 == 5 and number else torch.float32
        shape = (w.tokens, w.setting.hidden) if choice % 3 else (w.setting.hidden,)
        gradient = new_input(w, "gradient", shape, "varying", dim, dtype)
        if choice % 4 == 3:
            gradient = unary(w, gradient, choice)
        size: object = group_size(w, dim)
        if r.b // 8 % 8 == 7 and number:
            size = 2
        divided = call("aten::div.Tensor", gradient, size)
        op = "max" if r.b // 16 % 8 == 7 and number else "sum"
        (started,) = start_collective(w, "all_reduce", [divided], dim, reduce_op=op)
        arrived = call(WAIT, started)
        if r.how // 16 % 2:
            spec = w.draft.spec(arrived)
            parameter = new_input(w, "parameter", w.draft.shape(arrived), "varying", dtype=spec.dtype)
            w.copies.append((parameter, arrived))
        else:
            w.outputs.append(arrived)
    w.labels.append("gradients")


def _like_ops(w: CompiledWriter, r: FunctionalRecord) -> None:
    for made in made_alike(w, _operand(w, r), r):
        _keep(w, made, r)


def _pieces(w: CompiledWriter, r: FunctionalRecord) -> None:
    _keep(w, joined_pieces(w, _operand(w, r), r), r)


_MOTIFS: dict[str, Callable[[CompiledWriter, FunctionalRecord], None]] = {
    "collective": _collective,
    "compute": _compute,
    "linear": _linear,
    "scatter": _scatter,
    "update": _update,
    "swap": _swap,
    "wait": _wait,
    "view": _view,
    "gather-product": _gather_product,
    "product-scatter": _product_scatter,
    "gradients": _gradients,
    "like-ops": _like_ops,
    "pieces": _pieces,
}

__all__ = ["WIDTH", "decode_compiled"]
