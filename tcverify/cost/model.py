"""How long a node of a graph takes on a device: an analytic roofline for compute, the α–β model for collectives.

An op that computes takes the longest of its matrix products at the rate of the matrix units, its other arithmetic at that of
the vector units, and the bytes that it reads and writes at the rate of the memory (Williams, Waterman, Patterson: Roofline,
CACM 52(4), 2009), plus what launching it costs. Ops that the tables below do not know count their bytes alone. A fused op that
multiplies and reduces takes the longer of both parts: its tiles are sent while the next ones are multiplied. Times are upper
bounds of what overlap inside an op can hide, and lower bounds of what contention adds; they are for comparing schedules.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from tcverify.cost.collectives import collective_time
from tcverify.cost.device import DeviceProfile
from tcverify.cost.flops import (
    FLOPS_PER_ELEMENT,
    INSTANT,
    MOVED,
    SPARSE,
    WORK,
    Counter,
    TensorFacts,
    Work,
    elementwise,
    no_work,
)
from tcverify.ops import TensorSpec, lookup
from tcverify.program.graph import RankConstant, constant_value

#: Least time of any op, and the time of an op of unknown shape, in seconds.
MIN_COST_S = 1e-6

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def node_cost(
    node: fx.Node,
    device: DeviceProfile | None,
    constants: Mapping[str, Any] = _NOTHING,
    groups: Mapping[str, Sequence[int]] = _NOTHING,
) -> float | None:
    """Return the seconds that `node` takes, at least `MIN_COST_S`; 0 for nodes that take no time on any device: waits for
    asynchronous collectives, and ops that only free or grow a storage.

    Args:
        node: a call that does work; which nodes do is for the caller to say. Its metadata and that of its operands hold fake
            tensors or `TensorSpec`s.
        device: what it runs on, if that is known.
        constants: values of the rank constants in its arguments (the graphs of a Program have them).
        groups: by name, the ranks of the groups that collectives name (`gm.meta["groups"]`). Of a group that is not among them
            its size counts, where the op says it, as if its members were neighbours.

    Returns:
        The seconds; of the start of an asynchronous collective those from the beginning to the end of its communication.
        `meta["cost_s"]` where it is given; else what the model says, and `MIN_COST_S` where shapes are symbolic or missing; None
        where there is neither a cost nor a device.

    Raises:
        ProgramError: a rank constant has no value.
    """
    if takes_no_time(node):
        return 0.0
    given = node.meta.get("cost_s")
    if given is not None:
        return max(MIN_COST_S, float(given))
    if device is None:
        return None
    memo = _MEMOS.get(device)
    if memo is None:
        memo = _MEMOS[device] = {}
    return _modelled(node, device, constants, groups, memo)


def takes_no_time(node: fx.Node) -> bool:
    """Whether a call takes no time for any arguments: a wait, or an op that only frees or grows a storage."""
    return node.op == "call_function" and _traits_of(node.target).instant


_MEMOS: weakref.WeakKeyDictionary[DeviceProfile, dict[Any, float]] = weakref.WeakKeyDictionary()
_MEMO_SIZE = 1 << 16


def _modelled(
    node: fx.Node,
    device: DeviceProfile,
    constants: Mapping[str, Any],
    groups: Mapping[str, Sequence[int]],
    memo: dict[Any, float],
) -> float:
    if node.op != "call_function":
        return MIN_COST_S  # methods and modules: nothing is known of what they do
    op = _traits_of(node.target)
    values: list[Any] = [_seen(argument, constants) for argument in node.args]
    if node.kwargs:
        values += [_seen(node.kwargs.get(name), constants) for name in op.arguments[len(values) :]]
    if op.named is not None and op.named < len(values):
        members = groups.get(values[op.named]) if isinstance(values[op.named], str) else None
        values[op.named] = None if members is None else tuple(members)
    result = _described(node.meta.get("val"))
    key = (node.target, *values, result)
    try:
        cost = memo.get(key)
    except TypeError:  # a symbolic size
        return MIN_COST_S
    if cost is None:
        cost = max(MIN_COST_S, _time(op, values, result, device))
        if len(memo) >= _MEMO_SIZE:
            memo.clear()
        memo[key] = cost
    return cost


class _Unknown:
    """Placeholder for a value without metadata."""


def _seen(value: Any, constants: Mapping[str, Any]) -> Any:
    """An argument as the model sees it, fit to be the key of a dictionary."""
    if isinstance(value, fx.Node):
        return _described(value.meta.get("val", _Unknown))
    if isinstance(value, RankConstant):
        value = constant_value(value, constants)
    if isinstance(value, (list, tuple)):
        return tuple([_seen(item, constants) for item in value])
    return None if isinstance(value, (slice, dict)) else value


def _described(value: Any) -> Any:
    """Metadata as the model sees it."""
    kind = type(value)
    if kind is TensorSpec or isinstance(value, torch.Tensor):
        return TensorFacts(value.shape, value.dtype)
    if value is None or kind is int or kind is float or kind is bool:
        return value
    if isinstance(value, (list, tuple)):
        return tuple([_described(item) for item in value])
    return _Unknown


def _tensors(value: Any, found: list[TensorFacts]) -> None:
    if type(value) is TensorFacts:
        found.append(value)
    elif type(value) is tuple:
        for item in value:
            _tensors(item, found)


# ---------------------------------------------------------------------------------------------------------- the model


def _time(op: _Traits, values: list[Any], result: Any, device: DeviceProfile) -> float:
    """Seconds of one call; of unknown shapes, 0."""
    operands: list[TensorFacts] = []
    results: list[TensorFacts] = []
    _tensors(tuple(values), operands)
    _tensors(result, results)
    if not results and op.returns_nothing:  # what it writes into is among its operands
        results = operands[-1:]
        moved = sum(map(_bytes, operands))
    elif op.moved is not None:
        moved = op.moved(values)
    else:
        moved = sum(map(_bytes, operands)) + sum(map(_bytes, results))
    if _Unknown in values or (not results and op.name not in _WITHOUT_TENSORS):
        return 0.0
    if op.sparse is not None and type(values[op.sparse]) is TensorFacts:  # reads what it picks, not the whole table
        moved += min(_bytes(results[0]) - _bytes(values[op.sparse]), 0)
    try:
        work = op.work(values, results[0]) if results else Work()
        communication = _communication(op, values, results[0], device) if results else None
    except (AttributeError, IndexError, TypeError):  # arguments in another form than the tables expect
        work, communication = Work(), None
    dtype = next((tensor.dtype for tensor in (*operands, *results)), torch.float32)
    compute = max(
        moved / device.memory_rate, work.matmul / device.matmul_rate(dtype), work.vector / device.vector_rate(dtype)
    )
    if "comm" not in op.resources:
        return compute + (device.launch.matmul if work.matmul else device.launch.vector)
    if communication is None:  # of unknown form: its bytes over the slowest way there is
        contribution = _bytes(operands[0]) if operands else 0
        communication = contribution / min(dim.effective_bandwidth for dim in device.interconnects)
    return max(compute, communication) + device.launch.comm


def _bytes(tensor: TensorFacts) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Traits:
    """What the model knows of an op.

    Attributes:
        name: without the overload.
        arguments: their names, where they are known.
        work: counts its FLOPs, from its arguments and its first result.
        resources: as in `ops.Op`.
        collective: the kind of collective that it carries out, if any.
        group: position of the list of members in its arguments, or of the two ranks of send_recv.
        sparse: position of an argument that is read where indices say, and no further.
        named: position of the name of the group, of ops that give it.
        sized: position of the number of members, of ops that give it.
        moved: counts the bytes that are read and written, where they are not those of operands and results.
        instant: see `takes_no_time`.
        returns_nothing: whether the op has no result by its signature.
    """

    name: str
    arguments: tuple[str, ...]
    work: Counter
    resources: tuple[str, ...]
    collective: str | None = None
    group: tuple[int, ...] = ()
    sparse: int | None = None
    named: int | None = None
    sized: int | None = None
    moved: Callable[[list[Any]], int] | None = None
    instant: bool = False
    returns_nothing: bool = False


_OPS: dict[Any, _Traits] = {}


def _traits_of(target: Any) -> _Traits:
    op = _OPS.get(target)
    if op is None:
        op = _OPS[target] = _traits(target)
    return op


def _traits(target: Any) -> _Traits:
    op = lookup(target)
    base = op.name.split(".")[0]  # without the overload
    short = base.rpartition("::")[2]
    schema = getattr(target, "_schema", None)
    names = tuple(argument.name for argument in schema.arguments) if schema is not None else ()
    members = next(((name,) for name in ("rank_group", "team") if name in names), ("source_rank", "target_rank"))
    group = tuple(names.index(name) for name in members if name in names)
    work = WORK.get(base)
    if work is None:
        work = elementwise(FLOPS_PER_ELEMENT.get(short, 1)) if "compute" in op.resources else no_work
    return _Traits(
        base,
        names,
        work,
        op.resources,
        _kind(op.group is not None, base, short),
        group,
        SPARSE.get(base),
        names.index(op.group) if op.group in names else None,
        names.index("group_size") if "group_size" in names else None,
        MOVED.get(base),
        op.phase == "wait" or base in INSTANT,
        schema is not None and not schema.returns,
    )


def _kind(named: bool, base: str, short: str) -> str | None:
    """The kind of collective that an op carries out, where its name says it."""
    if named:
        return NAMED_COLLECTIVES.get(base)
    if base.startswith("host_ir::"):
        return short if short in _OF_TEAMS else None
    return _COLLECTIVES.get(short)


def _communication(op: _Traits, values: list[Any], result: TensorFacts, device: DeviceProfile) -> float | None:
    """Seconds that the collective of an op takes; None when it has none, or one of another form than the tables know."""
    if op.collective is None or not (op.group or op.named is not None):
        return None
    if op.named is not None:
        ranks = values[op.named]
        if ranks is None and op.sized is not None:
            ranks = tuple(range(values[op.sized]))
        if ranks is None:
            return None  # of an unknown group
    else:
        ranks = values[op.group[0]] if len(op.group) == 1 else tuple(values[i] for i in op.group)
    interconnect = device.between(ranks) if ranks else None
    if interconnect is None:
        return 0.0  # of one rank
    if op.name.startswith("host_ir::"):
        return collective_time(op.collective, _share(op, values, len(ranks)), len(ranks), interconnect)
    several = type(values[0]) is tuple  # coalesced: one message
    contribution: float = sum(map(_bytes, values[0])) if several else _bytes(values[0])
    if op.name == "symm_mem::fused_matmul_reduce_scatter":  # it scatters the product
        contribution = _bytes(result) * len(ranks)
    elif op.name in ("symm_mem::fused_all_gather_matmul", "_dtensor::shard_dim_alltoall"):
        pass  # it sends the operand as it is
    elif op.collective == "all_to_all":  # whichever is more, what goes out or what comes in
        contribution *= max(sum(values[1]), sum(values[2])) / max(values[0].shape[0], 1)
    elif op.resources == ("compute", "comm"):  # fused: it reduces the product
        contribution = _bytes(result)
    return collective_time(op.collective, contribution, len(ranks), interconnect)


def _share(op: _Traits, values: list[Any], members: int) -> float:
    """Bytes that a member of a team gives; of scatter, that each gets. A root may be in the team without a share."""
    out = values[op.arguments.index("out")]
    if op.collective == "scatter":
        return _bytes(out) if out is not None else _bytes(values[0]) / (members - 1)
    if values[0] is not None:
        return _bytes(values[0])
    return _bytes(out) / (members - 1 if op.collective == "gather" else 1)


#: Ops that communicate without moving data.
_WITHOUT_TENSORS = frozenset({"p2p::barrier"})

#: Ops that name their group: the form follows from the name.
NAMED_COLLECTIVES = {
    f"_c10d_functional::{name}{form}": kind
    for name, kind, forms in (
        ("all_reduce", "all_reduce", ("", "_", "_coalesced", "_coalesced_")),
        ("all_gather_into_tensor", "all_gather", ("", "_coalesced", "_out")),
        ("reduce_scatter_tensor", "reduce_scatter", ("", "_coalesced", "_out")),
        ("all_to_all_single", "all_to_all", ("",)),
        ("broadcast", "broadcast", ("", "_")),
    )
    for form in forms
} | {
    **{
        f"_c10d_functional_autograd::{name}": kind
        for name, kind in (
            ("all_gather_into_tensor", "all_gather"), ("reduce_scatter_tensor", "reduce_scatter"),
            ("all_to_all_single", "all_to_all"),
        )
    },
    "_c10d_functional::isend": "send_recv",
    "_c10d_functional::irecv": "send_recv",
    "_dtensor::shard_dim_alltoall": "all_to_all",
    "symm_mem::_low_contention_all_gather": "all_gather",
    "symm_mem::_low_contention_reduce_scatter": "reduce_scatter",
    "symm_mem::fused_all_gather_matmul": "all_gather",
    "symm_mem::fused_matmul_reduce_scatter": "reduce_scatter",
    "symm_mem::multimem_all_gather_out": "all_gather",
    "symm_mem::reduce_scatter_out": "reduce_scatter",
    **{f"symm_mem::two_shot_all_reduce_{form}": "all_reduce" for form in ("", "out")},
    **{
        f"symm_mem::{name}": "one_shot_all_reduce"
        for name in (
            "one_shot_all_reduce", "one_shot_all_reduce_out", "one_shot_all_reduce_copy", "one_shot_all_reduce_copy_out",
            "multimem_all_reduce_", "multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out",
        )
    },
}  # fmt: skip

#: Communications of host IR that name their team.
_OF_TEAMS = (
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute", "broadcast", "gather", "scatter", "reduce",
)  # fmt: skip

_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "pipeline_send_recv": "send_recv",
    "matmul_all_reduce": "all_reduce",
    "static_quant_linear_all_reduce": "all_reduce",
    "static_quant_linear_int4_all_reduce": "all_reduce",
    "fp8_linear_all_reduce": "all_reduce",
    "mxfp4_linear_all_reduce": "all_reduce",
}
