"""Asynchronous collectives: their forms, when they are waited for, and how their results are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcverify.strategies.draft import DraftValue, NoSite, attempt
from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.writing import (
    ADD,
    MOST_ELEMENTS,
    MUL,
    FunctionalWriter,
    Pending,
    add,
    bound_value,
    group_size,
    is_floating,
    new_input,
    partner,
    per_rank,
    unary,
    write_into_value,
    write_norm,
)

WAIT = "_c10d_functional::wait_tensor"
KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
)  # fmt: skip
_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "broadcast": "broadcast",
}
REDUCE_OPS = ("sum", "sum", "avg", "sum", "avg", "max", "min", "product")
#: A due date after all records.
LAST = 1 << 30


def start_collective(
    w: FunctionalWriter,
    kind: str,
    operands: Sequence[DraftValue],
    dim: str,
    form: str = "new",
    how: int = 0,
    reduce_op: str = "",
) -> tuple[DraftValue, ...]:
    """Start a collective on values; several become one coalesced call, or one call each if the kind has no such form.

    Args:
        form: as of `FunctionalRecord`; if the kind does not have it, a new result.
        how: a byte that picks the reduction, the root and the splits.

    Returns:
        The collectives in flight, per operand.
    """
    call, reduces = w.draft.call, kind in ("all_reduce", "reduce_scatter")
    op = reduce_op or REDUCE_OPS[how % len(REDUCE_OPS)]
    if op == "product" and max(value.rms for value in operands) > 1:
        op = "sum"
    size = max(w.roles.sizes(dim))
    if kind == "all_gather" and max(w.draft.elements(value) for value in operands) * size > MOST_ELEMENTS:
        raise NoSite
    if kind == "all_to_all":
        return tuple(_exchange(w, value, dim, how) for value in operands)
    if kind == "broadcast":
        return tuple(_broadcast(w, value, dim, form, how) for value in operands)
    rest: list[object] = [op] if reduces else []
    if kind != "all_reduce":
        rest.append(group_size(w, dim))
    grown = size if op == "sum" and reduces else 1
    name = "_c10d_functional::" + _NAMES[kind]
    if form.startswith("coalesced"):
        w.labels.append("coalesced")
        in_place = form.endswith("in-place") and kind == "all_reduce"
        listed = [call("aten::clone", value) for value in operands] if in_place else list(operands)
        several = call(f"{name}_coalesced{'_' if in_place else ''}", listed, *rest, dim)
        items = [w.draft.item(several, i) for i in range(len(listed))]
        return tuple(replace(item, rms=value.rms * grown) for item, value in zip(items, operands, strict=True))
    made = []
    for value in operands:
        rms = value.rms * grown
        if form == "in-place" and kind == "all_reduce":
            w.labels.append("in-place")
            own = value if how // 16 % 3 == 0 and w.draft.writable(value) else call("aten::clone", value)
            made.append(call(f"{name}_", own, *rest, dim, rms=rms))
        elif form == "out" and kind != "all_reduce":
            w.labels.append("out")
            made.append(call(f"{name}_out", value, *rest, dim, out=_buffer(w, kind, value, dim), rms=rms))
        else:
            made.append(call(name, value, *rest, dim, rms=rms))
    return tuple(made)


def _buffer(w: FunctionalWriter, kind: str, value: DraftValue, dim: str) -> DraftValue:
    """A new tensor that a collective can write its result into."""
    mesh, draft = w.draft.mesh, w.draft

    def shape(rank: int) -> list[int]:
        rows, *rest = draft.spec(value, rank).shape
        parts = len(mesh.dim(dim).group(rank))
        if kind == "reduce_scatter" and rows % parts:
            raise NoSite
        return [rows * parts if kind == "all_gather" else rows // parts, *rest]

    if not draft.spec(value).shape:
        raise NoSite
    sizes = per_rank(w, f"{dim}_{kind}{len(draft)}", shape)
    return draft.call("aten::new_zeros", value, sizes)


def _exchange(w: FunctionalWriter, value: DraftValue, dim: str, how: int) -> DraftValue:
    """All-to-all, of equal parts or with more for the last position."""
    spec, mesh = w.draft.spec(value), w.draft.mesh.dim(dim)
    rows = spec.shape[0] if spec.shape else 0
    uneven = how % 2 == 1

    def split(rank: int) -> list[int]:
        size = len(mesh.group(rank))
        part = rows // size
        if rows % size and not uneven:
            raise NoSite
        more = 1 if uneven and size > 1 and part > 1 else 0
        return [*[part - more] * (size - 1), rows - (part - more) * (size - 1)]

    def received(rank: int) -> list[int]:
        return [split(rank)[mesh.position(rank)]] * len(mesh.group(rank))

    w.labels.append("all-to-all")
    w.draft.shape(value)
    sent = per_rank(w, f"{dim}_sent{rows}_{int(uneven)}", split)
    got = per_rank(w, f"{dim}_received{rows}_{int(uneven)}", received)
    return w.draft.call("_c10d_functional::all_to_all_single", value, got, sent, dim)


def _broadcast(w: FunctionalWriter, value: DraftValue, dim: str, form: str, how: int) -> DraftValue:
    source = how % min(w.roles.sizes(dim))
    if form == "in-place":
        own = w.draft.call("aten::clone", value)
        return w.draft.call("_c10d_functional::broadcast_", own, source, dim)
    return w.draft.call("_c10d_functional::broadcast", value, source, dim)


# -------------------------------------------------------------------------------------------------------------- waits


def schedule_wait(
    w: FunctionalWriter, record: FunctionalRecord, items: tuple[DraftValue, ...], operands: Sequence[DraftValue]
) -> None:
    """Schedule the wait for collectives in flight as the record says: at once, and use of the result later or at once;
    or later."""
    pending = Pending(items, LAST if record.delay < 0 else w.number + record.delay, record, tuple(operands))
    w.pending.append(pending)
    if record.delay == 0:
        waited = _waited(w, w.pending.pop())
        if record.how // 4 % 4:
            w.pending.append(replace(waited, due=w.number + record.how // 4 % 4))
        else:
            use(w, waited)


def wait_for_due(w: FunctionalWriter, behind: int) -> None:
    """Wait for, and use, what is due after a record."""
    due = [pending for pending in w.pending if pending.due <= behind]
    w.pending = [pending for pending in w.pending if pending.due > behind]
    for pending in reversed(due) if w.setting.late else due:
        use(w, _waited(w, pending))


def _waited(w: FunctionalWriter, pending: Pending) -> Pending:
    if pending.waited:
        return pending
    items = [w.draft.call(WAIT, item) for item in pending.items]
    if pending.record.use == "twice":
        w.labels.append("waited-twice")
        items += [w.draft.call(WAIT, pending.items[0])]
    return replace(pending, items=tuple(items), waited=True)


def use(w: FunctionalWriter, pending: Pending) -> None:
    """Use an arrived result as the record says; if that does not fit, only let others read it."""
    for item in pending.items:
        if not attempt(w, _use, pending.record, item, pending):
            w.pool.append(item)


def _use(w: FunctionalWriter, record: FunctionalRecord, item: DraftValue, pending: Pending) -> None:
    draft, how = w.draft, record.how
    if not is_floating(w, item):
        w.outputs.append(item)
        return
    if record.use == "main":
        _join(w, item, how)
    elif record.use == "users":
        first = unary(w, item, how // 8)
        w.pool += [item, first, draft.call(MUL, item, 0.5, rms=item.rms / 2)]
    elif record.use == "view":
        w.outputs.append(draft.call("aten::view", item, [-1]))
    elif record.use == "slice":
        rows = draft.shape(item)[0] if draft.shape(item) else 0
        if rows < 2:
            raise NoSite
        halves = [(0, rows // 2), (rows // 2, rows)] if how % 3 else [(0, rows - 1), (1, rows)]
        w.pool += [draft.call("aten::slice.Tensor", item, 0, *half) for half in halves]
    elif record.use == "write-operand":
        w.pool.append(item)
        target = pending.operands[0]
        write_into_value(w, target, how // 4)
        w.labels.append("write-behind")
    elif record.use == "update":
        update(w, item, None, how)
    elif record.use == "twice":
        w.pool.append(item)
        if len(pending.items) > 1 and item is pending.items[-1]:
            w.pool.append(bound_value(w, draft.call(ADD, item, pending.items[0], rms=2 * item.rms)))
    elif record.use == "output":
        w.outputs.append(item)
    elif record.use == "later":
        w.later.append(item)
    elif record.use == "pool":
        w.pool.append(item)


def _join(w: FunctionalWriter, item: DraftValue, how: int) -> None:
    """Add to the main activation what fits it, or norm it; of more rows the first."""
    draft = w.draft
    shape, main = draft.shape(item), draft.shape(w.main)
    if shape[1:] != main[1:] or shape[:1] < main[:1] or draft.spec(item).dtype is not draft.spec(w.main).dtype:
        raise NoSite
    if shape != main:
        item = draft.call("aten::slice.Tensor", item, 0, 0, main[0])
    if how % 4 == 3:
        item = write_norm(w, item, how // 4)
    w.pool.append(w.main)
    w.main = add(w, w.main, item)


def update(w: FunctionalWriter, gradient: DraftValue, parameter: DraftValue | None, how: int) -> None:
    """Step a parameter as an optimizer does: directly, through a momentum that is also an input, or by a copy."""
    draft = w.draft
    if parameter is None or not draft.same_type(parameter, gradient):
        shape = draft.shape(gradient)
        parameter = new_input(w, "parameter", shape, dtype=draft.spec(gradient).dtype)
    if not draft.writable(parameter):
        raise NoSite
    w.labels.append("update")
    if how % 4 == 3:
        momentum = new_input(w, "momentum", draft.shape(gradient), dtype=draft.spec(gradient).dtype)
        draft.call("aten::mul_.Tensor", momentum, 0.5)
        draft.call("aten::add_.Tensor", momentum, gradient)
        draft.call("aten::add_.Tensor", parameter, momentum, alpha=-0.125)
    elif how % 4 == 2:
        stepped = draft.call("aten::sub.Tensor", parameter, gradient, rms=parameter.rms + gradient.rms)
        draft.call("aten::copy_", parameter, stepped)
    else:
        draft.call("aten::add_.Tensor", parameter, gradient, alpha=-0.125)


def companion(w: FunctionalWriter, value: DraftValue, choice: int) -> DraftValue:
    """Another operand for a coalesced call: not the same value, of its own size where there is one."""
    draft, dtype = w.draft, w.draft.spec(value).dtype
    found = [v for v in w.pool if v != value and draft.readable(v) and draft.spec(v).dtype is dtype]
    found = [v for v in found if draft.spec(v).shape and draft.elements(v) <= MOST_ELEMENTS]
    return found[choice % len(found)] if found and choice % 3 else partner(w, value, 3)


__all__ = [
    "KINDS",
    "LAST",
    "REDUCE_OPS",
    "WAIT",
    "companion",
    "schedule_wait",
    "start_collective",
    "update",
    "use",
    "wait_for_due",
]
