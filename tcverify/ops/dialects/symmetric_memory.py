"""The `symm_mem` dialect: collectives on symmetric memory, as far as they mean something without a GPU.

Sources: torch/distributed/_symmetric_memory/__init__.py and torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu.
They block, but for the two of low contention, which start. The program has to make sure that operands are in symmetric memory.

Fused ops are what the compiler makes of a product behind an all_gather or before a reduce_scatter; results lie in memory as
torch's own composition of the two lays them. Where a kernel leaves parts of an operand in an unknown state, it is overwritten
with the values of unwritten memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcverify.domains import poison_
from tcverify.ops.collective import Group
from tcverify.ops.dialects.c10d_functional import (
    Steps,
    divided_shape,
    empty_like,
    gathered_shape,
    make_collective,
    make_start,
    members,
    require_shape,
    require_writable,
    root_of,
    rows,
)
from tcverify.ops.op import Op, Request
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor


def _reduced(op: str, me: int, x: Tensor, reduce_op: str, group: Group) -> Steps:
    members(op, me, group)
    if reduce_op != "sum" or not x.is_contiguous():
        raise ValueError(
            f"{op} sums contiguous tensors, and is to reduce by {reduce_op} over stride {list(x.stride())}"
        )
    return (yield Request(make_collective("all_reduce", x, group, reduce_op=reduce_op), x))


def _all_reduce(op: str) -> Callable[..., Steps]:
    def run(me: int, input: Tensor, reduce_op: str, group_name: Group) -> Steps:
        """Sum over the group into a new tensor."""
        return (yield from _reduced(op, me, input, reduce_op, group_name))

    return run


def _all_reduce_out(op: str, *, spoils: bool = False) -> Callable[..., Steps]:
    def run(me: int, input: Tensor, reduce_op: str, group_name: Group, out: Tensor) -> Steps:
        """Sum over the group into `out`."""
        require_shape(op, out, input.shape)
        total = yield from _reduced(op, me, input, reduce_op, group_name)
        if spoils:
            poison_(input)
        return out.copy_(total)

    return run


def _all_reduce_in_place(op: str) -> Callable[..., Steps]:
    def run(me: int, input: Tensor, reduce_op: str, group_name: Group) -> Steps:
        """Sum over the group into the operand."""
        return input.copy_((yield from _reduced(op, me, require_writable(op, input), reduce_op, group_name)))

    return run


def _buffered(op: str, buffer: Tensor, x: Tensor) -> Tensor:
    """The head of the buffer that takes a copy of `x`."""
    if not buffer.is_contiguous() or buffer.numel() < x.numel():
        raise ValueError(f"{op} copies shape {list(x.shape)} into a buffer of shape {list(buffer.shape)}")
    return buffer.view(-1)[: x.numel()].view(x.shape)


def one_shot_all_reduce_copy(
    me: int, symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: Group
) -> Steps:
    """Copy the operand into the buffer, and sum over the group into a new tensor."""
    head = _buffered("one_shot_all_reduce_copy", symm_buffer, local_input).copy_(local_input)
    return (yield from _reduced("one_shot_all_reduce_copy", me, head, reduce_op, group_name))


def one_shot_all_reduce_copy_out(
    me: int, symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: Group, out: Tensor
) -> Steps:
    """Copy the operand into the buffer, and sum over the group into `out`."""
    require_shape("one_shot_all_reduce_copy_out", out, local_input.shape)
    return out.copy_((yield from one_shot_all_reduce_copy(me, symm_buffer, local_input, reduce_op, group_name)))


def multimem_all_gather_out(me: int, input: Tensor, group_name: Group, out: Tensor) -> Steps:
    """Concatenation along dim 0 in group order, into `out`."""
    require_shape(
        "multimem_all_gather_out", out, gathered_shape(input, len(members("multimem_all_gather_out", me, group_name)))
    )
    return out.copy_((yield Request(make_collective("all_gather", rows(input), group_name, dim=0), rows(input))))


def multimem_one_shot_reduce_out(
    me: int, input: Tensor, reduce_op: str, root: int, group_name: Group, out: Tensor
) -> Steps:
    """Sum over the group into `out` of the rank at position `root`; that of others keeps what it holds."""
    rank = root_of("multimem_one_shot_reduce_out", me, root, group_name, "to")
    require_shape("multimem_one_shot_reduce_out", out, input.shape)
    if reduce_op != "sum":
        raise ValueError(f"multimem_one_shot_reduce_out sums, and is to reduce by {reduce_op}")
    total = yield Request(make_collective("reduce", input, group_name, reduce_op="sum", root=rank), input)
    return out.copy_(total) if me == rank else out


def reduce_scatter_out(me: int, input: Tensor, group_name: Group, split_last_dim: bool, output: Tensor) -> Steps:
    """Sum over the group, then the chunk at this rank's position along dim 0, or the last, into `output`."""
    n, dim = len(members("reduce_scatter_out", me, group_name)), input.dim() - 1 if split_last_dim else 0
    require_shape("reduce_scatter_out", output, _scattered(input, dim, n))
    part = yield Request(make_collective("reduce_scatter", input, group_name, dim=dim, reduce_op="sum"), input)
    poison_(input)
    return output.copy_(part)


