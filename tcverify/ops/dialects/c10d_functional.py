"""The `_c10d_functional` dialect, as PyTorch defines it: collectives that start and are waited for, on groups with names.

Sources: torch/csrc/distributed/c10d/Functional.cpp and torch/distributed/_functional_collectives.py. A start returns at once, or
has begun to write into an operand. `all_reduce` and `broadcast` copy their operand first and work on the copy; all others may
read theirs until the wait. `wait_tensor` returns its operand when everything in flight to its storage has arrived, and
`wait_tensors` (torch 2.15) those of a list. The group of a call is named by its last positional argument.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tcverify.ops.collective import Collective, CollectiveKind, Group
from tcverify.ops.definitions import lasting_library
from tcverify.ops.op import Await, Op, Phase, Request, Start
from tcverify.ops.reductions import REDUCTIONS
from tcverify.ops.table import register_dialect, registered_dialects

Tensor = torch.Tensor
Steps = Generator[Request | Start | Await, Any, Any]


def members(op: str, me: int, group: Group) -> tuple[int, ...]:
    """The ranks of the group that a call names, in group order."""
    if not isinstance(group, Group):
        raise ValueError(f"{op} on group {group!r}, which the mesh does not have")
    if me not in group.ranks:
        raise ValueError(f"{op} on rank {me} is called on group '{group.name}' {list(group.ranks)} of others")
    return group.ranks


def check_group_size(op: str, said: int, ranks: Sequence[int]) -> int:
    if said != len(ranks):
        raise ValueError(f"{op} says group_size={said}, but the group has {len(ranks)} ranks")
    return said


def make_start(kind: CollectiveKind, x: Tensor, output: Tensor, group: Group, **more: Any) -> Start:
    """The start of a collective of `x`, whose result goes to `output`."""
    return Start(make_collective(kind, x, group, **more), x, output)


def make_collective(kind: CollectiveKind, x: Tensor, group: Group, **more: Any) -> Collective:
    """The call of a collective that `x` is contributed to, if c10d can carry it out."""
    reduce_op = more.get("reduce_op")
    if reduce_op is not None and reduce_op not in REDUCTIONS:
        raise ValueError(f"{kind} reduces by '{reduce_op}'; c10d knows {', '.join(REDUCTIONS)}")
    if reduce_op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"{kind} averages {str(x.dtype).removeprefix('torch.')}; c10d divides no integers")
    return Collective(kind, group.ranks, tuple(x.shape), x.dtype, group=group.name, **more)


def divided_shape(op: str, x: Tensor, parts: int) -> list[int]:
    """The shape of a part along dim 0."""
    if not x.dim() or x.shape[0] % parts:
        raise ValueError(f"{op} cannot divide dim 0 of shape {list(x.shape)} by {parts} ranks")
    return [x.shape[0] // parts, *x.shape[1:]]


def require_shape(op: str, out: Tensor, shape: Sequence[int]) -> None:
    """Refuse an output that is not of this shape, or cannot be written into."""
    if list(out.shape) != list(shape):
        raise ValueError(f"{op} writes shape {list(shape)} into an output of shape {list(out.shape)}")
    require_writable(op, out)


def require_writable(op: str, x: Tensor) -> Tensor:
    """Communication writes memory from end to end: NCCL refuses what has gaps or another order, gloo writes into the gaps."""
    if not x.is_contiguous():
        raise ValueError(
            f"{op} writes into a tensor of shape {list(x.shape)} and stride {list(x.stride())}, which is not contiguous"
        )
    return x


def gathered_shape(x: Tensor, parts: int) -> list[int]:
    """The shape of this many parts along dim 0."""
    return [x.shape[0] * parts, *x.shape[1:]] if x.dim() else [parts]


# --------------------------------------------------------------------------------------------------- what they compute


def all_reduce(me: int, input: Tensor, reduce_op: str, group_name: Group) -> Steps:
    """Reduce over the group into a new tensor."""
    members("all_reduce", me, group_name)
    output = torch.zeros_like(input, memory_format=torch.contiguous_format)
    yield replace(make_start("all_reduce", input, output, group_name, reduce_op=reduce_op), copied=True)
    return output


def all_reduce_(me: int, input: Tensor, reduce_op: str, group_name: Group) -> Steps:
    """Reduce over the group into the operand."""
    members("all_reduce_", me, group_name)
    yield make_start("all_reduce", input, require_writable("all_reduce_", input), group_name, reduce_op=reduce_op)
    return input


def all_gather(me: int, input: Tensor, group_size: int, group_name: Group) -> Steps:
    """Concatenation along dim 0 in group order."""
    n = check_group_size("all_gather_into_tensor", group_size, members("all_gather_into_tensor", me, group_name))
    output = input.new_zeros(gathered_shape(input, n))
    yield make_start("all_gather", rows(input), output, group_name, dim=0)
    return output


def all_gather_out(me: int, input: Tensor, group_size: int, group_name: Group, *, out: Tensor) -> Steps:
    """Concatenation along dim 0 in group order, into `out`."""
    n = check_group_size(
        "all_gather_into_tensor_out", group_size, members("all_gather_into_tensor_out", me, group_name)
    )
    require_shape("all_gather_into_tensor_out", out, gathered_shape(input, n))
    yield make_start("all_gather", rows(input), out, group_name, dim=0)
    return out


def rows(x: Tensor) -> Tensor:
    """c10d gathers scalars as tensors of one element."""
    return x if x.dim() else x.view(1)


def reduce_scatter(me: int, input: Tensor, reduce_op: str, group_size: int, group_name: Group) -> Steps:
    """Reduce over the group, then the chunk along dim 0 at this rank's position."""
    n = check_group_size("reduce_scatter_tensor", group_size, members("reduce_scatter_tensor", me, group_name))
    output = input.new_zeros(divided_shape("reduce_scatter_tensor", input, n))
    yield make_start("reduce_scatter", input, output, group_name, dim=0, reduce_op=reduce_op)
    return output


