"""Layers of asynchronous programs: gradients of data parallelism, tensor-parallel blocks, products pipelined with collectives."""

from __future__ import annotations

from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.collectives import LAST, WAIT, schedule_wait, start_collective, update
from tcverify.strategies.functional.flow import (
    MUL,
    FunctionalFlow,
    add,
    bound_value,
    matmul,
    multiply_by_weight,
    new_input,
    unary,
    weight,
    write_norm,
)
from tcverify.strategies.functional.script import ScriptValue
from tcverify.strategies.transformer.sites import NoSite


def forward(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A layer whose activation and weight are kept for its gradient."""
    hidden = flow.setting.hidden
    own = weight(flow, flow.main, (hidden, hidden), "weight", "replicated")
    flow.saved.append((flow.main, own))
    made, _ = multiply_by_weight(flow, flow.main, own)
    flow.main = unary(flow, made, r.how // 64)


def gradient(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """The gradient of the latest layer that has none yet, reduced over the data-parallel dim; then that of its input."""
    call = flow.script.call
    if not flow.saved:
        forward(flow, r)
    value, own = flow.saved.pop()
    if not flow.script.readable(own) or not flow.script.readable(value):
        raise NoSite
    dim = flow.roles.other or flow.roles.main
    hidden = flow.setting.hidden
    if flow.grad is None:
        flow.grad = new_input(flow, "grad", (flow.tokens, hidden), "varying", dim)
    made = call("aten::mm", call("aten::transpose.int", value, 0, 1), flow.grad, rms=0.6)
    scaled = bound_value(flow, call(MUL, made, 1.0 / max(flow.tokens, 1), rms=0.6))
    if flow.saved:
        turned = call("aten::transpose.int", own, 0, 1)
        flow.grad = bound_value(flow, call("aten::mm", flow.grad, turned, rms=0.6))
    flow.labels.append("gradient")
    op = ("avg", "sum", "avg", "sum", "max")[r.b % 5]
    if r.form.startswith("coalesced") or r.how % 8 == 7:
        flow.grads.append(scaled)
        if len(flow.grads) < 2 and flow.saved:
            return  # until there are several
        held, flow.grads = flow.grads, []
        if r.how % 8 == 7:
            _bucket(flow, r, held, dim, op)
        else:
            schedule_wait(flow, r, start_collective(flow, "all_reduce", held, dim, r.form, reduce_op=op), held)
        return
    items = start_collective(flow, "all_reduce", [scaled], dim, r.form, r.how, reduce_op=op)
    if r.use == "update" and r.delay == 0:
        update(flow, call(WAIT, items[0]), own, r.how)
    else:
        schedule_wait(flow, r, items, [scaled])


def _bucket(flow: FunctionalFlow, r: FunctionalRecord, grads: list[ScriptValue], dim: str, op: str) -> None:
    """One all_reduce of all gradients, laid out one behind the other."""
    call = flow.script.call
    bucket = call("aten::cat", [call("aten::view", grad, [-1]) for grad in grads], rms=grads[0].rms)
    (item,) = start_collective(flow, "all_reduce", [bucket], dim, r.form, reduce_op=op)
    flow.labels.append("bucket")
    if r.how // 8 % 2:
        schedule_wait(flow, r, (item,), [bucket])
        return
    arrived = call(WAIT, item)
    start = 0
    for grad in grads:
        shape = flow.script.shape(grad)
        size = flow.script.elements(grad)
        part = call("aten::slice.Tensor", arrived, 0, start, start + size)
        flow.pool.append(call("aten::view", part, list(shape)))
        start += size


def column_row(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A tensor-parallel block: gathered tokens or not, two products, their sum reduced or scattered, residual and norm."""
    call, dim, main = flow.script.call, flow.roles.main, flow.main
    hidden = flow.setting.hidden
    gathered = r.how % 2 == 0
    value = main
    if gathered:
        (started,) = start_collective(flow, "all_gather", [main], dim, r.form if r.form == "out" else "new")
        beside = unary(flow, main, r.how // 8) if r.how // 2 % 2 else main
        main = beside
        value = call(WAIT, started)
    inner = matmul(flow, value, (hidden, 2 * hidden, 4)[r.b % 3], "up", "shard" if r.b % 2 else "varying", dim)
    partial = matmul(flow, unary(flow, inner, r.b // 3), hidden, "down", "varying", dim)
    kind = "reduce_scatter" if gathered else "all_reduce"
    (started,) = start_collective(flow, kind, [partial], dim, r.form, reduce_op="sum")
    if r.delay == 0:
        arrived = bound_value(flow, call(WAIT, started))
        total = add(flow, arrived, main)
        flow.pool += [flow.main, arrived]
        flow.main = write_norm(flow, total, r.how // 16) if r.how // 4 % 2 else total
    else:
        schedule_wait(flow, r, (started,), [partial])
    flow.labels.append("column-row")


def chunked_product(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A product in chunks of rows, each beside the collective of another: gathers in front of it, or reductions behind it."""
    call, dim = flow.script.call, flow.roles.main
    hidden = flow.setting.hidden
    rows = flow.tokens
    count = next((n for n in ((2, 3, 4)[r.b % 3], 2, 3) if rows % n == 0), 1)
    if count < 2:
        raise NoSite
    step = rows // count
    own = weight(flow, flow.main, (hidden, hidden), "weight", "varying", dim)
    chunks = [call("aten::slice.Tensor", flow.main, 0, i * step, (i + 1) * step) for i in range(count)]
    flow.labels.append("pipelined")
    if r.how % 2:
        started: list[ScriptValue] = []
        for chunk in chunks:
            made = call("aten::mm", chunk, own, rms=0.6)
            started += start_collective(flow, "all_reduce", [made], dim, r.form, reduce_op="sum")
        whole = call("aten::cat", [call(WAIT, item) for item in started], rms=started[0].rms)
        flow.pool.append(flow.main)
        flow.main = add(flow, flow.main, bound_value(flow, whole))
        return
    ahead = 1 if r.how // 2 % 2 else count
    started = [start_collective(flow, "all_gather", [chunk], dim)[0] for chunk in chunks[:ahead]]
    made_of = []
    for i in range(count):
        arrived = call(WAIT, started[i])
        if len(started) < count:
            started += start_collective(flow, "all_gather", [chunks[len(started)]], dim)
        made_of.append(call("aten::mm", arrived, own, rms=0.6))
    whole = bound_value(flow, call("aten::cat", made_of, rms=0.6))
    (scattered,) = start_collective(flow, "reduce_scatter", [whole], dim, reduce_op="sum")
    schedule_wait(flow, r, (scattered,), [whole])


__all__ = ["LAST", "chunked_product", "column_row", "forward", "gradient"]