def _scattered(x: Tensor, dim: int, parts: int) -> list[int]:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of shape {list(x.shape)} cannot be divided by {parts} ranks")
    shape = list(x.shape)
    shape[dim] //= parts
    return shape


def low_contention_all_gather(me: int, tensor: Tensor, group_name: Group) -> Steps:
    """Concatenation along dim 0 in group order; starts."""
    output = tensor.new_zeros(gathered_shape(tensor, len(members("_low_contention_all_gather", me, group_name))))
    yield make_start("all_gather", rows(tensor), output, group_name, dim=0)
    return output


def low_contention_all_gather_multicast(me: int, tensor: Tensor, group_name: Group) -> Steps:
    """Concatenation along dim 0 in group order."""
    members("_low_contention_all_gather_ce_multicast", me, group_name)
    return (yield Request(make_collective("all_gather", rows(tensor), group_name, dim=0), rows(tensor)))


def low_contention_all_gather_multicast_out(me: int, tensor: Tensor, group_name: Group, out: Tensor) -> Steps:
    """Concatenation along dim 0 in group order, into `out`."""
    op = "_low_contention_all_gather_ce_multicast_out"
    require_shape(op, out, gathered_shape(tensor, len(members(op, me, group_name))))
    return out.copy_((yield Request(make_collective("all_gather", rows(tensor), group_name, dim=0), rows(tensor))))


def low_contention_reduce_scatter(me: int, tensor: Tensor, reduce_op: str, group_name: Group) -> Steps:
    """Sum or mean over the group, then the chunk along dim 0 at this rank's position; starts."""
    op = "_low_contention_reduce_scatter"
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"{op} sums or averages, and is to reduce by {reduce_op}")
    output = tensor.new_zeros(divided_shape(op, tensor, len(members(op, me, group_name))))
    yield make_start("reduce_scatter", tensor, output, group_name, dim=0, reduce_op=reduce_op)
    return output


def fused_all_gather_matmul(
    me: int, A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: Group, *, return_A: bool = True
) -> Steps:
    """Gather A along `gather_dim` and multiply it by each of the Bs. Returns (A or None, products)."""
    members("fused_all_gather_matmul", me, group_name)
    dim = _gather_dim(A, gather_dim)
    shard = A.contiguous()
    whole: Tensor = yield Request(make_collective("all_gather", shard, group_name, dim=dim), shard)
    return _multiplied(whole, Bs, dim, return_A)


def _gather_dim(x: Tensor, dim: int) -> int:
    if dim == -1:
        return x.dim() - 1
    if not 0 <= dim < x.dim():
        raise ValueError(f"fused_all_gather_matmul gathers along dim {dim} of shape {list(x.shape)}")
    return dim


def _multiplied(whole: Tensor, factors: Sequence[Tensor], dim: int, kept: bool) -> tuple[Tensor | None, list[Tensor]]:
    if dim == whole.dim() - 1:
        return whole if kept else None, [whole @ factor for factor in factors]
    first = whole.movedim(dim, 0).contiguous()  # the order in memory that the gather leaves
    return first.movedim(0, dim) if kept else None, [(first @ factor).movedim(0, dim) for factor in factors]


def fused_matmul_reduce_scatter(
    me: int, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: Group
) -> Steps:
    """Multiply, reduce over the group, then the chunk along `scatter_dim` at this rank's position."""
    n, product = len(members("fused_matmul_reduce_scatter", me, group_name)), A @ B
    _scattered(product, scatter_dim, n)
    dim = scatter_dim % product.dim()
    return (
        yield Request(make_collective("reduce_scatter", product, group_name, dim=dim, reduce_op=reduce_op), product)
    )


# --------------------------------------------------------------------------------------------------------- the dialect