def reduce_scatter_out(
    me: int,
    input: Tensor,
    reduce_op: str,
    group_size: int,
    group_name: Group,
    *,
    out: Tensor,
) -> Steps:
    """Reduce over the group, then the chunk along dim 0 at this rank's position, into `out`."""
    n = check_group_size("reduce_scatter_tensor_out", group_size, members("reduce_scatter_tensor_out", me, group_name))
    require_shape("reduce_scatter_tensor_out", out, divided_shape("reduce_scatter_tensor_out", input, n))
    yield make_start("reduce_scatter", input, out, group_name, dim=0, reduce_op=reduce_op)
    return out


def all_to_all(
    me: int,
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: Group,
) -> Steps:
    """Dim 0 split by the input sizes, chunk j sent to position j, received chunks concatenated in group order."""
    ranks = members("all_to_all_single", me, group_name)
    splits = tuple(input_split_sizes), tuple(output_split_sizes)
    if len(splits[0]) != len(ranks) or len(splits[1]) != len(ranks) or min(*splits[0], *splits[1]) < 0:
        raise ValueError(
            f"all_to_all_single over {len(ranks)} ranks has splits {list(splits[0])} and {list(splits[1])}"
        )
    if sum(splits[0]) != input.shape[0]:
        raise ValueError(f"all_to_all_single splits {list(splits[0])} do not add up to size {input.shape[0]} of dim 0")
    output = input.new_zeros([sum(splits[1]), *input.shape[1:]])
    yield make_start("all_to_all", input, output, group_name, splits=splits)
    return output


def broadcast(me: int, input: Tensor, src: int, group_name: Group) -> Steps:
    """The tensor of the rank at position `src` of the group."""
    output = torch.zeros_like(input, memory_format=torch.contiguous_format)
    root = root_of("broadcast", me, src, group_name)
    yield replace(make_start("broadcast", input, output, group_name, root=root), copied=True)
    return output


def broadcast_(me: int, input: Tensor, src: int, group_name: Group) -> Steps:
    """The tensor of the rank at position `src` of the group, into the operand."""
    root = root_of("broadcast_", me, src, group_name)
    yield make_start("broadcast", input, require_writable("broadcast_", input), group_name, root=root)
    return input


def root_of(op: str, me: int, position: int, group: Group, way: str = "from") -> int:
    """The rank at a position of the group of a call."""
    ranks = members(op, me, group)
    if not 0 <= position < len(ranks):
        raise ValueError(f"{op} {way} position {position} of a group of {len(ranks)} ranks")
    return ranks[position]


def wait_tensor(me: int, tensor: Tensor) -> Steps:
    """The operand, once everything in flight to its storage has arrived."""
    yield Await(tensor)
    return tensor


def _each(one: Callable[..., Steps]) -> Callable[..., Steps]:
    """The coalesced form: one call of several tensors, which are on their way side by side."""

    def several(me: int, inputs: Iterable[Tensor], *rest: Any) -> Steps:
        outputs = []
        for tensor in inputs:
            outputs.append((yield from one(me, tensor, *rest)))
        return outputs

    return several


# --------------------------------------------------------------------------------------------------------- the dialect


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _fake_in_place(op: str) -> Callable[..., Tensor]:
    """The operand itself, if it can be written into."""
    return lambda x, *_: require_writable(op, x)


