"""Backwards of functions in the exact domain.

Torch's own decompositions serve for others (norms, losses, embeddings). These would be hashes otherwise, since they are
elementwise, or would not be linear in the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tcverify.domains.exact.algebra import Field
from tcverify.domains.exact.ops import EXACT, register_exact, sum_over

Tensor = torch.Tensor


@register_exact("sigmoid_backward")
def _sigmoid_backward(k: Field, grad: Tensor, out: Tensor) -> Tensor:
    return k.multiply(grad, k.multiply(out, k.settle(1 - out)))


@register_exact("tanh_backward")
def _tanh_backward(k: Field, grad: Tensor, out: Tensor) -> Tensor:
    return k.multiply(grad, k.settle(1 - k.multiply(out, out)))


@register_exact("silu_backward")
def _silu_backward(k: Field, grad: Tensor, x: Tensor) -> Tensor:
    gate = EXACT["sigmoid"](k, x)
    return k.multiply(k.multiply(grad, gate), k.settle(1 + k.multiply(x, k.settle(1 - gate))))


@register_exact("threshold_backward")
def _threshold_backward(k: Field, grad: Tensor, x: Tensor, threshold: Any) -> Tensor:
    return torch.where(EXACT["le"](k, x, threshold), torch.zeros_like(grad), grad)


@register_exact("gelu_backward")
def _gelu_backward(k: Field, grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    half = k.literal(0.5)
    if approximate == "none":
        below = k.multiply(half, k.settle(1 + k.function("erf", k.multiply(x, k.literal(math.sqrt(0.5))))))
        density = k.function("exp", k.multiply(k.multiply(x, x), k.literal(-0.5)))
        slope = k.settle(below + k.multiply(x, k.multiply(density, k.literal(1 / math.sqrt(2 * math.pi)))))
        return k.multiply(grad, slope)
    scale, cube = k.literal(math.sqrt(2 / math.pi)), k.literal(0.044715)
    inside = k.multiply(scale, k.settle(x + k.multiply(cube, k.power(x, 3))))
    bent = k.function("tanh", inside)
    inner = k.multiply(scale, k.settle(1 + k.multiply(k.literal(3 * 0.044715), k.multiply(x, x))))
    steep = k.multiply(k.multiply(half, x), k.multiply(k.settle(1 - k.multiply(bent, bent)), inner))
    return k.multiply(grad, k.settle(k.multiply(half, k.settle(1 + bent)) + steep))


@register_exact("_softmax_backward_data")
def _softmax_backward(k: Field, grad: Tensor, out: Tensor, dim: int, dtype: Any) -> Tensor:
    weighted = k.multiply(grad, out)
    return k.settle(weighted - k.multiply(out, sum_over(k, weighted, [dim], True)))


@register_exact("_log_softmax_backward_data")
def _log_softmax_backward(k: Field, grad: Tensor, out: Tensor, dim: int, dtype: Any) -> Tensor:
    return k.settle(grad - k.multiply(k.function("exp", out), sum_over(k, grad, [dim], True)))


@register_exact("native_dropout_backward")
def _dropout_backward(k: Field, grad: Tensor, mask: Tensor, scale: Any) -> Tensor:
    return k.multiply(k.multiply(grad, k.embed(mask)), k.literal(scale))
