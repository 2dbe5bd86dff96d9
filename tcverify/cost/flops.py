"""How many FLOPs ops do, and which of their arguments they read in part: the tables of the time model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class TensorFacts(NamedTuple):
    """What the model sees of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of one call, by the units that do them."""

    matmul: float = 0.0
    vector: float = 0.0


#: Counts the FLOPs of a call from its arguments, in the order of its signature, and its first result.
Counter = Callable[[list[Any], TensorFacts], Work]


def no_work(values: list[Any], result: TensorFacts) -> Work:
    return Work()


def _product(position: int) -> Counter:
    """A matrix product whose first factor is the argument at `position`: its last dim is summed over."""

    def work(values: list[Any], result: TensorFacts) -> Work:
        return Work(matmul=2.0 * math.prod(result.shape) * values[position].shape[-1])

    return work


def _grouped(values: list[Any], result: TensorFacts) -> Work:
    """Products of chunks [M_i, K], given as a list: each row of the result is one of K terms."""
    return Work(matmul=2.0 * math.prod(result.shape) * values[0][0].shape[-1])


def _quantised(bytes_per_element: float) -> Counter:
    """A product of x [M, K], so large an element, by weights: dequantising is a product and a sum per element of the result,
    since kernels scale what they have summed, as far as scales do not vary along K."""

    def work(values: list[Any], result: TensorFacts) -> Work:
        elements = math.prod(result.shape)
        return Work(matmul=2.0 * elements * values[0].shape[-1] / bytes_per_element, vector=2.0 * elements)

    return work


def _attention(values: list[Any], result: TensorFacts) -> Work:
    """query [..., Sq, heads · size], key and value [..., Skv, kv heads, size]: the products with the keys and with the values,
    and a softmax of the logits in between."""
    length, _, head_size = values[1].shape[-3:]
    multiplied = math.prod(values[0].shape) * length
    return Work(matmul=4.0 * multiplied, vector=_SOFTMAX * multiplied / max(head_size, 1))


def _attention_kernel(at: int, products: float) -> Counter:
    """Attention of q [batch, heads, queries, size], the argument at this position, to the keys [batch, key heads, keys, size]
    behind it: so many matrix products of that size, and a softmax of the logits."""

    def work(values: list[Any], result: TensorFacts) -> Work:
        q, k = values[at : at + 2]
        multiplied = math.prod(q.shape) * k.shape[-2]
        return Work(matmul=2.0 * products * multiplied, vector=_SOFTMAX * multiplied / max(q.shape[-1], 1))

    return work


def _gathered_product(values: list[Any], result: TensorFacts) -> Work:
    """A [..., K] gathered, and multiplied by each of several B [K, N]; `result` is A as a whole, or the first product."""
    rows = math.prod(result.shape[:-1])
    return Work(matmul=sum(2.0 * rows * math.prod(factor.shape) for factor in values[1]))


def _scattered_product(values: list[Any], result: TensorFacts) -> Work:
    return Work(matmul=2.0 * math.prod(values[0].shape) * values[1].shape[-1])


def elementwise(flops: float) -> Counter:
    """`flops` per element of the first operand or of the result, whichever has more."""

    def work(values: list[Any], result: TensorFacts) -> Work:
        elements = math.prod(result.shape)
        if values and type(values[0]) is TensorFacts:
            elements = max(elements, math.prod(values[0].shape))
        return Work(vector=flops * elements)

    return work


WORK: dict[str, Counter] = {
    **{
        name: _product(0)
        for name in (
            "aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot", "aten::linear", "python::matmul",
            "tensor_cast::matmul_all_reduce", "tensor_cast::routed_matmul",
        )
    },
    **{name: _product(1) for name in ("aten::addmm", "aten::baddbmm", "aten::addmv")},
    "tensor_cast::attention": _attention,
    "tensor_cast::grouped_matmul": _grouped,
    "symm_mem::fused_all_gather_matmul": _gathered_product,
    "symm_mem::fused_matmul_reduce_scatter": _scattered_product,
    **{
        f"aten::{name}{form}": _attention_kernel(at, products)
        for name in (
            "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        )
        for form, at, products in (("", 0, 2), ("_backward", 1, 5))
    },
    "aten::scaled_dot_product_attention": _attention_kernel(0, 2),
    **{
        f"tensor_cast::{name}{fused}": _quantised(0.5 if name == "mxfp4_linear" else 1)
        for name in ("static_quant_linear", "static_quant_linear_int4", "fp8_linear", "mxfp4_linear")
        for fused in ("", "_all_reduce")
    },
}  # fmt: skip

_SOFTMAX = 5  # per logit: maximum, difference, exponential, sum, quotient

#: Arithmetic per element, an exponential, root or quotient counted as one. What is not here counts one.
FLOPS_PER_ELEMENT: dict[str, float] = {
    "rms_norm": 4, "add_rms_norm": 5, "add_rms_norm2": 5, "layer_norm": 8, "native_layer_norm": 8,
    "modulated_layer_norm": 11, "softmax": _SOFTMAX, "_softmax": _SOFTMAX, "log_softmax": _SOFTMAX,
    "_log_softmax": _SOFTMAX, "silu": 4, "gelu": 8, "swiglu": 5, "sigmoid": 3, "gated_residual_add": 2,
    "addcmul": 2, "var": 4, "clone": 0, "copy": 0, "copy_": 0, "cat": 0, "_to_copy": 0, "contiguous": 0,
    "moe_gating_top_k_softmax": _SOFTMAX + 1, "init_routing_v2": 0, "unpermute_tokens": 0,
}  # fmt: skip

#: Ops that pick rows or elements of an argument, by its position.
SPARSE = {
    "aten::embedding": 0,
    "aten::index_select": 0,
    "aten::gather": 0,
    "aten::index": 0,
}

#: Ops that take no time: they move no data.
INSTANT = frozenset(
    {
        "inductor::resize_storage_bytes_",
        *(f"host_ir::{op}" for op in ("current_stream", "stream", "set_current_stream", "synchronize", "deallocate")),
    }
)


def _copied(values: list[Any]) -> int:
    """What is copied is read and written; the buffer around it is returned, not touched."""
    copied: int = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in values[0])
    return 2 * copied


#: Counts the bytes that an op reads and writes from its arguments, where they are not those of operands and results.
MOVED: dict[str, Callable[[list[Any]], int]] = {"fsdp::all_gather_copy_in": _copied}
