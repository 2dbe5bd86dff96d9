"""Programs whose collectives a compiler merges into buckets: many small ones, of several kinds, groups and dtypes.

They are functional, like the graphs that PyTorch passes to such passes: results of ops are never written into, and inputs only at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from tcverify.program import VARYING, Mesh, Program, Recipe
from tcverify.strategies.choices import weighted_table
from tcverify.strategies.draft import DraftValue, NoSite, PerRank, attempt
from tcverify.strategies.functional.draft import AsyncDraft
from tcverify.strategies.functional.writing import COMBINATIONS
from tcverify.strategies.transformer.roles import Roles, roles_of

_BYTE = tuple(range(256))
_C10D = "_c10d_functional::"
_WAIT = _C10D + "wait_tensor"
#: Most elements of a value on one rank.
MOST_ELEMENTS = 1024

#: Operands of collectives, besides earlier values.
_SHAPES: tuple[tuple[int, ...], ...] = (
    (1,), (2,), (3,), (1, 2), (2, 3), (4,), (1, 1), (2, 1, 3), (0,), (0, 2), (2, 0), (5,), (3, 2), (7,),
)  # fmt: skip
_DTYPES = weighted_table(
    (torch.float32, 8), (torch.bfloat16, 3), (torch.float64, 1), (torch.int64, 3), (torch.int32, 1), (torch.float16, 1)
)


@dataclass(frozen=True, slots=True)
class BucketingRecord:
    """One step of writing; see `RECORD` for the values.

    Attributes:
        kind: a collective, or another op.
        source: where its operand is from: a new "input", one that is "like" the operand of an earlier collective, "made" before,
            "turned" (not contiguous), "cast", "used" (an input with other readers), or "padded" as DTensor packs uneven shards.
        a, b: bytes that pick operands.
        shape, dtype: of a new input.
        reduce_op: of reductions.
        group: a byte that picks the mesh dim.
        delay: how many records pass until the wait; 0 puts it directly after the start, −1 at the end.
        use: how the result is used.
    """

    kind: str
    source: str
    a: int
    b: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduce_op: str
    group: int
    delay: int
    use: str


RECORD: dict[str, tuple[Any, ...]] = {
    "kind": weighted_table(
        ("none", 2), ("all_gather", 9), ("reduce_scatter", 7), ("all_reduce", 5), ("compute", 3), ("add", 3), ("write", 1),
        ("all_to_all", 1),
    ),
    "source": weighted_table(("input", 8), ("like", 5), ("made", 6), ("cast", 3), ("turned", 2), ("used", 2), ("padded", 2)),
    "a": _BYTE,
    "b": _BYTE,
    "shape": _SHAPES,
    "dtype": _DTYPES,
    "reduce_op": weighted_table(("sum", 8), ("avg", 3), ("max", 1), ("product", 1)),
    "group": _BYTE,
    "delay": weighted_table((0, 9), (1, 2), (2, 2), (-1, 2)),
    "use": weighted_table(
        ("pool", 5), ("cos", 4), ("output", 3), ("view", 2), ("twice", 2), ("cast", 1), ("wait again", 1), ("sum", 3),
    ),
}  # fmt: skip

#: Kind and reduction of most collectives of a program, so that a bucket has several of them; "": as they come.
_FOCUS = weighted_table(
    (("", ""), 3), (("all_gather", "sum"), 4), (("reduce_scatter", "sum"), 3), (("reduce_scatter", "avg"), 1),
    (("all_reduce", "sum"), 3), (("all_reduce", "max"), 1),
)  # fmt: skip
_BUCKETED = frozenset(kind for kind, _ in _FOCUS if kind)
_SUMS = weighted_table(("add", 5), ("alpha", 1), ("sub", 1), ("sub alpha", 1))

RECORDS = 10
RECORD_WIDTH = len(RECORD)
#: Bytes of a whole program: the seed of its values, how similar its collectives are, which kind prevails, and records.
WIDTH = 3 + RECORDS * RECORD_WIDTH


@dataclass(slots=True)
class BucketingWriter:
    """A program under construction.

    Attributes:
        alike: the dtype of all collectives, which are over one group then, so that buckets are large; else None.
        pool: values that may be read.
        operands: of collectives.
        arrived: results of collectives, after the kind of each.
        waiting: collectives in flight: the record before which each is waited for, and its use.
        outputs: values that are returned in any case.
        late: writes into inputs, which come at the end.
    """

    draft: AsyncDraft
    roles: Roles
    alike: torch.dtype | None
    pool: list[DraftValue] = field(default_factory=list)
    operands: list[DraftValue] = field(default_factory=list)
    arrived: list[tuple[str, DraftValue]] = field(default_factory=list)
    waiting: list[tuple[int, DraftValue, BucketingRecord]] = field(default_factory=list)
    outputs: list[DraftValue] = field(default_factory=list)
    late: list[tuple[DraftValue, DraftValue]] = field(default_factory=list)


def decode_bucketing(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a program of functional collectives. Parts that do not fit are left out."""
    choices = choices.ljust(WIDTH, b"\0")
    w = BucketingWriter(
        AsyncDraft(mesh), roles_of(mesh), None if choices[1] % 4 == 3 else _DTYPES[choices[1] // 4 % len(_DTYPES)]
    )
    x = _input(w, "x", (2,), torch.float32)
    w.pool.append(x)
    focus = _FOCUS[choices[2] % len(_FOCUS)]
    for number in range(RECORDS):
        _land(w, number)
        row = choices[3 + number * RECORD_WIDTH :][:RECORD_WIDTH]
        record = BucketingRecord(*(table[byte % len(table)] for table, byte in zip(RECORD.values(), row, strict=True)))
        attempt(w, _write, _focused(record, focus), number)
    _land(w, None)
    found = dict.fromkeys([*w.outputs, *w.draft.unread()])
    kept = {value.number: value for value in list(found)[:10]} or {x.number: x}
    for target, source in w.late:
        w.draft.call("aten::copy_", target, source)
    return w.draft.program(tuple(kept.values()), choices[0], ["bucketing"])


def _focused(r: BucketingRecord, focus: tuple[str, str]) -> BucketingRecord:
    """A record whose collective is of the kind that prevails; every eighth stays as it is."""
    kind, reduce_op = focus
    if not kind or r.kind not in _BUCKETED or r.group // 8 % 8 == 0:
        return r
    return replace(r, kind=kind, reduce_op=reduce_op)


def _write(w: BucketingWriter, r: BucketingRecord, number: int) -> None:
    if r.kind == "none":
        return
    if r.kind == "compute":
        w.pool.append(_bounded(w, w.draft.call("aten::neg", _picked(w, r.a))))
        return
    if r.kind == "add":
        one = _picked(w, r.a)
        other = _picked(w, r.b, lambda value: _adds_to(w, one, value))
        w.pool.append(_bounded(w, w.draft.call("aten::add.Tensor", one, other, rms=one.rms + other.rms)))
        return
    dim = _dim(w, r)
    if r.kind == "write":
        target = _input(w, "buffer", r.shape, torch.float32, dim)
        w.pool.append(target)
        w.late.append((target, w.draft.call("aten::neg", target)))
        return
    operand = _operand(w, r, dim)
    w.operands.append(operand)
    call, size = w.draft.call, _size(w, dim)
    if r.kind == "all_gather":
        if w.draft.elements(operand) * w.roles.size(dim) > MOST_ELEMENTS:
            raise NoSite
        started = call(_C10D + "all_gather_into_tensor", operand, size, dim)
    elif r.kind == "all_to_all":
        shape = w.draft.shape(operand)
        equal = PerRank(f"{dim}_{shape[0]}", lambda rank: _parts(w, dim, rank, shape[0]))
        started = call(_C10D + "all_to_all_single", operand, equal, equal, dim)
    else:
        floating = _floating(w, operand)
        op = r.reduce_op if floating or r.reduce_op == "max" else "sum"
        op = "sum" if op == "product" and operand.rms > 1 else op
        rms = operand.rms * (w.roles.size(dim) if op == "sum" else 1)
        if r.kind == "all_reduce":
            started = call(_C10D + "all_reduce", operand, op, dim, rms=rms)
        else:
            started = call(_C10D + "reduce_scatter_tensor", operand, op, size, dim, rms=rms)
    w.waiting.append((number + r.delay if r.delay >= 0 else RECORDS, started, r))


def _land(w: BucketingWriter, number: int | None) -> None:
    """Wait for what is due before a record, or for everything, in the order of starts."""
    due = [one for one in w.waiting if number is None or one[0] < number]
    w.waiting = [one for one in w.waiting if one not in due]
    for _, started, r in due:
        value = w.draft.call(_WAIT, started)
        if r.use == "wait again":
            w.outputs.append(w.draft.call(_WAIT, started))
        value = _bounded(w, value)
        w.arrived.append((r.kind, value))
        floating = w.draft.spec(value).dtype.is_floating_point
        if r.use == "cos" and floating:
            value = w.draft.call("aten::cos", value, rms=0.7)
        elif r.use == "output":
            w.outputs.append(value)
        elif r.use == "view":
            value = w.draft.call("aten::view", value, [-1])
        elif r.use == "twice":
            w.outputs.append(w.draft.call("aten::neg", value))
        elif r.use == "sum":
            value = _summed(w, value, r)
        elif r.use == "cast" and floating:
            value = w.draft.call("prims::convert_element_type", value, torch.float32)
        w.pool.append(value)


def _summed(w: BucketingWriter, value: DraftValue, r: BucketingRecord) -> DraftValue:
    """Gradients that add up: that of an earlier collective of the same kind and the value; or the value, if there is none."""
    found = [one for kind, one in w.arrived if kind == r.kind and w.draft.readable(one) and _adds_to(w, value, one)]
    if not found:
        return value
    other = found[-1 - r.b % min(2, len(found))]
    op, more = COMBINATIONS[_SUMS[r.a % len(_SUMS)]]
    try:
        rms = other.rms + more.get("alpha", 1) * value.rms
        return _bounded(w, w.draft.call(op, other, value, **more, rms=rms))
    except NoSite:  # on another rank their shapes do not fit
        return value


def _operand(w: BucketingWriter, r: BucketingRecord, dim: str) -> DraftValue:
    """The operand of a collective."""
    call = w.draft.call
    parts = w.roles.multiple(dim) if r.kind in ("reduce_scatter", "all_to_all") else 1
    shape = (r.shape[0] * parts, *r.shape[1:])
    dtype = w.alike or r.dtype
    if r.source in ("made", "used"):
        found = _picked(w, r.a)
        shape = w.draft.spec(found).shape
        if not shape or shape[0] % parts:
            raise NoSite
        return found
    if r.source == "like" and w.operands:
        spec = w.draft.spec(w.operands[-1 - r.a % min(3, len(w.operands))])
        if spec.shape[0] % parts:
            raise NoSite
        shape, dtype = spec.shape, spec.dtype
    if r.source == "cast":
        of = _input(w, "p", shape, _DTYPES[r.b % len(_DTYPES)], dim)
        return call("prims::convert_element_type", of, dtype)
    if r.source == "turned" and len(shape) > 1:
        turned = _input(w, "p", (*shape[1:], shape[0]), dtype, dim)
        return call("aten::permute", turned, [len(shape) - 1, *range(len(shape) - 1)])
    if r.source == "padded" and r.kind == "reduce_scatter" and r.shape[0]:
        return _padded(w, r, dim, dtype)
    made = _input(w, "p", shape, dtype, dim, wide=r.kind in ("all_gather", "all_to_all") and r.b % 2 == 0)
    w.pool.append(made)
    return made


def _floating(w: BucketingWriter, value: DraftValue) -> bool:
    return w.draft.spec(value).dtype.is_floating_point


def _padded(w: BucketingWriter, r: BucketingRecord, dim: str, dtype: torch.dtype) -> DraftValue:
    """The chunks of a tensor that the group does not divide evenly, each padded with zeros."""
    sizes = set(w.roles.sizes(dim))
    if len(sizes) > 1:
        raise NoSite
    parts, rows = sizes.pop(), r.shape[0] + 1
    chunk = math.ceil(rows / parts)
    source = _input(w, "g", (rows, *r.shape[1:]), dtype, dim)
    made = w.draft.call("aten::neg", source)
    several = w.draft.call("aten::split.Tensor", made, chunk)
    present = math.ceil(rows / chunk)
    if present < parts:
        raise NoSite
    pieces = [w.draft.item(several, i) for i in range(parts)]
    last = chunk * parts - rows
    if last:
        pads = [0, 0] * (len(r.shape) - 1) + [0, last]
        pieces[-1] = w.draft.call("aten::constant_pad_nd", pieces[-1], pads)
    return w.draft.call("aten::cat", pieces)


def _input(
    w: BucketingWriter, name: str, shape: Sequence[int], dtype: torch.dtype, dim: str = "", *, wide: bool = False
) -> DraftValue:
    """An input with this shape on every rank, and different values. Integers are small, or not representable in
    floating point."""
    recipe = Recipe() if dtype.is_floating_point else Recipe("wide") if wide else Recipe("integers", 50.0)
    placements = w.roles.declared([(dim or w.roles.main, VARYING)])
    rms = 0.6 if dtype.is_floating_point else 50.0
    return w.draft.input(name, tuple(shape), dtype, placements, recipe, rms=rms)


def _picked(w: BucketingWriter, choice: int, need: Callable[[DraftValue], bool] = lambda value: True) -> DraftValue:
    """An existing value that meets a condition: 0 is the newest, and newer ones are more likely."""
    found = [value for value in w.pool if w.draft.readable(value) and need(value)]
    if not found:
        raise NoSite
    return found[-1 - (choice**2 * len(found) >> 16)]


def _adds_to(w: BucketingWriter, one: DraftValue, other: DraftValue) -> bool:
    """Whether another value can be added: of the same shape, or one that broadcasts, and the sum is not too large."""
    if one is other or _floating(w, one) != _floating(w, other):
        return False
    ours, theirs = (tuple(reversed(w.draft.spec(value).shape)) for value in (one, other))
    pairs = list(zip_longest(ours, theirs, fillvalue=1))
    fits = all(here == there or 1 in (here, there) for here, there in pairs)
    return fits and math.prod(there if here == 1 else here for here, there in pairs) <= MOST_ELEMENTS


def _bounded(w: BucketingWriter, value: DraftValue) -> DraftValue:
    """The value, scaled down if it has become large."""
    if w.draft.elements(value) > MOST_ELEMENTS:
        raise NoSite
    if value.rms <= 4 or not w.draft.spec(value).dtype.is_floating_point:
        return value
    return w.draft.call("aten::mul.Tensor", value, 0.125, rms=value.rms / 8)


def _dim(w: BucketingWriter, r: BucketingRecord) -> str:
    dims = [dim.name for dim in w.draft.mesh.dims]
    return w.roles.main if w.alike and r.group % 8 else dims[r.group % len(dims)]


def _size(w: BucketingWriter, dim: str) -> Any:
    sizes = set(w.roles.sizes(dim))
    if len(sizes) == 1:
        return sizes.pop()
    return PerRank(f"{dim}_size", lambda rank: len(w.draft.mesh.dim(dim).group(rank)))


def _parts(w: BucketingWriter, dim: str, rank: int, rows: int) -> list[int]:
    size = len(w.draft.mesh.dim(dim).group(rank))
    return [rows // size] * size


__all__ = ["WIDTH", "decode_bucketing"]
