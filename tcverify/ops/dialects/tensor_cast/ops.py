"""The tensor_cast dialect: what each of its ops computes.

Schemas are those of TensorCast, whose own kernels compute shapes only. Activations `x` are [B, S, H], [S, H] or flattened
[T, H]; norms reduce over the last dim; `rank` is the global rank of the caller and `rank_group` the ordered list of global
ranks, equal on all members. Results are contiguous, as TensorCast says, but for those of all_reduce, pipeline_send_recv and the
anchors, which keep the layout of x. Functions are composed of torch primitives so that a number domain can intercept them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tcverify.ops.collective import Collective
from tcverify.ops.op import Request
from tcverify.ops.table import lookup, resolve

Tensor = torch.Tensor
Steps = Generator[Request, Tensor, Tensor]

# ---------------------------------------------------------------------------------------------------- local ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean(x², last dim) + eps) · weight."""
    return (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + eps) * weight).contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x + residual)."""
    return rms_norm(_add_like(x, residual), weight, eps)


def add_rms_norm2(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); both have the shape of x."""
    total = _add_like(x, residual)
    return rms_norm(total, weight, eps), total.contiguous()


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) · rsqrt(variance + eps) · weight + bias over the last dim; the variance divides by H."""
    centred = x - torch.mean(x, dim=-1, keepdim=True)
    out = centred * torch.rsqrt(torch.mean(centred * centred, dim=-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight
    return (out if bias is None else out + bias).contiguous()


def modulated_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, eps: float
) -> Tensor:
    """layer_norm(x) · (1 + scale) + shift."""
    return (layer_norm(x, weight, bias, eps) * (1 + scale) + shift).contiguous()


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return F.silu(x).contiguous()


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU, exact or with approximate="tanh"."""
    return F.gelu(x, approximate=approximate).contiguous()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of equal shapes."""
    if gate.shape != up.shape:
        raise ValueError(f"swiglu needs gate and up of one shape, got {list(gate.shape)} and {list(up.shape)}")
    return (F.silu(gate) * up).contiguous()


def gated_residual_add(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """residual + update · gate, with broadcasting."""
    return (residual + update * gate).contiguous()


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenation of tensors of one dtype."""
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError("tensor_cast::cat needs tensors of one dtype")
    return torch.cat(list(tensors), dim).contiguous()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    block_table: Tensor | None,
    query_start_loc: Tensor | None,
    seq_lens: Tensor | None,
    query_lens: Tensor | None,
) -> Tensor:
    """Scaled dot-product attention in its dense form; MHA, GQA and MQA.

    Args:
        query: [..., Sq, heads · head_size], leading dims are batch.
        key, value: [..., Skv, kv_heads, head_size]; heads is a multiple of kv_heads.
        attention_mask: broadcastable to [..., heads, Sq, Skv]; boolean (True may attend) or added to the logits.
            A row that may attend to nothing gives zeros.
        block_table, query_start_loc, seq_lens, query_lens: of paged and packed batches. How they lie in the cache is not
            modelled: with any of these it is some function of all operands; see `tcverify.ops.uninterpreted`.

    Returns:
        [..., Sq, heads · head_size].
    """
    packing = block_table, query_start_loc, seq_lens, query_lens
    if any(operand is not None for operand in packing):
        return some_function("tensor_cast::attention", query, key, value, attention_mask, *packing)  # type: ignore[no-any-return]
    kv_heads, head_size = key.shape[-2:]
    heads = query.shape[-1] // head_size
    if query.shape[-1] % head_size or heads % kv_heads:
        raise ValueError(
            f"attention cannot split hidden size {query.shape[-1]} over {kv_heads} kv heads of {head_size}"
        )
    q = query.unflatten(-1, (heads, head_size)).transpose(-2, -3)
    k = key.repeat_interleave(heads // kv_heads, dim=-2).transpose(-2, -3)
    v = value.repeat_interleave(heads // kv_heads, dim=-2).transpose(-2, -3)
    logits = q @ k.transpose(-1, -2) / math.sqrt(head_size)
    probabilities: Tensor
    if attention_mask is None:
        probabilities = logits.softmax(-1)
    else:
        boolean = attention_mask.dtype is torch.bool
        logits = logits.masked_fill(~attention_mask, -math.inf) if boolean else logits + attention_mask
        nothing = (logits == -math.inf).all(-1, keepdim=True)
        probabilities = logits.softmax(-1).masked_fill(nothing, 0.0)
    return (probabilities @ v).transpose(-2, -3).flatten(-2).contiguous()


def some_function(name: str, *args: Any, **kwargs: Any) -> Any:
    """What an op of this name gives as an uninterpreted function."""
    from tcverify.ops.uninterpreted import make_uninterpreted  # late: few calls need it

    return make_uninterpreted(resolve(name), name, lookup).require()(*args, **kwargs)


def _add_like(x: Tensor, residual: Tensor) -> Tensor:
    """x + residual in the shape of x. Operands may differ by leading dims of size 1 (a rank-reduced batch of one)."""
    total = x + residual
    if total.numel() != x.numel():
        raise ValueError(
            f"the sum of x {list(x.shape)} and residual {list(residual.shape)} does not have the shape of x"
        )
    return total if total.shape == x.shape else total.reshape(x.shape)


# --------------------------------------------------------------------------------------------- identities and anchors


def fresh(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.clone()


def gated(x: Tensor, stream_id: int, deps: Sequence[Tensor]) -> Tensor:
    if not isinstance(deps, (list, tuple)) or not all(isinstance(token, Tensor) for token in deps):
        raise TypeError(f"deps is {deps!r}, no list of tokens")
    return x.clone()


def token(x: Tensor, stream_id: int) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device)


# ------------------------------------------------------------------------------------------------------ collectives


def _communicator(op: str, me: int, rank: int, rank_group: Sequence[int]) -> tuple[int, ...]:
    group = tuple(rank_group)
    if rank != me:
        raise ValueError(f"{op} on rank {me} says rank={rank}")
    if me not in group:
        raise ValueError(f"{op} on rank {me} names group {list(group)}, to which it does not belong")
    if len(set(group)) != len(group):
        raise ValueError(f"{op} names group {list(group)}, in which a rank stands twice")
    return group


def _dim(op: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op} on dim {dim} of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _in_layout_of(x: Tensor, received: Tensor) -> Tensor:
    """Results of collectives arrive contiguous; the fake kernels of those that keep the shape of x keep its layout too."""
    return received if x.is_contiguous() else torch.empty_like(x).copy_(received)


def all_reduce(me: int, x: Tensor, rank: int, rank_group: Sequence[int]) -> Steps:
    """Sum over the group."""
    group = _communicator("all_reduce", me, rank, rank_group)
    total = yield Request(Collective("all_reduce", group, tuple(x.shape), x.dtype, reduce_op="sum"), x)
    return _in_layout_of(x, total)


def reduce_scatter(me: int, x: Tensor, dim: int, rank: int, rank_group: Sequence[int]) -> Steps:
    """Sum over the group, then the chunk along `dim` at this rank's position in the group."""
    group = _communicator("reduce_scatter", me, rank, rank_group)
    dim = _dim("reduce_scatter", x, dim)
    if x.shape[dim] % len(group):
        raise ValueError(f"reduce_scatter cannot divide size {x.shape[dim]} of dim {dim} by {len(group)} ranks")
    return (yield Request(Collective("reduce_scatter", group, tuple(x.shape), x.dtype, dim, reduce_op="sum"), x))


def all_gather(me: int, x: Tensor, dim: int, rank: int, rank_group: Sequence[int]) -> Steps:
    """Concatenation along `dim` in group order."""
    group = _communicator("all_gather", me, rank, rank_group)
    return (yield Request(Collective("all_gather", group, tuple(x.shape), x.dtype, _dim("all_gather", x, dim)), x))


def all_to_all(
    me: int,
    x: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    rank: int,
    rank_group: Sequence[int],
) -> Steps:
    """Dim 0 split by the input sizes, chunk j sent to position j, received chunks concatenated in group order."""
    group = _communicator("all_to_all", me, rank, rank_group)
    splits = tuple(input_split_sizes), tuple(output_split_sizes)
    if len(splits[0]) != len(group) or len(splits[1]) != len(group):
        raise ValueError(f"all_to_all over {len(group)} ranks has splits {list(splits[0])} and {list(splits[1])}")
    if min(*splits[0], *splits[1]) < 0:
        raise ValueError(f"all_to_all has negative sizes in its splits {list(splits[0])} and {list(splits[1])}")
    if sum(splits[0]) != x.shape[0]:
        raise ValueError(f"all_to_all splits {list(splits[0])} do not add up to size {x.shape[0]} of dim 0")
    return (yield Request(Collective("all_to_all", group, tuple(x.shape), x.dtype, splits=splits), x))


def pipeline_send_recv(
    me: int, x: Tensor, source_rank: int, target_rank: int, source_stage_id: int, target_stage_id: int
) -> Steps:
    """On the target rank, the source's x; elsewhere, and where both ranks are one, x itself."""
    if me not in (source_rank, target_rank) or source_rank == target_rank:
        return x.clone()
    group = (source_rank, target_rank)
    received = yield Request(Collective("send_recv", group, tuple(x.shape), x.dtype, root=source_rank), x)
    return _in_layout_of(x, received) if me == target_rank else x.clone()


def matmul_all_reduce(
    me: int, mat1: Tensor, mat2: Tensor, bias: Tensor | None, rank: int, rank_group: Sequence[int]
) -> Steps:
    """all_reduce(mat1 @ mat2 [+ bias]) in the dtype of mat1; a bias is added on every rank, before the sum."""
    product = mat1 @ mat2
    addend = product if bias is None else (product + bias).to(mat1.dtype)
    return (yield from all_reduce(me, addend, rank, rank_group))
