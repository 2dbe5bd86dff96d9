"""Programs whose collectives a compiler puts into buckets: many small ones, of several kinds, groups and dtypes.

They are functional, as PyTorch hands graphs to such passes: what an op makes is never written into, and inputs only at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tcverify.program import VARYING, InputSpec, Mesh, Program, Recipe
from tcverify.strategies.choices import weighted_table
from tcverify.strategies.functional.building import program_of
from tcverify.strategies.functional.script import Script, ScriptValue
from tcverify.strategies.transformer.draft import PerRank
from tcverify.strategies.transformer.roles import Roles, roles_of
from tcverify.strategies.transformer.sites import NoSite

_BYTE = tuple(range(256))
_C10D = "_c10d_functional::"
_WAIT = _C10D + "wait_tensor"
#: Most elements of a value on one rank.
MOST_ELEMENTS = 1024

#: What a collective is of, beside what has been made before.
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
        kind: a collective, or what stands beside collectives.
        source: where its operand is from: an "input" of its own, "made" before, "turned" (not contiguous), "cast", "used"
            (an input that others read, too), or "padded" as DTensor packs what cannot be divided.
        a, b: bytes that pick operands.
        shape, dtype: of a new input.
        reduce_op: of reductions.
        group: a byte that picks the mesh dim.
        delay: how many records pass until the wait; 0 puts it directly behind, −1 at the end.
        use: what becomes of the result.
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
    "source": weighted_table(("input", 9), ("made", 6), ("cast", 3), ("turned", 2), ("used", 2), ("padded", 2)),
    "a": _BYTE,
    "b": _BYTE,
    "shape": _SHAPES,
    "dtype": _DTYPES,
    "reduce_op": weighted_table(("sum", 8), ("avg", 3), ("max", 1), ("product", 1)),
    "group": _BYTE,
    "delay": weighted_table((0, 9), (1, 2), (2, 2), (-1, 2)),
    "use": weighted_table(("pool", 5), ("cos", 4), ("output", 3), ("view", 2), ("twice", 2), ("cast", 1), ("wait again", 1)),
}  # fmt: skip

RECORDS = 10
RECORD_WIDTH = len(RECORD)
#: Bytes of a whole program: the seed of its values, how alike its collectives are, and records.
WIDTH = 2 + RECORDS * RECORD_WIDTH


@dataclass(slots=True)
class _BucketingWriter:
    """A program half written.

    Attributes:
        alike: the dtype of all collectives, which are over one group then, so that buckets are large; else None.
        pool: values that may be read.
        waiting: what is under way: the record before which it is waited for, and what becomes of it.
        outputs: what is returned at any rate.
        late: writes into inputs, which stand at the end.
    """

    script: Script
    roles: Roles
    alike: torch.dtype | None
    pool: list[ScriptValue] = field(default_factory=list)
    waiting: list[tuple[int, ScriptValue, BucketingRecord]] = field(default_factory=list)
    outputs: list[ScriptValue] = field(default_factory=list)
    late: list[tuple[ScriptValue, ScriptValue]] = field(default_factory=list)


def decode_bucketing(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a program of functional collectives. What does not fit is left out."""
    choices = choices.ljust(WIDTH, b"\0")
    state = _BucketingWriter(
        Script(mesh), roles_of(mesh), None if choices[1] % 2 else _DTYPES[choices[1] // 2 % len(_DTYPES)]
    )
    x = _input(state, "x", (2,), torch.float32)
    state.pool.append(x)
    for number in range(RECORDS):
        _land(state, number)
        row = choices[2 + number * RECORD_WIDTH :][:RECORD_WIDTH]
        record = BucketingRecord(*(table[byte % len(table)] for table, byte in zip(RECORD.values(), row, strict=True)))
        length, flying = len(state.script), dict(state.script.flying)
        lists = [list(one) for one in (state.pool, state.waiting, state.outputs, state.late)]
        try:
            _write(state, record, number)
        except NoSite:
            state.script.rollback(length, flying)
            state.pool, state.waiting, state.outputs, state.late = lists  # type: ignore[assignment]
    _land(state, None)
    found = dict.fromkeys([*state.outputs, *state.script.unread()])
    kept = {value.number: value for value in list(found)[:10]} or {x.number: x}
    for target, source in state.late:
        state.script.call("aten::copy_", target, source)
    return program_of(state.script, list(kept.values()), choices[0], ["bucketing"])


def _write(state: _BucketingWriter, r: BucketingRecord, number: int) -> None:
    if r.kind == "none":
        return
    if r.kind == "compute":
        state.pool.append(_bounded(state, state.script.call("aten::neg", _picked(state, r.a))))
        return
    if r.kind == "add":
        one = _picked(state, r.a)
        other = _picked(state, r.b)
        if _floating(state, one) != _floating(state, other):
            raise NoSite
        state.pool.append(_bounded(state, state.script.call("aten::add.Tensor", one, other, rms=one.rms + other.rms)))
        return
    dim = _dim(state, r)
    if r.kind == "write":
        target = _input(state, "buffer", r.shape, torch.float32, dim)
        state.pool.append(target)
        state.late.append((target, state.script.call("aten::neg", target)))
        return
    operand = _operand(state, r, dim)
    call, size = state.script.call, _size(state, dim)
    if r.kind == "all_gather":
        if state.script.elements(operand) * state.roles.size(dim) > MOST_ELEMENTS:
            raise NoSite
        started = call(_C10D + "all_gather_into_tensor", operand, size, dim)
    elif r.kind == "all_to_all":
        shape = state.script.shape(operand)
        equal = PerRank(f"{dim}_{shape[0]}", lambda rank: _parts(state, dim, rank, shape[0]))
        started = call(_C10D + "all_to_all_single", operand, equal, equal, dim)
    else:
        floating = _floating(state, operand)
        op = r.reduce_op if floating or r.reduce_op == "max" else "sum"
        op = "sum" if op == "product" and operand.rms > 1 else op
        rms = operand.rms * (state.roles.size(dim) if op == "sum" else 1)
        if r.kind == "all_reduce":
            started = call(_C10D + "all_reduce", operand, op, dim, rms=rms)
        else:
            started = call(_C10D + "reduce_scatter_tensor", operand, op, size, dim, rms=rms)
    state.waiting.append((number + r.delay if r.delay >= 0 else RECORDS, started, r))


def _land(state: _BucketingWriter, number: int | None) -> None:
    """Wait for what is due before a record, or for everything, in the order of starts."""
    due = [one for one in state.waiting if number is None or one[0] < number]
    state.waiting = [one for one in state.waiting if one not in due]
    for _, started, r in due:
        value = state.script.call(_WAIT, started)
        if r.use == "wait again":
            state.outputs.append(state.script.call(_WAIT, started))
        value = _bounded(state, value)
        floating = state.script.spec(value).dtype.is_floating_point
        if r.use == "cos" and floating:
            value = state.script.call("aten::cos", value, rms=0.7)
        elif r.use == "output":
            state.outputs.append(value)
        elif r.use == "view":
            value = state.script.call("aten::view", value, [-1])
        elif r.use == "twice":
            state.outputs.append(state.script.call("aten::neg", value))
        elif r.use == "cast" and floating:
            value = state.script.call("prims::convert_element_type", value, torch.float32)
        state.pool.append(value)


def _operand(state: _BucketingWriter, r: BucketingRecord, dim: str) -> ScriptValue:
    """What a collective is of."""
    call = state.script.call
    parts = state.roles.multiple(dim) if r.kind in ("reduce_scatter", "all_to_all") else 1
    shape = (r.shape[0] * parts, *r.shape[1:])
    dtype = state.alike or r.dtype
    if r.source in ("made", "used"):
        found = _picked(state, r.a)
        shape = state.script.spec(found).shape
        if not shape or shape[0] % parts:
            raise NoSite
        return found
    if r.source == "cast":
        of = _input(state, "p", shape, _DTYPES[r.b % len(_DTYPES)], dim)
        return call("prims::convert_element_type", of, dtype)
    if r.source == "turned" and len(shape) > 1:
        turned = _input(state, "p", (*shape[1:], shape[0]), dtype, dim)
        return call("aten::permute", turned, [len(shape) - 1, *range(len(shape) - 1)])
    if r.source == "padded" and r.kind == "reduce_scatter" and r.shape[0]:
        return _padded(state, r, dim, dtype)
    made = _input(state, "p", shape, dtype, dim, wide=r.kind in ("all_gather", "all_to_all") and r.b % 2 == 0)
    state.pool.append(made)
    return made


def _floating(state: _BucketingWriter, value: ScriptValue) -> bool:
    return state.script.spec(value).dtype.is_floating_point


def _padded(state: _BucketingWriter, r: BucketingRecord, dim: str, dtype: torch.dtype) -> ScriptValue:
    """The chunks of a tensor that the group does not divide, each filled up with zeros."""
    sizes = set(state.roles.sizes(dim))
    if len(sizes) > 1:
        raise NoSite
    parts, rows = sizes.pop(), r.shape[0] + 1
    chunk = math.ceil(rows / parts)
    source = _input(state, "g", (rows, *r.shape[1:]), dtype, dim)
    made = state.script.call("aten::neg", source)
    several = state.script.call("aten::split.Tensor", made, chunk)
    present = math.ceil(rows / chunk)
    if present < parts:
        raise NoSite
    pieces = [state.script.item(several, i) for i in range(parts)]
    last = chunk * parts - rows
    if last:
        pads = [0, 0] * (len(r.shape) - 1) + [0, last]
        pieces[-1] = state.script.call("aten::constant_pad_nd", pieces[-1], pads)
    return state.script.call("aten::cat", pieces)


def _input(
    state: _BucketingWriter, name: str, shape: Sequence[int], dtype: torch.dtype, dim: str = "", *, wide: bool = False
) -> ScriptValue:
    """An input that has this shape, and another value, on every rank. Integers are small, or such as floating point has not."""
    recipe = Recipe() if dtype.is_floating_point else Recipe("wide") if wide else Recipe("integers", 50.0)
    placements = state.roles.declared([(dim or state.roles.main, VARYING)])
    spec = InputSpec(name, tuple(shape), dtype, placements, recipe)
    return state.script.input(spec, 0.6 if dtype.is_floating_point else 50.0)


def _picked(state: _BucketingWriter, choice: int) -> ScriptValue:
    """A value that has been made: 0 the newest, and newer ones more often."""
    found = [value for value in state.pool if state.script.readable(value)]
    return found[-1 - (choice**2 * len(found) >> 16)]


def _bounded(state: _BucketingWriter, value: ScriptValue) -> ScriptValue:
    """The value, scaled down where it has become large."""
    if state.script.elements(value) > MOST_ELEMENTS:
        raise NoSite
    if value.rms <= 4 or not state.script.spec(value).dtype.is_floating_point:
        return value
    return state.script.call("aten::mul.Tensor", value, 0.125, rms=value.rms / 8)


def _dim(state: _BucketingWriter, r: BucketingRecord) -> str:
    dims = [dim.name for dim in state.script.mesh.dims]
    return state.roles.main if state.alike and r.group % 8 else dims[r.group % len(dims)]


def _size(state: _BucketingWriter, dim: str) -> Any:
    sizes = set(state.roles.sizes(dim))
    if len(sizes) == 1:
        return sizes.pop()
    return PerRank(f"{dim}_size", lambda rank: len(state.script.mesh.dim(dim).group(rank)))


def _parts(state: _BucketingWriter, dim: str, rank: int, rows: int) -> list[int]:
    size = len(state.script.mesh.dim(dim).group(rank))
    return [rows // size] * size


__all__ = ["WIDTH", "decode_bucketing"]
