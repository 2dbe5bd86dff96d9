"""Ops of which only the signature and the shapes are known: each represents some function of its operands, the same everywhere.

A library's op without a meaning in the tables is taken as an uninterpreted function: smooth, so that rounding stays rounding;
of every element of every operand, so that any difference shows; keyed by its name and its other arguments, and
the same on every rank and in every number domain. So a pass that moves, keeps, merges or schedules such a call is verified as
with any other op. The real kernel is never run; its fake kernel says of what shape results are. Operands that the schema says
are written get values of the same kind.

An op that names a group is a collective that blocks: a function of the operands of all members, and of the member's place.

A declared law (`tcverify.registry.op_laws`) makes it some function for which the law holds. Floating-point results are in
(−1, 1); integers are 0 or 1, so that they index whatever has two elements.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tcverify.ops.collective import Collective, Group
from tcverify.ops.op import Lookup, Op, Request
from tcverify.ops.shapes import infer_result
from tcverify.ops.spec import TensorSpec, contiguous_stride
from tcverify.registry.op_laws import OpLaw, law_of

Tensor = torch.Tensor
#: The operands that a call computes with: tensors, each with the name of its argument.
Operands = Sequence[tuple[str, Tensor]]
#: Of each tensor by its place, the dims along which its slices are computed by themselves.
Places = Mapping[int, tuple[int, ...]]

#: Projections of the operands that all results are made of.
_PROJECTIONS = 4
#: Elements that share one factor of the weights.
_WIDTH = 256
#: Weights are integers below this: as many as a projection can tell apart.
_WEIGHTS = 1 << 13

#: Names of arguments that name the group of a collective, or list its ranks.
_GROUP = re.compile(r"(process_)?group(_name)?|rank_group|ranks|pg")
#: Names of arguments that say that an op communicates, and not with whom.
_PARTNERS = re.compile(r"world_size|peer|(src|dst|source|target)(_rank)?|(device_)?mesh")
_MEND = "define it with tcverify.register_dialect"


def make_uninterpreted(target: torch._ops.OpOverload, name: str, lookup: Lookup) -> Op:
    """Return the op as an uninterpreted function; one without a meaning, with the reason, where it cannot be one.

    Args:
        lookup: says how the shapes of its results are inferred.
    """
    schema = target._schema
    reason = _reason(target)
    if reason is not None:
        return Op(name, None, reason=reason)
    op = Op(
        name,
        partial(_call, lookup, target, name, False),
        aliases=any(a.alias_info is not None for a in schema.arguments),
        native=partial(_call, lookup, target, name, True),
        uninterpreted=True,
        effect=target in torch.fx.node._side_effectful_functions,
    )
    group = _group_argument(schema)
    if group is None:
        return op
    run, native = (partial(_collective, lookup, target, name, native) for native in (False, True))
    named = group.name if str(group.type) == "str" else None
    return replace(op, run=run, native=native, collective=True, resources=("compute", "comm"), group=named)


def _group_argument(schema: torch._C.FunctionSchema) -> Any:
    named = [a for a in schema.arguments if _GROUP.fullmatch(a.name) and str(a.type) in ("str", "List[int]")]
    return named[0] if len(named) == 1 else None


def _reason(target: torch._ops.OpOverload) -> str | None:
    """Why an op is not a function of its operands that writes according to its schema."""
    schema = target._schema
    tags = {tag.name for tag in target.tags}
    if "nondeterministic_seeded" in tags:
        return "its result is random"
    if tags & {"dynamic_output_shape", "data_dependent_output"}:
        return "its shape depends on data"
    for argument in schema.arguments:
        kind = str(argument.type)
        if _PARTNERS.fullmatch(argument.name) and kind in ("int", "str") and _group_argument(schema) is None:
            return f"it may communicate (argument '{argument.name}'), and its peers are unknown; {_MEND}"
        if "__torch__" in kind or "ScriptObject" in kind:
            return f"it takes an object (argument '{argument.name}'), which may hold anything; {_MEND}"
        if argument.alias_info is not None and not argument.alias_info.is_write:
            return f"its result may be a view of '{argument.name}', of unknown elements; {_MEND}"
    if not schema.returns and not schema.is_mutable:
        return f"it returns nothing and writes nothing: what it does is not declared; {_MEND}"
    return None


# ------------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an uninterpreted op.

    Attributes:
        name: of the op.
        key: the op and its non-tensor arguments.
        shapes: of its tensor arguments, each with the argument's name.
    """

    name: str
    key: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