def _fake_out(op: str) -> Callable[..., Tensor]:
    def fake(input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
        require_shape(op, out, input.shape)
        return out

    return fake


def _fake_in_place(op: str) -> Callable[..., Tensor]:
    return lambda x, *_: require_writable(op, x)


def _fake_copy(symm_buffer: Tensor, local_input: Tensor, *_: Any) -> Tensor:
    _buffered("one_shot_all_reduce_copy", symm_buffer, local_input)
    return empty_like(local_input)


def _fake_copy_out(symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
    require_shape("one_shot_all_reduce_copy_out", out, local_input.shape)
    return out


def _fake_gather_out(input: Tensor, group: Group, out: Tensor) -> Tensor:
    require_shape("multimem_all_gather_out", out, gathered_shape(input, len(group.ranks)))
    return out


def _fake_multicast_out(tensor: Tensor, group: Group, out: Tensor) -> Tensor:
    require_shape("_low_contention_all_gather_ce_multicast_out", out, gathered_shape(tensor, len(group.ranks)))
    return out


def _fake_reduce_out(input: Tensor, reduce_op: str, root: int, group_name: str, out: Tensor) -> Tensor:
    require_shape("multimem_one_shot_reduce_out", out, input.shape)
    return out


def _fake_scatter_out(input: Tensor, group: Group, split_last_dim: bool, output: Tensor) -> Tensor:
    require_shape(
        "reduce_scatter_out", output, _scattered(input, input.dim() - 1 if split_last_dim else 0, len(group.ranks))
    )
    return output


def _fake_gather(tensor: Tensor, group: Group) -> Tensor:
    return tensor.new_empty(gathered_shape(tensor, len(group.ranks)))


def _fake_scatter(tensor: Tensor, reduce_op: str, group: Group) -> Tensor:
    return tensor.new_empty(divided_shape("_low_contention_reduce_scatter", tensor, len(group.ranks)))


def _fake_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group: Group, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    dim = _gather_dim(A, gather_dim)
    shape = list(A.shape)
    shape[dim] *= len(group.ranks)
    return _multiplied(A.new_empty(shape), Bs, dim, return_A)


def _fake_matmul_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group: Group) -> Tensor:
    product = A @ B
    return product.new_empty(_scattered(product, scatter_dim, len(group.ranks)))


def _op(name: str, run: Callable[..., Steps], fake: Callable[..., Any], *, schema: str = "", **more: Any) -> Op:
    given: dict[str, Any] = {"resources": ("comm",), "group": "group_name", **more}
    return Op(f"symm_mem::{name}", run, collective=True, aliases=bool(schema), fake=fake, schema=schema, **given)


_OUT = "(Tensor input, str reduce_op, str group_name, Tensor(a!) out) -> Tensor(a!)"
_IN_PLACE = "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)"

_MEANT = (
    _op("one_shot_all_reduce", _all_reduce("one_shot_all_reduce"), empty_like),
    _op(
        "one_shot_all_reduce_out", _all_reduce_out("one_shot_all_reduce_out"), _fake_out("one_shot_all_reduce_out"),
        schema=_OUT,
    ),
    _op(
        "one_shot_all_reduce_copy", one_shot_all_reduce_copy, _fake_copy,
        schema="(Tensor(a!) symm_buffer, Tensor local_input, str reduce_op, str group_name) -> Tensor",
    ),
    _op(
        "one_shot_all_reduce_copy_out", one_shot_all_reduce_copy_out, _fake_copy_out,
        schema=(
            "(Tensor(a!) symm_buffer, Tensor local_input, str reduce_op, str group_name, Tensor(b!) out) -> Tensor(b!)"
        ),
    ),
    _op(
        "two_shot_all_reduce_", _all_reduce_in_place("two_shot_all_reduce_"), _fake_in_place("two_shot_all_reduce_"),
        schema=_IN_PLACE,
    ),
    _op(
        "two_shot_all_reduce_out", _all_reduce_out("two_shot_all_reduce_out", spoils=True),
        _fake_out("two_shot_all_reduce_out"),
        schema="(Tensor(a!) input, str reduce_op, str group_name, Tensor(b!) output) -> Tensor(b!)",
    ),
    _op(
        "multimem_all_reduce_", _all_reduce_in_place("multimem_all_reduce_"), _fake_in_place("multimem_all_reduce_"),
        schema=_IN_PLACE,
    ),
    _op("multimem_one_shot_all_reduce", _all_reduce("multimem_one_shot_all_reduce"), empty_like),
    _op(
        "multimem_one_shot_all_reduce_out", _all_reduce_out("multimem_one_shot_all_reduce_out"),
        _fake_out("multimem_one_shot_all_reduce_out"), schema=_OUT,
    ),
    _op(
        "multimem_one_shot_reduce_out", multimem_one_shot_reduce_out, _fake_reduce_out,
        schema="(Tensor input, str reduce_op, int root, str group_name, Tensor(a!) out) -> Tensor(a!)",
    ),
    _op(
        "multimem_all_gather_out", multimem_all_gather_out, _fake_gather_out, sized=True,
        schema="(Tensor input, str group_name, Tensor(a!) out) -> Tensor(a!)",
    ),
    _op(
        "reduce_scatter_out", reduce_scatter_out, _fake_scatter_out, sized=True,
        schema="(Tensor(a!) input, str group_name, bool split_last_dim, Tensor(b!) output) -> Tensor(b!)",
    ),
    _op("_low_contention_all_gather", low_contention_all_gather, _fake_gather, sized=True, phase="start"),
    _op("_low_contention_reduce_scatter", low_contention_reduce_scatter, _fake_scatter, sized=True, phase="start"),
    _op(
        "_low_contention_all_gather_ce_multicast", low_contention_all_gather_multicast, _fake_gather, sized=True,
    ),
    _op(
        "_low_contention_all_gather_ce_multicast_out", low_contention_all_gather_multicast_out, _fake_multicast_out,
        sized=True, schema="(Tensor tensor, str group_name, Tensor(a!) out) -> Tensor(a!)",
    ),
    _op(
        "fused_all_gather_matmul", fused_all_gather_matmul, _fake_gather_matmul, sized=True, resources=("compute", "comm"),
    ),
    _op(
        "fused_matmul_reduce_scatter", fused_matmul_reduce_scatter, _fake_matmul_scatter, sized=True,
        resources=("compute", "comm"),
    ),
)  # fmt: skip

_SCALED = "it multiplies in fp8 with scales, which number domains do not carry"
_HANDLE = "it works on a handle of symmetric memory, an object of the process that made it"
_REMOTE = "it reads or writes the memory of other ranks at addresses that only a GPU has"
_SIGNAL = "it relies on the order of signals between kernels, which only a GPU has"
_COUNTED = "the numbers of rows are in tensors on the device: its shape depends on data"
_TILES = "it reduces tiles of tensors in symmetric memory in place; no compiler pass emits it"

_DIVIDED = "it exchanges parts along two dims between tensors in symmetric memory; no compiler pass emits it"

#: Why the other ops have no meaning here.
REASONS = {
    "fused_all_gather_scaled_matmul": _SCALED, "fused_scaled_matmul_reduce_scatter": _SCALED,
    "_rendezvous": _HANDLE, "_barrier": _HANDLE, "get_remote_tensors": _REMOTE,
    "nccl_put": _REMOTE, "nccl_get": _REMOTE, "nccl_put_signal": _SIGNAL, "nccl_wait_signal": _SIGNAL,
    "nccl_put_with_signal": _SIGNAL, "nccl_wait_for_signal": _SIGNAL, "nccl_reduce_scatter_offset": _TILES,
    "nccl_get_out": _REMOTE, "nvshmem_get_out": _REMOTE, "memcpy_to_multicast_": _REMOTE, "nccl_all_to_all_nd": _DIVIDED,
    "nvshmem_put": _REMOTE, "nvshmem_get": _REMOTE, "nvshmem_broadcast": _REMOTE, "nvshmem_all_to_all": _REMOTE,
    "nvshmem_put_with_signal": _SIGNAL, "nvshmem_wait_for_signal": _SIGNAL,
    "memset32_": _SIGNAL, "stream_write_value32_": _SIGNAL, "_async_input_mm": _SIGNAL,
    "all_to_all_vdev": _COUNTED, "all_to_all_vdev_2d": _COUNTED, "all_to_all_vdev_2d_offset": _COUNTED,
    "tile_reduce": _TILES, "multi_root_tile_reduce": _TILES,
}  # fmt: skip

OPS = (*_MEANT, *(Op(f"symm_mem::{name}", None, reason=reason) for name, reason in REASONS.items()))


def _load() -> None:
    import torch.distributed._symmetric_memory  # noqa: F401 - defines the ops


register_dialect("symm_mem", OPS, load=_load, complete=True)

__all__ = ["OPS", "REASONS"]
