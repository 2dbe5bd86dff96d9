"""Mixture of experts in the tensor_cast dialect: gating, routing, products by expert, and the way back.

    moe_gating_top_k_softmax(x, top_k) -> (weights, indices)
    init_routing_v2(x, topk_indices) -> rows
    grouped_matmul(x[], w[], bias?[]) -> rows
    routed_matmul(x, w, bias?, topk_indices) -> rows
    unpermute_tokens(x, topk_indices) -> [..., k, H]

x of the first two is [B, S, H], [S, H] or flattened [T, H]; `topk_indices` is [B, S, k], [S, k] or [T, k] and names k different
experts per token. Names, order of arguments and shapes are TensorCast's, which only computes shapes; what it leaves open is
fixed here:

- Gating takes the k largest logits, the largest first; of equal ones that of the lower index. Weights are those of the softmax
  over all experts, not divided by their sum. Indices are int64.
- Rows of routed tokens stand by expert, those of one expert in order of the tokens, those of one token in order of its choices.
  `unpermute_tokens` is the inverse of `init_routing_v2`; weighing by the gate and summing over k is left to other ops.
- `grouped_matmul` multiplies chunk i by matrix i and joins the results. How large chunks are stands in the graph, so that it
  cannot follow what the gate says. `routed_matmul`, which TensorCast does not have, can: w is [E, K, N], bias [E, N], and
  each routed row is multiplied by the matrix of the expert that it was routed to, of which any may have no row at all.

Functions are composed of torch primitives so that a number domain can intercept them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor

#: Signatures. All but that of routed_matmul are TensorCast's.
SCHEMAS: dict[str, str] = {
    "moe_gating_top_k_softmax": "(Tensor x, int top_k) -> (Tensor, Tensor)",
    "init_routing_v2": "(Tensor x, Tensor topk_indices) -> Tensor",
    "unpermute_tokens": "(Tensor x, Tensor topk_indices) -> Tensor",
    "grouped_matmul": "(Tensor[] x, Tensor[] w, Tensor?[] bias) -> Tensor",
    "routed_matmul": "(Tensor x, Tensor w, Tensor? bias, Tensor topk_indices) -> Tensor",
}


def moe_gating_top_k_softmax(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token, by its logits x [..., E], and their weights, both [..., top_k]."""
    _check_gate(x, top_k)
    # By the logits: the softmax has their order, but for what rounding makes equal, in every number domain.
    _, order = torch.sort(x, dim=-1, descending=True, stable=True)
    indices = order.narrow(-1, 0, top_k).contiguous()
    return torch.gather(x.softmax(-1), -1, indices).contiguous(), indices


def init_routing_v2(x: Tensor, topk_indices: Tensor) -> Tensor:
    """Each token as often as it has experts, by expert: [T · k, H]."""
    _check_routing(x, topk_indices)
    order = _by_expert(topk_indices)
    tokens = order if order.numel() == 0 else order.div(topk_indices.shape[-1], rounding_mode="floor")
    return x.reshape(-1, x.shape[-1]).index_select(0, tokens)


def unpermute_tokens(x: Tensor, topk_indices: Tensor) -> Tensor:
    """Rows [T · k, H] by token and choice again: [..., k, H]."""
    _check_rows("unpermute_tokens", x, topk_indices)
    back = torch.argsort(_by_expert(topk_indices), stable=True)
    return x.index_select(0, back).reshape(*topk_indices.shape, x.shape[-1])