def empty_like(x: Tensor, *_: Any) -> Tensor:
    """A contiguous tensor of this shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_gather(x: Tensor, group_size: int, *_: Any) -> Tensor:
    return x.new_empty(gathered_shape(x, group_size))


def _fake_scatter(x: Tensor, reduce_op: str, group_size: int, *_: Any) -> Tensor:
    return x.new_empty(divided_shape("reduce_scatter_tensor", x, group_size))


def _fake_all_to_all(x: Tensor, output_split_sizes: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty([sum(output_split_sizes), *x.shape[1:]])


def _fake_gather_out(x: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    require_shape("all_gather_into_tensor_out", out, gathered_shape(x, group_size))
    return out


def _fake_scatter_out(x: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    require_shape("reduce_scatter_tensor_out", out, divided_shape("reduce_scatter_tensor_out", x, group_size))
    return out


def _fakes(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda inputs, *rest: [one(x, *rest) for x in inputs]


def _op(
    name: str,
    run: Callable[..., Steps],
    fake: Callable[..., Any],
    *,
    phase: Phase = "start",
    schema: str = "",
    copies: bool = False,
) -> Op:
    return Op(
        f"_c10d_functional::{name}", run, collective=True, aliases=bool(schema), fake=fake,
        resources=("comm",) if phase == "start" else (), group="group_name" if phase == "start" else None, phase=phase,
        copies=copies,
        schema=schema,
    )  # fmt: skip


OPS = (
    _op("all_reduce", all_reduce, empty_like, copies=True),
    _op(
        "all_reduce_", all_reduce_, _fake_in_place("all_reduce_"),
        schema="(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
    ),
    _op("all_reduce_coalesced", _each(all_reduce), _fakes(empty_like), copies=True),
    _op(
        "all_reduce_coalesced_", _each(all_reduce_), _fakes(_fake_in_place("all_reduce_coalesced_")),
        schema="(Tensor(a!)[] inputs, str reduce_op, str group_name) -> Tensor(a!)[]",
    ),
    _op("all_gather_into_tensor", all_gather, _fake_gather),
    _op("all_gather_into_tensor_coalesced", _each(all_gather), _fakes(_fake_gather)),
    _op(
        "all_gather_into_tensor_out", all_gather_out, _fake_gather_out,
        schema="(Tensor input, int group_size, str group_name, *, Tensor(a!) out) -> Tensor(a!)",
    ),
    _op("reduce_scatter_tensor", reduce_scatter, _fake_scatter),
    _op("reduce_scatter_tensor_coalesced", _each(reduce_scatter), _fakes(_fake_scatter)),
    _op(
        "reduce_scatter_tensor_out", reduce_scatter_out, _fake_scatter_out,
        schema="(Tensor input, str reduce_op, int group_size, str group_name, *, Tensor(a!) out) -> Tensor(a!)",
    ),
    _op("all_to_all_single", all_to_all, _fake_all_to_all),
    _op("broadcast", broadcast, empty_like, copies=True),
    _op(
        "broadcast_", broadcast_, _fake_in_place("broadcast_"),
        schema="(Tensor(a!) input, int src, str group_name) -> Tensor(a!)",
    ),
    _op("wait_tensor", wait_tensor, _same, phase="wait", schema="(Tensor(a!) tensor) -> Tensor(a!)"),
    _op(
        "wait_tensors", _each(wait_tensor), _fakes(_same), phase="wait",
        schema="(Tensor(a!)[] tensors) -> Tensor(a!)[]",
    ),
    Op(
        "_c10d_functional::_wrap_tensor_autograd", _same, aliases=True, identity=True, fake=_same,
        schema="(Tensor(a) input) -> Tensor(a)",
    ),
)  # fmt: skip

#: What autograd sees of collectives while it records: as those without gradients, which they call.
AUTOGRAD = tuple(
    replace(op, name=op.name.replace("::", "_autograd::"))
    for op in OPS
    if op.name.partition("::")[2] in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
)


def _define_missing() -> None:
    """Define what an older torch does not have yet, with shapes for fake tensors; the tables say what it does."""
    if torch.distributed.is_available():
        # Some ops are defined there, in Python: it can no longer be imported once another has defined one of them.
        importlib.import_module("torch.distributed._functional_collectives")
    library = lasting_library("_c10d_functional")
    for op in registered_dialects()["_c10d_functional"]:
        name = op.name.removeprefix("_c10d_functional::")
        if op.schema and op.fake is not None and not hasattr(torch.ops._c10d_functional, name):
            library.define(name + op.schema)
            library.impl(name, op.fake, "Meta")


register_dialect("_c10d_functional", OPS, load=_define_missing, complete=True)
register_dialect("_c10d_functional_autograd", AUTOGRAD, complete=True)

__all__ = [
    "AUTOGRAD",
    "OPS",
    "divided_shape",
    "empty_like",
    "gathered_shape",
    "make_collective",
    "make_start",
    "members",
    "require_shape",
    "require_writable",
    "root_of",
    "rows",
]