@contextlib.contextmanager
def record_calls() -> Iterator[dict[OpCall, None]]:
    """Collect the calls of uninterpreted ops that are made in this context, each once, in order."""
    calls: dict[OpCall, None] = {}
    _RECORDS.append(calls)
    try:
        yield calls
    finally:
        _RECORDS.remove(calls)


#: What is collected at present.
_RECORDS: list[dict[OpCall, None]] = []


@dataclass(slots=True)
class _Bound:
    """The arguments of a call, in the order of the signature.

    Attributes:
        key: the op and its non-tensor arguments.
        given: by name.
    """

    key: str
    operands: list[tuple[str, Tensor]]
    given: dict[str, Any]


def _bound(target: torch._ops.OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Bound:
    operands: list[tuple[str, Tensor]] = []
    given: dict[str, Any] = {}
    rest: list[Any] = []
    for position, argument in enumerate(target._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        given[argument.name] = value
        leaves = list(value) if isinstance(value, (list, tuple)) else [value]
        operands += [(argument.name, leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [leaf.name if isinstance(leaf, Group) else leaf for leaf in leaves]
        rest.append([None if isinstance(leaf, (Tensor, torch.dtype)) else leaf for leaf in plain])
    return _Bound(f"{name} {rest!r}", operands, given)


def _call(lookup: Lookup, target: torch._ops.OpOverload, name: str, native: bool, /, *args: Any, **kwargs: Any) -> Any:
    call = _bound(target, name, args, kwargs)
    _record(name, call)
    return _computed(target, call, _results(lookup, target, args, kwargs), law_of(name) or OpLaw(), native)


def _collective(
    lookup: Lookup, target: torch._ops.OpOverload, name: str, native: bool, me: int, /, *args: Any, **kwargs: Any
) -> Generator[Request, Tensor, Any]:
    """A collective: what each member has is gathered first."""
    call = _bound(target, name, args, kwargs)
    _record(name, call)
    argument = _group_argument(target._schema).name
    group = call.given[argument]
    if isinstance(group, str) or (isinstance(group, (list, tuple)) and me not in group):
        raise ValueError(f"{name} on rank {me} names group {group!r}, to which it does not belong")
    named = isinstance(group, Group)
    ranks = group.ranks if named else tuple(group)
    # the fake kernel knows names alone
    shown = [(group.name if value is group and named else value) for value in args]
    shown_by_name = {k: group.name if v is group and named else v for k, v in kwargs.items()}
    results = _results(lookup, target, shown, shown_by_name)
    gathered = []
    for operand, x in call.operands:
        part = x.reshape(1, -1)
        asked = Collective("all_gather", ranks, tuple(part.shape), part.dtype, 0, group=group.name if named else None)
        gathered.append((operand, (yield Request(asked, part))))
    call.operands, call.key = gathered, f"{call.key} at {ranks.index(me)}"
    return _computed(target, call, results, OpLaw(), native)


def _record(name: str, call: _Bound) -> None:
    for calls in _RECORDS:
        calls[OpCall(name, call.key, tuple((operand, tuple(x.shape)) for operand, x in call.operands))] = None


def _computed(target: torch._ops.OpOverload, call: _Bound, results: Any, law: OpLaw, native: bool) -> Any:
    """Compute what a call returns, and write what it writes."""
    written = {
        a.name: call.given[a.name]
        for a in target._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and call.given[a.name] is not None
    }
    leaves, tree = pytree.tree_flatten(results)
    made: list[Any] = []
    for number, (leaf, returned) in enumerate(zip(leaves, _returned(target, results, written), strict=True)):
        if returned is not None or not isinstance(leaf, TensorSpec):
            made.append(leaf if returned is None else returned)
            continue
        value = _laid_out(_value(f"{call.key} {number}", leaf.shape, leaf.dtype, call.operands, law), leaf)
        made.append(value.to(leaf.dtype) if native else value)
    contents = []
    for argument, value in written.items():
        for number, into in enumerate([value] if isinstance(value, Tensor) else value):
            key = f"{call.key} {argument} {number}"
            contents.append((into, _value(key, tuple(into.shape), into.dtype, call.operands, law)))
    for into, value in contents:
        into.copy_(value)
    return pytree.tree_unflatten(made, tree)


def _results(lookup: Lookup, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of the fake kernel: specs in place of tensors."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return TensorSpec(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)

    with _disable_current_modes():
        given, named = pytree.tree_map(spec, list(args)), pytree.tree_map(spec, dict(kwargs))
        return infer_result(lookup(target), target, given, named, lambda: -1)


def _returned(target: torch._ops.OpOverload, results: Any, written: Mapping[str, Any]) -> list[Any]:
    """For each leaf of the results, the operand that it is; None where it is new."""
    by_set = {
        frozenset(a.alias_info.before_set): written.get(a.name)
        for a in target._schema.arguments
        if a.alias_info is not None
    }
    returns = target._schema.returns
    each = [results] if len(returns) == 1 else list(results or ())
    found: list[Any] = []
    for value, declared in zip(each, returns, strict=False):
        same = by_set.get(frozenset(declared.alias_info.before_set)) if declared.alias_info is not None else None
        found += [same] * len(pytree.tree_leaves(value))
    return found or [None] * len(pytree.tree_leaves(results))


def _laid_out(value: Tensor, spec: TensorSpec) -> Tensor:
    """The value in the layout that the fake kernel promises, if that is dense."""
    if spec.stride == contiguous_stride(spec.shape):
        return value
    order = sorted(range(len(spec.shape)), key=lambda d: -spec.stride[d])
    back = [order.index(d) for d in range(len(order))]
    return value.permute(order).contiguous().permute(back)


# ------------------------------------------------------------------------------------------------------------ values


def _value(key: str, shape: tuple[int, ...], dtype: torch.dtype, operands: Operands, law: OpLaw) -> Tensor:
    """What a call gives: a function of the operands that the law allows."""
    operands, places = _placed(shape, operands, law)
    mapped = places.get(-1, ())
    rows = [_rows(x, places.get(i, ())) for i, (_, x) in enumerate(operands)]
    shared = [
        tuple(size for d, size in enumerate(x.shape) if d not in places.get(i, ())) for i, (_, x) in enumerate(operands)
    ]
    whole = law.pointwise is not None and len(mapped) == len(shape)  # however many dims there are
    key = f"{key} {shared!r} {[name for name, _ in operands]!r} {sorted(places) if whole else sorted(places.items())!r}"
    own = [size for d, size in enumerate(shape) if d not in mapped]
    linear = _linear_in(law, operands)
    states = [_projected(f"{key} {i}", _squashed(x)) for i, x in enumerate(rows) if i != linear]
    state = sum(states[1:], states[0]) if states else torch.zeros(1, _PROJECTIONS, dtype=torch.float64)
    size = math.prod(own)
    if linear is None:
        found = _spread(key, state, size)
    else:
        along = _projected(f"{key} {linear}", rows[linear].to(torch.float64))
        found = sum(along[:, k : k + 1] * _spread(f"{key} {k}", state, size) for k in range(_PROJECTIONS))  # type: ignore[assignment]
    count = math.prod(shape[d] for d in mapped)
    found = found.expand(count, size).reshape([*(shape[d] for d in mapped), *own])
    found = found.movedim(tuple(range(len(mapped))), mapped) if mapped else found
    if dtype is torch.bool:
        return found > 0
    if dtype.is_complex:
        return found.to(torch.complex128)
    return found.contiguous() if dtype.is_floating_point else (found > 0).to(dtype)


def _linear_in(law: OpLaw, operands: Operands) -> int | None:
    if law.linear is None:
        return None
    return next((i for i, (name, _) in enumerate(operands) if law.linear in ("", name)), None)


def _placed(shape: tuple[int, ...], operands: Operands, law: OpLaw) -> tuple[Operands, Places]:
    """The dims whose slices are computed by themselves: of each operand, and under −1 of the result."""
    if law.pointwise is not None:
        chosen = {i for i, (name, _) in enumerate(operands) if not law.pointwise or name in law.pointwise}
        try:
            whole = torch.broadcast_shapes(shape, *(operands[i][1].shape for i in chosen))
        except RuntimeError:
            whole = None
        if whole == shape:
            spread = [(name, x.expand(shape) if i in chosen else x) for i, (name, x) in enumerate(operands)]
            every = tuple(range(len(shape)))
            return spread, {-1: every, **dict.fromkeys(chosen, every)}
    places: dict[int, tuple[int, ...]] = {}
    for row in law.rows:
        for place, dim in _along(dict(row), shape, operands).items():
            if dim not in places.get(place, ()):
                places[place] = (*places.get(place, ()), dim)
    # operands that lack one of several dims are needed whole: their slices cannot be distinguished
    full = len(places.get(-1, ()))
    return operands, {place: dims for place, dims in places.items() if len(dims) == full} if full else {}


def _along(row: Mapping[str, int], shape: tuple[int, ...], operands: Operands) -> dict[int, int]:
    """The place of one dim in the result and in the operands; nothing where the law does not apply."""
    named = {i: row[name] for i, (name, _) in enumerate(operands) if name in row}
    if not named:
        named = {i: row[""] for i, (_, x) in enumerate(operands) if "" in row and _has(x.shape, row[""])}
    if not named:
        return {}
    first, dim = next(iter(named.items()))
    if not _has(operands[first][1].shape, dim) or not _has(shape, dim):
        return {}
    length = operands[first][1].shape[dim]
    found = {
        i: d % operands[i][1].dim()
        for i, d in named.items()
        if _has(operands[i][1].shape, d) and operands[i][1].shape[d] == length
    }
    return {**found, -1: dim % len(shape)} if shape[dim] == length else {}


def _has(shape: Sequence[int], dim: int) -> bool:
    return -len(shape) <= dim < len(shape)


def _rows(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The slices of a tensor along dims, one per row; one row of all where there are none."""
    if x.is_complex():
        x = torch.view_as_real(x)
    count = math.prod(x.shape[d] for d in dims)
    front = x.movedim(dims, tuple(range(len(dims)))) if dims else x
    return front.reshape(count, math.prod(front.shape[len(dims) :]))


def _squashed(x: Tensor) -> Tensor:
    """Bounded, and as sensitive to large values as to small ones."""
    if x.is_floating_point():
        return torch.atan(torch.asinh(x.to(torch.float64)))
    return torch.sin(x.to(torch.float64))


def _projected(key: str, rows: Tensor) -> Tensor:
    """Weighted sums of each row: [rows, projections]."""
    count, size = rows.shape
    blocks = -(-size // _WIDTH)
    padded = torch.cat([rows, rows.new_zeros(count, blocks * _WIDTH - size)], 1)
    inner = padded.reshape(count * blocks, _WIDTH) @ _weights(f"{key} inner", _WIDTH)
    outer = _weights(f"{key} outer", blocks) if blocks > 1 else _weights(f"{key} outer", 1)[:blocks]
    found = (inner.reshape(count, blocks, _PROJECTIONS) * outer).sum(1)
    return found * 2.0 ** -(25 + round(math.log2(max(size, 1)) / 2))


def _spread(key: str, state: Tensor, size: int) -> Tensor:
    """A function of each row's state for each of `size` places: [rows, size]."""
    blocks = -(-size // _WIDTH)
    inner = state @ _weights(f"{key} inner result", _WIDTH).t() + _weights(f"{key} phase", _WIDTH)[:, 0]
    outer = (
        state @ _weights(f"{key} outer result", max(blocks, 1))[:blocks].t()
        + _weights(f"{key} turn", max(blocks, 1))[:blocks, 0]
    )
    angles = (outer[:, :, None] + inner[:, None, :]).flatten(1)[:, :size]
    return torch.sin(angles * 2.0**-11)


def _weights(key: str, size: int) -> Tensor:
    """Odd integers as the domain carries them: [size, projections]."""
    with _disable_current_modes():
        table = _table(key, size)
    return table.to(torch.float64)


@lru_cache(maxsize=4096)
def _table(key: str, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randint(1, _WEIGHTS, (size, _PROJECTIONS), generator=generator)


__all__ = ["OpCall", "make_uninterpreted", "record_calls"]
