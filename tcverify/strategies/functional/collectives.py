"""Collectives that start and are waited for: in which forms, for how long, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.flow import (
    ADD,
    MOST_ELEMENTS,
    MUL,
    FunctionalFlow,
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
from tcverify.strategies.functional.script import ScriptValue
from tcverify.strategies.transformer.sites import NoSite

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
#: A due date behind all records.
LAST = 1 << 30


def start_collective(
    flow: FunctionalFlow,
    kind: str,
    operands: Sequence[ScriptValue],
    dim: str,
    form: str = "new",
    how: int = 0,
    reduce_op: str = "",
) -> tuple[ScriptValue, ...]:
    """Start a collective on values; several make one coalesced call, or one call each where the kind has no such form.

    Args:
        form: as of `FunctionalRecord`; where the kind does not have it, a new result.
        how: a byte that picks the reduction, the root and the splits.

    Returns:
        What is under way, per operand.
    """
    call, reduces = flow.script.call, kind in ("all_reduce", "reduce_scatter")
    op = reduce_op or REDUCE_OPS[how % len(REDUCE_OPS)]
    if op == "product" and max(value.rms for value in operands) > 1:
        op = "sum"
    size = max(flow.roles.sizes(dim))
    if kind == "all_gather" and max(flow.script.elements(value) for value in operands) * size > MOST_ELEMENTS:
        raise NoSite
    if kind == "all_to_all":
        return tuple(_exchange(flow, value, dim, how) for value in operands)
    if kind == "broadcast":
        return tuple(_broadcast(flow, value, dim, form, how) for value in operands)
    rest: list[object] = [op] if reduces else []
    if kind != "all_reduce":
        rest.append(group_size(flow, dim))
    grown = size if op == "sum" and reduces else 1
    name = "_c10d_functional::" + _NAMES[kind]
    if form.startswith("coalesced"):
        flow.labels.append("coalesced")
        in_place = form.endswith("in-place") and kind == "all_reduce"
        listed = [call("aten::clone", value) for value in operands] if in_place else list(operands)
        several = call(f"{name}_coalesced{'_' if in_place else ''}", listed, *rest, dim)
        items = [flow.script.item(several, i) for i in range(len(listed))]
        return tuple(replace(item, rms=value.rms * grown) for item, value in zip(items, operands, strict=True))
    made = []
    for value in operands:
        rms = value.rms * grown
        if form == "in-place" and kind == "all_reduce":
            flow.labels.append("in-place")
            own = value if how // 16 % 3 == 0 and flow.script.writable(value) else call("aten::clone", value)
            made.append(call(f"{name}_", own, *rest, dim, rms=rms))
        elif form == "out" and kind != "all_reduce":
            flow.labels.append("out")
            made.append(call(f"{name}_out", value, *rest, dim, out=_buffer(flow, kind, value, dim), rms=rms))
        else:
            made.append(call(name, value, *rest, dim, rms=rms))
    return tuple(made)


def _buffer(flow: FunctionalFlow, kind: str, value: ScriptValue, dim: str) -> ScriptValue:
    """A new tensor that a collective can write its result into."""
    mesh, script = flow.script.mesh, flow.script

    def shape(rank: int) -> list[int]:
        rows, *rest = script.spec(value, rank).shape
        parts = len(mesh.dim(dim).group(rank))
        if kind == "reduce_scatter" and rows % parts:
            raise NoSite
        return [rows * parts if kind == "all_gather" else rows // parts, *rest]

    if not script.spec(value).shape:
        raise NoSite
    sizes = per_rank(flow, f"{dim}_{kind}{len(script)}", shape)
    return script.call("aten::new_zeros", value, sizes)


def _exchange(flow: FunctionalFlow, value: ScriptValue, dim: str, how: int) -> ScriptValue:
    """All-to-all, of equal parts or with more for the last position."""
    spec, mesh = flow.script.spec(value), flow.script.mesh.dim(dim)
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

    flow.labels.append("all-to-all")
    flow.script.shape(value)
    sent = per_rank(flow, f"{dim}_sent{rows}_{int(uneven)}", split)
    got = per_rank(flow, f"{dim}_received{rows}_{int(uneven)}", received)
    return flow.script.call("_c10d_functional::all_to_all_single", value, got, sent, dim)


def _broadcast(flow: FunctionalFlow, value: ScriptValue, dim: str, form: str, how: int) -> ScriptValue:
    source = how % min(flow.roles.sizes(dim))
    if form == "in-place":
        own = flow.script.call("aten::clone", value)
        return flow.script.call("_c10d_functional::broadcast_", own, source, dim)
    return flow.script.call("_c10d_functional::broadcast", value, source, dim)


# -------------------------------------------------------------------------------------------------------------- waits


def schedule_wait(
    flow: FunctionalFlow, record: FunctionalRecord, items: tuple[ScriptValue, ...], operands: Sequence[ScriptValue]
) -> None:
    """Let what is under way be waited for when the record says: at once, and used later or at once, or later."""
    pending = Pending(items, LAST if record.delay < 0 else flow.number + record.delay, record, tuple(operands))
    flow.pending.append(pending)
    if record.delay == 0:
        waited = _waited(flow, flow.pending.pop())
        if record.how // 4 % 4:
            flow.pending.append(replace(waited, due=flow.number + record.how // 4 % 4))
        else:
            use(flow, waited)


def wait_for_due(flow: FunctionalFlow, behind: int) -> None:
    """Wait for, and use, what is due behind a record."""
    due = [pending for pending in flow.pending if pending.due <= behind]
    flow.pending = [pending for pending in flow.pending if pending.due > behind]
    for pending in reversed(due) if flow.setting.late else due:
        use(flow, _waited(flow, pending))


def _waited(flow: FunctionalFlow, pending: Pending) -> Pending:
    if pending.waited:
        return pending
    items = [flow.script.call(WAIT, item) for item in pending.items]
    if pending.record.use == "twice":
        flow.labels.append("waited-twice")
        items += [flow.script.call(WAIT, pending.items[0])]
    return replace(pending, items=tuple(items), waited=True)


def use(flow: FunctionalFlow, pending: Pending) -> None:
    """Do with what has arrived what the record says; where that does not fit, only let others read it."""
    for item in pending.items:
        if not flow.attempt(lambda inner, record, item=item: _use(inner, record, item, pending), pending.record):  # type: ignore[misc]
            flow.pool.append(item)


def _use(flow: FunctionalFlow, record: FunctionalRecord, item: ScriptValue, pending: Pending) -> None:
    script, how = flow.script, record.how
    if not is_floating(flow, item):
        flow.outputs.append(item)
        return
    if record.use == "main":
        _join(flow, item, how)
    elif record.use == "users":
        first = unary(flow, item, how // 8)
        flow.pool += [item, first, script.call(MUL, item, 0.5, rms=item.rms / 2)]
    elif record.use == "view":
        flow.outputs.append(script.call("aten::view", item, [-1]))
    elif record.use == "slice":
        rows = script.shape(item)[0] if script.shape(item) else 0
        if rows < 2:
            raise NoSite
        halves = [(0, rows // 2), (rows // 2, rows)] if how % 3 else [(0, rows - 1), (1, rows)]
        flow.pool += [script.call("aten::slice.Tensor", item, 0, *half) for half in halves]
    elif record.use == "write-operand":
        flow.pool.append(item)
        target = pending.operands[0]
        write_into_value(flow, target, how // 4)
        flow.labels.append("write-behind")
    elif record.use == "update":
        update(flow, item, None, how)
    elif record.use == "twice":
        flow.pool.append(item)
        if len(pending.items) > 1 and item is pending.items[-1]:
            flow.pool.append(bound_value(flow, script.call(ADD, item, pending.items[0], rms=2 * item.rms)))
    elif record.use == "output":
        flow.outputs.append(item)
    elif record.use == "later":
        flow.later.append(item)
    elif record.use == "pool":
        flow.pool.append(item)


def _join(flow: FunctionalFlow, item: ScriptValue, how: int) -> None:
    """Add to the main activation what fits it, or norm it; of more rows the first."""
    script = flow.script
    shape, main = script.shape(item), script.shape(flow.main)
    if shape[1:] != main[1:] or shape[:1] < main[:1] or script.spec(item).dtype is not script.spec(flow.main).dtype:
        raise NoSite
    if shape != main:
        item = script.call("aten::slice.Tensor", item, 0, 0, main[0])
    if how % 4 == 3:
        item = write_norm(flow, item, how // 4)
    flow.pool.append(flow.main)
    flow.main = add(flow, flow.main, item)


def update(flow: FunctionalFlow, gradient: ScriptValue, parameter: ScriptValue | None, how: int) -> None:
    """Step a parameter as an optimizer does: at once, through a momentum that is an input too, or by a copy."""
    script = flow.script
    if parameter is None or not script.same_type(parameter, gradient):
        shape = script.shape(gradient)
        parameter = new_input(flow, "parameter", shape, dtype=script.spec(gradient).dtype)
    if not script.writable(parameter):
        raise NoSite
    flow.labels.append("update")
    if how % 4 == 3:
        momentum = new_input(flow, "momentum", script.shape(gradient), dtype=script.spec(gradient).dtype)
        script.call("aten::mul_.Tensor", momentum, 0.5)
        script.call("aten::add_.Tensor", momentum, gradient)
        script.call("aten::add_.Tensor", parameter, momentum, alpha=-0.125)
    elif how % 4 == 2:
        stepped = script.call("aten::sub.Tensor", parameter, gradient, rms=parameter.rms + gradient.rms)
        script.call("aten::copy_", parameter, stepped)
    else:
        script.call("aten::add_.Tensor", parameter, gradient, alpha=-0.125)


def companion(flow: FunctionalFlow, value: ScriptValue, choice: int) -> ScriptValue:
    """Another operand for a coalesced call: not the same value, of its own size where there is one."""
    script, dtype = flow.script, flow.script.spec(value).dtype
    found = [v for v in flow.pool if v != value and script.readable(v) and script.spec(v).dtype is dtype]
    found = [v for v in found if script.spec(v).shape and script.elements(v) <= MOST_ELEMENTS]
    return found[choice % len(found)] if found and choice % 3 else partner(flow, value, 3)


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
