"""Layers of asynchronous programs: gradients of data parallelism, tensor-parallel blocks, products pipelined with collectives."""

from __future__ import annotations

from tcverify.strategies.draft import DraftValue, NoSite
from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.collectives import LAST, WAIT, schedule_wait, start_collective, update
from tcverify.strategies.functional.writing import (
    MUL,
    FunctionalWriter,
    add,
    bound_value,
    matmul,
    multiply_by_weight,
    new_input,
    unary,
    weight,
    write_norm,
)


def forward(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A layer whose activation and weight are kept for its gradient."""
    hidden = w.setting.hidden
    own = weight(w, w.main, (hidden, hidden), "weight", "replicated")
    w.saved.append((w.main, own))
    made, _ = multiply_by_weight(w, w.main, own)
    w.main = unary(w, made, r.how // 64)


def result(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """The result of the forward, which is returned."""
    w.outputs.append(w.main)


def gradient(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """The gradient of the latest layer that has none yet, reduced over the data-parallel dim; then that of its input."""
    call = w.draft.call
    if not w.saved:
        forward(w, r)
    value, own = w.saved.pop()
    if not w.draft.readable(own) or not w.draft.readable(value):
        raise NoSite
    dim = w.roles.other or w.roles.main
    hidden = w.setting.hidden
    if w.grad is None:
        w.grad = new_input(w, "grad", (w.tokens, hidden), "varying", dim)
    made = call("aten::mm", call("aten::transpose.int", value, 0, 1), w.grad, rms=0.6)
    scaled = bound_value(w, call(MUL, made, 1.0 / max(w.tokens, 1), rms=0.6))
    if w.saved:
        turned = call("aten::transpose.int", own, 0, 1)
        w.grad = bound_value(w, call("aten::mm", w.grad, turned, rms=0.6))
    w.labels.append("gradient")
    op = ("avg", "sum", "avg", "sum", "max")[r.b % 5]
    if r.form.startswith("coalesced") or r.how % 8 == 7:
        w.grads.append(scaled)
        if len(w.grads) < 2 and w.saved:
            return  # until there are several
        held, w.grads = w.grads, []
        if r.how % 8 == 7:
            _bucket(w, r, held, dim, op)
        else:
            schedule_wait(w, r, start_collective(w, "all_reduce", held, dim, r.form, reduce_op=op), held)
        return
    items = start_collective(w, "all_reduce", [scaled], dim, r.form, r.how, reduce_op=op)
    if r.use == "update" and r.delay == 0:
        update(w, call(WAIT, items[0]), own, r.how)
    else:
        schedule_wait(w, r, items, [scaled])


def _bucket(w: FunctionalWriter, r: FunctionalRecord, grads: list[DraftValue], dim: str, op: str) -> None:
    """One all_reduce of all gradients, flattened and concatenated."""
    call = w.draft.call
    bucket = call("aten::cat", [call("aten::view", grad, [-1]) for grad in grads], rms=grads[0].rms)
    (item,) = start_collective(w, "all_reduce", [bucket], dim, r.form, reduce_op=op)
    w.labels.append("bucket")
    if r.how // 8 % 2:
        schedule_wait(w, r, (item,), [bucket])
        return
    arrived = call(WAIT, item)
    start = 0
    for grad in grads:
        shape = w.draft.shape(grad)
        size = w.draft.elements(grad)
        part = call("aten::slice.Tensor", arrived, 0, start, start + size)
        w.pool.append(call("aten::view", part, list(shape)))
        start += size


def column_row(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A tensor-parallel block: gathered tokens or not, two products, their sum reduced or scattered, residual and norm."""
    call, dim, main = w.draft.call, w.roles.main, w.main
    hidden = w.setting.hidden
    gathered = r.how % 2 == 0
    value = main
    if gathered:
        (started,) = start_collective(w, "all_gather", [main], dim, r.form if r.form == "out" else "new")
        beside = unary(w, main, r.how // 8) if r.how // 2 % 2 else main
        main = beside
        value = call(WAIT, started)
    inner = matmul(w, value, (hidden, 2 * hidden, 4)[r.b % 3], "up", "shard" if r.b % 2 else "varying", dim)
    partial = matmul(w, unary(w, inner, r.b // 3), hidden, "down", "varying", dim)
    kind = "reduce_scatter" if gathered else "all_reduce"
    (started,) = start_collective(w, kind, [partial], dim, r.form, reduce_op="sum")
    if r.delay == 0:
        arrived = bound_value(w, call(WAIT, started))
        total = add(w, arrived, main)
        w.pool += [w.main, arrived]
        w.main = write_norm(w, total, r.how // 16) if r.how // 4 % 2 else total
    else:
        schedule_wait(w, r, (started,), [partial])
    w.labels.append("column-row")


def chunked_product(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A product in chunks of rows, each overlapped with the collective of another: gathers before it, or reductions after it."""
    call, dim = w.draft.call, w.roles.main
    hidden = w.setting.hidden
    rows = w.tokens
    count = next((n for n in ((2, 3, 4)[r.b % 3], 2, 3) if rows % n == 0), 1)
    if count < 2:
        raise NoSite
    step = rows // count
    own = weight(w, w.main, (hidden, hidden), "weight", "varying", dim)
    chunks = [call("aten::slice.Tensor", w.main, 0, i * step, (i + 1) * step) for i in range(count)]
    w.labels.append("pipelined")
    if r.how % 2:
        started: list[DraftValue] = []
        for chunk in chunks:
            made = call("aten::mm", chunk, own, rms=0.6)
            started += start_collective(w, "all_reduce", [made], dim, r.form, reduce_op="sum")
        whole = call("aten::cat", [call(WAIT, item) for item in started], rms=started[0].rms)
        w.pool.append(w.main)
        w.main = add(w, w.main, bound_value(w, whole))
        return
    ahead = 1 if r.how // 2 % 2 else count
    started = [start_collective(w, "all_gather", [chunk], dim)[0] for chunk in chunks[:ahead]]
    made_of = []
    for i in range(count):
        arrived = call(WAIT, started[i])
        if len(started) < count:
            started += start_collective(w, "all_gather", [chunks[len(started)]], dim)
        made_of.append(call("aten::mm", arrived, own, rms=0.6))
    whole = bound_value(w, call("aten::cat", made_of, rms=0.6))
    (scattered,) = start_collective(w, "reduce_scatter", [whole], dim, reduce_op="sum")
    schedule_wait(w, r, (scattered,), [whole])


__all__ = ["LAST", "chunked_product", "column_row", "forward", "gradient", "result"]
