"""Functions in the exact domain, composed of the few that are hashed: exp, log, sqrt, erf, tanh, …"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tcverify.domains.exact.algebra import Field
from tcverify.domains.exact.ops import dims_of, drop_reduced_dims, mean_of, register_exact, scale_by, sum_over, var_mean

Tensor = torch.Tensor


@register_exact("rsqrt")
def _rsqrt(k: Field, x: Tensor) -> Tensor:
    return k.inverse(k.function("sqrt", k.embed(x)))


@register_exact("expm1")
def _expm1(k: Field, x: Tensor) -> Tensor:
    return k.settle(k.function("exp", x) - 1)


@register_exact("log1p")
def _log1p(k: Field, x: Tensor) -> Tensor:
    return k.function("log", k.settle(x + 1))


@register_exact("erfc")
def _erfc(k: Field, x: Tensor) -> Tensor:
    return k.settle(1 - k.function("erf", x))


@register_exact("sigmoid")
def _sigmoid(k: Field, x: Tensor) -> Tensor:
    return k.inverse(k.settle(1 + k.function("exp", -k.embed(x))))


@register_exact("silu")
def _silu(k: Field, x: Tensor) -> Tensor:
    return k.multiply(x, _sigmoid(k, x))


@register_exact("log_sigmoid_forward")
def _log_sigmoid(k: Field, x: Tensor) -> tuple[Tensor, Tensor]:
    return -k.function("log", k.settle(1 + k.function("exp", -x))), torch.zeros_like(x)


@register_exact("softplus")
def _softplus(k: Field, x: Tensor, beta: Any = 1, threshold: Any = 20) -> Tensor:
    inside = k.function("exp", scale_by(k, x, beta))
    return k.multiply(k.function("log", k.settle(1 + inside)), k.inverse(torch.tensor(float(k.literal(beta)))))


@register_exact("gelu")
def _gelu(k: Field, x: Tensor, approximate: str = "none") -> Tensor:
    half = k.multiply(x, k.literal(0.5))
    if approximate == "none":
        return k.multiply(half, k.settle(1 + k.function("erf", k.multiply(x, k.literal(math.sqrt(0.5))))))
    cubic = k.settle(x + k.multiply(k.power(x, 3), k.literal(0.044715)))
    inside = k.multiply(cubic, k.literal(math.sqrt(2 / math.pi)))
    return k.multiply(half, k.settle(1 + k.function("tanh", inside)))


def _exponentials(k: Field, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    shifted = k.settle(x - k.choose(lambda v: v.amax(dim, keepdim=True), x))
    return shifted, k.function("exp", shifted)


@register_exact("_softmax", "_safe_softmax", "softmax")
def _softmax(k: Field, x: Tensor, dim: int, half_to_float: Any = None, dtype: Any = None) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    masked = (x == -math.inf).all(dim, keepdim=True)
    x = x.masked_fill(masked, 0.0)  # torch says NaN there, or 0; who asks for such rows replaces them
    _, exponentials = _exponentials(k, x, dim)
    return k.multiply(exponentials, k.inverse(sum_over(k, exponentials, [dim], True)))


@register_exact("_log_softmax", "log_softmax")
def _log_softmax(k: Field, x: Tensor, dim: int, half_to_float: Any = None, dtype: Any = None) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    shifted, exponentials = _exponentials(k, x, dim)
    return k.settle(shifted - k.function("log", sum_over(k, exponentials, [dim], True)))


@register_exact("logsumexp")
def _logsumexp(k: Field, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = dims_of(x, dim)
    largest = k.choose(lambda v: v.amax(dims, keepdim=True), x)
    exponentials = k.function("exp", k.settle(x - largest))
    found = k.settle(k.function("log", sum_over(k, exponentials, dims, True)) + largest)
    return found if keepdim else drop_reduced_dims(found, x, dims)


@register_exact("native_layer_norm")
def _native_layer_norm(
    k: Field, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = var_mean(k, x, dims, 0, True)
    scale = _rsqrt(k, k.settle(variance + k.literal(eps)))
    out = k.multiply(k.settle(x - mean), scale)
    out = out if weight is None else k.multiply(out, weight)
    return out if bias is None else k.settle(out + bias), mean, scale


@register_exact("_fused_rms_norm")
def _fused_rms_norm(
    k: Field, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    epsilon = torch.finfo(torch.float64).eps if eps is None else eps
    scale = _rsqrt(k, k.settle(mean_of(k, k.multiply(x, x), dims, True) + k.literal(epsilon)))
    out = k.multiply(x, scale)
    return out if weight is None else k.multiply(out, weight), scale