def grouped_matmul(x: Sequence[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Tensor:
    """Chunks x[i] [M_i, K] by w[i] [K, N] (+ bias[i] [N]), one behind the other, in the dtype of the chunks."""
    _check_groups(x, w, bias)
    products = [_product(a, b, c) for a, b, c in zip(x, w, bias, strict=True)]
    return torch.cat(products).to(x[0].dtype)


def routed_matmul(x: Tensor, w: Tensor, bias: Tensor | None, topk_indices: Tensor) -> Tensor:
    """Routed rows x [T · k, K], each by the matrix of its expert: [T · k, N], in the dtype of x.

    Raises:
        ValueError: shapes do not fit together, or an index names no expert.
    """
    _check_routed(x, w, bias, topk_indices)
    chosen = topk_indices.reshape(-1)
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < w.shape[0]:
        raise ValueError(f"routed_matmul has {w.shape[0]} experts, and indices up to {int(chosen.max())}")
    loads = torch.bincount(chosen, minlength=w.shape[0]).tolist()
    chunks = x.split_with_sizes(loads)
    biases = [None] * w.shape[0] if bias is None else [bias[i] for i in range(w.shape[0])]
    return torch.cat([_product(a, w[i], biases[i]) for i, a in enumerate(chunks)]).to(x.dtype)


#: The local ops, by name.
MEANINGS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (moe_gating_top_k_softmax, init_routing_v2, unpermute_tokens, grouped_matmul, routed_matmul)
}
#: Those that only move values.
MOVES = ("init_routing_v2", "unpermute_tokens")


def _by_expert(topk_indices: Tensor) -> Tensor:
    """Which choice is in which routed row: numbers of choices, token · k + position among the token's."""
    return torch.argsort(topk_indices.reshape(-1), stable=True)


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    product = rows @ matrix
    return product if bias is None else product + bias


# --------------------------------------------------------------------------------------------- shapes, and what is refused


def _fake_gate(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    _check_gate(x, top_k)
    shape = (*x.shape[:-1], top_k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _fake_routing(x: Tensor, topk_indices: Tensor) -> Tensor:
    _check_routing(x, topk_indices)
    return x.new_empty((topk_indices.numel(), x.shape[-1]))


def _fake_unpermute(x: Tensor, topk_indices: Tensor) -> Tensor:
    _check_rows("unpermute_tokens", x, topk_indices)
    return x.new_empty((*topk_indices.shape, x.shape[-1]))


def _fake_grouped(x: Sequence[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Tensor:
    _check_groups(x, w, bias)
    return x[0].new_empty((sum(chunk.shape[0] for chunk in x), w[0].shape[1]))


def _fake_routed(x: Tensor, w: Tensor, bias: Tensor | None, topk_indices: Tensor) -> Tensor:
    _check_routed(x, w, bias, topk_indices)
    return x.new_empty((x.shape[0], w.shape[2]))


FAKES: dict[str, Callable[..., Any]] = {
    "moe_gating_top_k_softmax": _fake_gate,
    "init_routing_v2": _fake_routing,
    "unpermute_tokens": _fake_unpermute,
    "grouped_matmul": _fake_grouped,
    "routed_matmul": _fake_routed,
}


def _check_gate(x: Tensor, top_k: int) -> None:
    if x.dim() < 1 or not 1 <= top_k <= x.shape[-1]:
        raise ValueError(f"moe_gating_top_k_softmax cannot choose {top_k} experts by logits {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"moe_gating_top_k_softmax needs logits of a floating dtype, got {x.dtype}")


def _check_indices(name: str, topk_indices: Tensor) -> None:
    if topk_indices.dim() < 1 or topk_indices.is_floating_point() or topk_indices.dtype is torch.bool:
        raise ValueError(
            f"{name} needs integers [..., k] as indices, got {topk_indices.dtype} {list(topk_indices.shape)}"
        )


def _check_routing(x: Tensor, topk_indices: Tensor) -> None:
    _check_indices("init_routing_v2", topk_indices)
    if x.dim() < 1 or math.prod(x.shape[:-1]) != math.prod(topk_indices.shape[:-1]):
        raise ValueError(f"init_routing_v2 cannot route x {list(x.shape)} by indices {list(topk_indices.shape)}")


def _check_rows(name: str, x: Tensor, topk_indices: Tensor) -> None:
    _check_indices(name, topk_indices)
    if x.dim() != 2 or x.shape[0] != topk_indices.numel():
        raise ValueError(f"{name} needs a row per choice: x {list(x.shape)}, indices {list(topk_indices.shape)}")


def _check_groups(x: Sequence[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> None:
    if not x or not len(x) == len(w) == len(bias):
        raise ValueError(f"grouped_matmul has {len(x)} chunks, {len(w)} matrices and {len(bias)} biases")
    for chunk, matrix, vector in zip(x, w, bias, strict=True):
        fits = chunk.dim() == 2 and matrix.dim() == 2 and chunk.shape[1] == matrix.shape[0]
        if not fits or matrix.shape[1] != w[0].shape[1]:
            raise ValueError(f"grouped_matmul cannot multiply {list(chunk.shape)} by {list(matrix.shape)}")
        if chunk.dtype != x[0].dtype or chunk.dtype != matrix.dtype:
            raise ValueError(f"grouped_matmul needs one dtype, got {x[0].dtype}, {chunk.dtype} and {matrix.dtype}")
        if vector is not None and tuple(vector.shape) != (matrix.shape[1],):
            raise ValueError(f"grouped_matmul needs biases of shape {[matrix.shape[1]]}, got {list(vector.shape)}")


def _check_routed(x: Tensor, w: Tensor, bias: Tensor | None, topk_indices: Tensor) -> None:
    _check_rows("routed_matmul", x, topk_indices)
    if w.dim() != 3 or w.shape[1] != x.shape[1]:
        raise ValueError(f"routed_matmul cannot multiply x {list(x.shape)} by w {list(w.shape)}")
    if x.dtype != w.dtype:
        raise ValueError(f"routed_matmul needs x and w of one dtype, got {x.dtype} and {w.dtype}")
    if bias is not None and tuple(bias.shape) != (w.shape[0], w.shape[2]):
        raise ValueError(f"routed_matmul needs a bias of shape {[w.shape[0], w.shape[2]]}, got {list(bias.shape)}")


__all__ = ["FAKES", "MEANINGS", "MOVES", "SCHEMAS"]
