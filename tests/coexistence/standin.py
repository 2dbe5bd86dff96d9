"""Stands in for the real TensorCast: the same names and signatures, with kernels that compute shapes only.

What its kernels return has the shape, stride and dtype that TensorCast says. Its values are 7 throughout, so that one that
slips in where an op should have computed is seen at once. Nothing here is of tcverify, which can be imported later.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

# Annotations are objects here, not text, and as torch.library reads them: it makes the schemas from them.
Maybe = Optional[Tensor]  # noqa: UP045 - as TensorCast writes it
Ranks = list[int]


def _made(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(tuple(shape), 7, dtype=dtype or like.dtype, device=like.device)


def _plain(x: Tensor) -> Tensor:
    return _made(x, x.shape)


def _like(x: Tensor) -> Tensor:
    return torch.full_like(x, 7)


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return _made(x, shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _plain(x)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _plain(x)


def add_rms_norm2(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _plain(x), _plain(x)


def layer_norm(x: Tensor, weight: Maybe, bias: Maybe, eps: float) -> Tensor:
    return _plain(x)


def modulated_layer_norm(x: Tensor, weight: Maybe, bias: Maybe, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return _plain(x)


def silu(x: Tensor) -> Tensor:
    return _plain(x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return _plain(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _plain(gate)


def gated_residual_add(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(residual.shape, update.shape, gate.shape)
    return _made(residual, shape, torch.promote_types(torch.promote_types(residual.dtype, update.dtype), gate.dtype))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _resized(tensors[0], dim, sum(t.shape[dim] for t in tensors))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Maybe,
    block_table: Maybe,
    query_start_loc: Maybe,
    seq_lens: Maybe,
    query_lens: Maybe,
) -> Tensor:
    return _plain(query)


def all_reduce(x: Tensor, rank: int, rank_group: Ranks) -> Tensor:
    return _like(x)


def reduce_scatter(x: Tensor, dim: int, rank: int, rank_group: Ranks) -> Tensor:
    return _resized(x, dim, x.shape[dim] // len(rank_group))


def all_gather(x: Tensor, dim: int, rank: int, rank_group: Ranks) -> Tensor:
    return _resized(x, dim, x.shape[dim] * len(rank_group))


def all_to_all(x: Tensor, output_split_sizes: Ranks, input_split_sizes: Ranks, rank: int, rank_group: Ranks) -> Tensor:
    return _made(x, (sum(output_split_sizes), *x.shape[1:]))


def pipeline_send_recv(
    x: Tensor, source_rank: int, target_rank: int, source_stage_id: int, target_stage_id: int
) -> Tensor:
    return _like(x)


def matmul_all_reduce(mat1: Tensor, mat2: Tensor, bias: Maybe, rank: int, rank_group: Ranks) -> Tensor:
    return _like(mat1 @ mat2)


def moe_gating_top_k_softmax(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], top_k)
    return _made(x, shape), _made(x, shape, torch.int64)


def init_routing_v2(x: Tensor, topk_indices: Tensor) -> Tensor:
    return _made(x, (topk_indices.numel(), x.shape[-1]))


def unpermute_tokens(x: Tensor, topk_indices: Tensor) -> Tensor:
    return _made(x, (*topk_indices.shape, x.shape[-1]))


def grouped_matmul(x: list[Tensor], w: list[Tensor], bias: list[Maybe]) -> Tensor:
    return _made(x[0], (sum(chunk.shape[0] for chunk in x), w[0].shape[1]))


Dtype = Optional[torch.dtype]  # noqa: UP045


def static_quant_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_offset: Maybe,
    x_scale: Maybe,
    x_offset: Maybe,
    bias: Maybe,
    out_dtype: Dtype,
) -> Tensor:
    return _made(x, (x.shape[0], w.shape[1]), out_dtype)


def static_quant_linear_int4(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_offset: Maybe,
    x_scale: Maybe,
    x_offset: Maybe,
    bias: Maybe,
    out_dtype: Dtype,
) -> Tensor:
    return _made(x, (x.shape[0], w.shape[1]), out_dtype)


def fp8_linear(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Maybe, out_dtype: Dtype) -> Tensor:
    return _made(x, (x.shape[0], w.shape[1]), out_dtype or torch.float16)


def mxfp4_linear(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Maybe, out_dtype: Dtype) -> Tensor:
    return _made(x, (x.shape[0], w.shape[1]), out_dtype or torch.float16)


def static_quant_linear_all_reduce(
    x: Tensor, w: Tensor, w_scale: Tensor, w_offset: Maybe, x_scale: Maybe, x_offset: Maybe, bias: Maybe, out_dtype: Dtype,
    rank: int, rank_group: Ranks,
) -> Tensor:  # fmt: skip
    return _made(x, (x.shape[0], w.shape[1]), out_dtype)


def static_quant_linear_int4_all_reduce(
    x: Tensor, w: Tensor, w_scale: Tensor, w_offset: Maybe, x_scale: Maybe, x_offset: Maybe, bias: Maybe, out_dtype: Dtype,
    rank: int, rank_group: Ranks,
) -> Tensor:  # fmt: skip
    return _made(x, (x.shape[0], w.shape[1]), out_dtype)


def fp8_linear_all_reduce(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Maybe, out_dtype: Dtype, rank: int, rank_group: Ranks
) -> Tensor:
    return _made(x, (x.shape[0], w.shape[1]), out_dtype or torch.float16)


def mxfp4_linear_all_reduce(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Maybe, out_dtype: Dtype, rank: int, rank_group: Ranks
) -> Tensor:
    return _made(x, (x.shape[0], w.shape[1]), out_dtype or torch.float16)


def _internal_mark_region_begin(x: Tensor, id: int) -> Tensor:
    return _like(x)


def _internal_mark_region_end(x: Tensor, id: int) -> Tensor:
    return _like(x)


def _internal_copy_region(x: Tensor, id: int) -> Tensor:
    return _like(x)


def _internal_order_barrier(x: Tensor, dep: Tensor) -> Tensor:
    return _like(x)


def _internal_wait_and_bind(x: Tensor, stream_id: int, deps: list[Tensor]) -> Tensor:
    return _like(x)


def _internal_record(x: Tensor, stream_id: int) -> Tensor:
    return _made(x, (), torch.int64)


def something_new(x: Tensor) -> Tensor:
    """Stands for the ops that tcverify does not know."""
    return _like(x)


OPS: tuple[Callable[..., Any], ...] = (
    rms_norm, add_rms_norm, add_rms_norm2, layer_norm, modulated_layer_norm, silu, gelu, swiglu, gated_residual_add, cat,
    attention, moe_gating_top_k_softmax, init_routing_v2, unpermute_tokens, grouped_matmul, all_reduce, reduce_scatter,
    all_gather, all_to_all, pipeline_send_recv, matmul_all_reduce,
    static_quant_linear, static_quant_linear_int4, fp8_linear, mxfp4_linear, static_quant_linear_all_reduce,
    static_quant_linear_int4_all_reduce, fp8_linear_all_reduce, mxfp4_linear_all_reduce,
    _internal_mark_region_begin, _internal_mark_region_end, _internal_copy_region, _internal_order_barrier,
    _internal_wait_and_bind, _internal_record, something_new,
)  # fmt: skip

#: The ways to register ops: TensorCast's own; a torch Library, as a whole namespace or a part of one, with kernels for all
#: backends, the second with fake kernels beside them; one with kernels for the meta device alone.
STYLES = ("custom_op", "def", "fragment", "meta")

_kept: list[torch.library.Library] = []  # a Library takes its ops along when it goes


def register(style: str = "custom_op", ops: Sequence[Callable[..., Any]] = OPS) -> None:
    """Define the library's ops, in one of `STYLES`."""
    if style == "custom_op":
        for kernel in ops:
            torch.library.custom_op(f"tensor_cast::{kernel.__name__}", kernel, mutates_args=()).register_fake(kernel)
        return
    library = torch.library.Library("tensor_cast", "FRAGMENT" if style == "fragment" else "DEF")
    _kept.append(library)
    for kernel in ops:
        library.define(kernel.__name__ + torch.library.infer_schema(kernel, mutates_args=()))
        library.impl(kernel.__name__, kernel, "Meta" if style == "meta" else "CompositeExplicitAutograd")
        if style == "fragment":
            torch.library.register_fake(f"tensor_cast::{kernel.__name__}", kernel, lib=library)
