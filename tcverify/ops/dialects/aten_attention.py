"""Attention in compiler graphs: one aten op per kernel, most of which only run on a GPU.

All of them mean the same: out = softmax(scale · q kᵀ + bias) v and, for the backward, lse = logsumexp of the logits. The
backward takes its weights from lse, as kernels do, so that it also serves a share of the keys (ring attention). q is [batch,
heads, queries, size], k and v [batch, key heads, keys, size], where the heads are a multiple of the key heads.

Composed of ops that every number domain has. Of what kernels return beside out and lse, sizes are right, and what belongs to
random numbers or to debugging is zero: it goes into the backward and means nothing without dropout. Results have the memory
layout that torch defines for each op. Rows of lse that a kernel adds to fill its blocks are zero.

Sources: aten/src/ATen/native/transformers (attention.cpp, cuda/attention.cu), torch/_meta_registrations.py; Dao et al.,
FlashAttention (2022) for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tcverify.errors import UnsupportedOp

Tensor = torch.Tensor


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Scaled products of queries and keys, −∞ where masked."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    found = torch.matmul(q, _per_head(k, q).transpose(-2, -1)) * factor
    if bias is not None:
        found = torch.where(bias, found, -math.inf) if bias.dtype is torch.bool else found + bias
    if causal:
        queries, keys = found.shape[-2:]
        seen = torch.arange(queries, device=q.device).unsqueeze(1) >= torch.arange(keys, device=q.device)
        found = torch.where(seen, found, -math.inf)
    return found


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, repeated so that every head of the queries has its own."""
    heads, shared = q.shape[1], x.shape[1]
    return x if heads == shared or x.dim() < 4 else x.repeat_interleave(heads // shared, 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and the logsumexp of its logits, [batch, heads, queries]. A row of which all is masked gives 0."""
    logits = _logits(q, k, bias, causal, scale)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    weights = torch.softmax(logits, -1).masked_fill(empty, 0.0)
    return torch.matmul(weights, _per_head(v, q)), torch.logsumexp(logits, -1)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the logits.

    Args:
        out, lse: of the attention to all keys, of which k and v may be a share.
    """
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    weights = torch.exp(_logits(q, k, bias, causal, scale) - lse.unsqueeze(-1))
    inner = torch.matmul(grad, _per_head(v, q).transpose(-2, -1))
    of_logits = weights * (inner - (grad * out).sum(-1, keepdim=True))
    grad_q = torch.matmul(of_logits, _per_head(k, q)) * factor
    grad_k = torch.matmul(of_logits.transpose(-2, -1), q) * factor
    grad_v = torch.matmul(weights.transpose(-2, -1), grad)
    return grad_q, _shared(grad_k, k), _shared(grad_v, v), of_logits


def _shared(grad: Tensor, x: Tensor) -> Tensor:
    """Add up the gradients of heads that share keys and values."""
    if grad.shape[1] == x.shape[1]:
        return grad
    return grad.reshape(grad.shape[0], x.shape[1], -1, *grad.shape[2:]).sum(2)


# ------------------------------------------------------------------------------------------------------- results in place


#: Ops that torch gives no shapes before 2.13, and the operands that their results lie as, which is what it says since.
_LIE_AS = {
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": ("query", "key", "value", "attn_bias"),
}


def describe_results(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `target` returns for these arguments, without values: tensors on the device "meta", and numbers."""
    with _disable_current_modes(), torch.no_grad():
        given, named = pytree.tree_map_only(Tensor, _outline, (tuple(args), kwargs))
        try:
            return target(*given, **named)
        except NotImplementedError:
            operands = _LIE_AS.get(target._schema.name)
            if operands is None:
                raise
            known = _named(target, given, named)
            return tuple(torch.empty_like(known[name]) for name in operands)


def _outline(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _lying_as(outline: Any, value: Any) -> Any:
    """A value in the memory layout of an outline; elements that were not computed are zero."""
    if not isinstance(outline, Tensor):
        return outline
    if value is None:
        return torch.zeros(outline.shape, dtype=outline.dtype)
    extent = 1 + sum((size - 1) * step for size, step in zip(outline.shape, outline.stride(), strict=True))
    made = value.new_zeros(extent if outline.numel() else 0).as_strided(outline.shape, outline.stride())
    if outline.numel():
        while value.dim() < made.dim():  # some kernels give lse a dim more
            value = value.unsqueeze(-1)
        made[tuple(slice(size) for size in value.shape)].copy_(value)
    return made


def _results(target: Any, args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[Any]) -> Any:
    outlines = describe_results(target, args, kwargs)
    if isinstance(outlines, Tensor):
        return _lying_as(outlines, values[0])
    padded = [*values, *[None] * (len(outlines) - len(values))]
    return tuple(map(_lying_as, outlines, padded))


# ------------------------------------------------------------------------------------------------------------------ ops


def _named(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names, with defaults."""
    schema = target._schema.arguments
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**found, **{a.name: value for a, value in zip(schema, args, strict=False)}, **kwargs}


def _checked(name: str, given: dict[str, Any]) -> None:
    dropout = given.get("dropout_p", 0.0)
    if dropout:
        raise UnsupportedOp(name, f"its result is random (dropout_p={dropout})")
    q, k = given["query"], given["key"]
    if "efficient_attention" in name and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{name} is given {q.shape[1]} heads of queries and {k.shape[1]} of keys; its kernel shares none"
        )
    if given.get("is_causal") and q.shape[-2] != k.shape[-2] and not name.endswith(_FROM_TOP_LEFT):
        raise UnsupportedOp(
            name,
            f"kernels disagree on the corner in which the mask of {q.shape[-2]} queries and {k.shape[-2]} keys starts",
        )


#: Ops whose causal mask starts at the first query and the first key, whatever their numbers.
_FROM_TOP_LEFT = ("efficient_attention", "efficient_attention_backward", "::scaled_dot_product_attention", "_math")


def _forward(target: Any, *args: Any, **kwargs: Any) -> Any:
    given = _named(target, args, kwargs)
    _checked(target._schema.name, given)
    bias = given.get("attn_bias") if given.get("attn_bias") is not None else given.get("attn_mask")
    found = attend(
        given["query"], given["key"], given["value"], bias, given.get("is_causal", False), given.get("scale")
    )
    return _results(target, args, kwargs, found)


def _without_lse(target: Any, *args: Any, **kwargs: Any) -> Any:
    """As `_forward`, for the op that users call, which returns the attention alone."""
    given = _named(target, args, kwargs)
    _checked(target._schema.name, given)
    q, k, v = given["query"], given["key"], given["value"]
    out: Tensor = attend(q, k, v, given["attn_mask"], given["is_causal"], given["scale"])[0]
    return out


def _backward(target: Any, *args: Any, **kwargs: Any) -> Any:
    given = _named(target, args, kwargs)
    _checked(target._schema.name, given)
    grad = given["grad_out"] if "grad_out" in given else given["grad_out_"]
    q, k, v, out = (given[name] for name in ("query", "key", "value", "out"))
    bias = given.get("attn_bias") if given.get("attn_bias") is not None else given.get("attn_mask")
    if bias is not None and not bias.numel():
        bias = None  # some backwards say "no bias" by an empty tensor
    lse = given["logsumexp"].reshape(*given["logsumexp"].shape[:3], -1)[..., 0]
    lse = lse[..., : q.shape[-2]]
    found = [*attend_backward(grad, q, k, v, out, lse, bias, given["is_causal"], given["scale"])]
    found[3:] = [] if bias is None else [_like_bias(found[3], bias)]
    return _results(target, args, kwargs, found)


def _like_bias(grad: Tensor, bias: Tensor) -> Tensor:
    """Add up the gradient of the logits where a bias was broadcast."""
    if grad.dim() > bias.dim():
        grad = grad.sum(list(range(grad.dim() - bias.dim())))
    broadcast = [d for d in range(bias.dim()) if bias.shape[d] != grad.shape[d]]
    return grad.sum(broadcast, keepdim=True) if broadcast else grad


def run_in_float32(run: Callable[..., Any], target: Any) -> Callable[..., Any]:
    """`run` in the dtypes of the program: computed in float32 at least, as kernels do, and rounded to what the op returns."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given, named = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        outlines = describe_results(target, args, kwargs)
        return pytree.tree_map(_as_dtype, run(*given, **named), outlines, is_leaf=lambda leaf: leaf is None)

    return call


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def _as_dtype(value: Any, outline: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype == outline.dtype:
        return value
    return value.to(outline.dtype)  # keeps strides


_KERNELS = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)
_USERS = ("scaled_dot_product_attention",)

#: What each op computes, by name without the overload, from the op and its arguments.
ATTENTION: dict[str, Callable[..., Any]] = {
    **{f"_scaled_dot_product_{name}": _forward for name in _KERNELS},
    **{f"_scaled_dot_product_{name}_backward": _backward for name in _KERNELS},
    **dict.fromkeys(_USERS, _without_lse),
}


def has_kernel(name: str) -> bool:
    """Whether a CPU can run the op itself."""
    return name in (*_USERS, *(f"_scaled_dot_product_flash_attention_for_cpu{form}" for form in ("", "_backward")))


def shape_function_of(target: Any) -> Callable[..., Any]:
    """Shapes of an op that no CPU runs."""
    return lambda *args, **kwargs: describe_results(target, args, kwargs)


def _guarded(kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, but for tensors without elements: it divides by their sizes, which ends the process."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return kernel(*args, **kwargs) if all(value.numel() for value in tensors) else otherwise(*args, **kwargs)

    return call


def meaning(name: str, target: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None]:
    """What an attention op computes, what in the dtypes of the program, and its shapes where it is not asked itself."""
    run = partial(ATTENTION[name], target)
    if has_kernel(name):
        return (
            run,
            _guarded(target, run_in_float32(run, target)),
            shape_function_of(target),
        )  # kernels do not look whether operands fit
    return run, run_in_float32(run, target), shape_function_of(target)


__all__ = ["ATTENTION", "attend", "attend_backward", "describe_results", "meaning", "shape_function_of"]
