"""Definitions of aten's ops in the exact domain, as compositions of an algebra's primitives.

An op stands in one of five places: `EXACT` composes it; `STRUCTURAL` ops move values; `CHOOSING` and `COMPARING` ones go by
the order of symmetric residues; unknown elementwise ops are hashes; for all others torch's own decomposition is taken, and
where there is none the domain has no meaning for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tcverify.domains.exact import field
from tcverify.domains.exact.algebra import Field
from tcverify.errors import UnsupportedOp

Tensor = torch.Tensor
aten = torch.ops.aten

#: Computes an op. The first argument is the algebra.
Meaning = Callable[..., Any]
EXACT: dict[str, Meaning] = {}


def register_exact(*names: str) -> Callable[[Meaning], Meaning]:
    """Register the meaning of aten ops, by name without the overload."""

    def add(meaning: Meaning) -> Meaning:
        EXACT.update(dict.fromkeys(names, meaning))
        return meaning

    return add


def scale_by(k: Field, x: Any, factor: Any) -> Any:
    return x if type(factor) is int and factor == 1 else k.multiply(x, k.literal(factor))


# ---------------------------------------------------------------------------------------------------------- arithmetic


@register_exact("add")
def _add(k: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return k.settle(torch.add(k.literal(a), scale_by(k, k.literal(b), alpha)))


@register_exact("sub")
def _sub(k: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return k.settle(torch.sub(k.literal(a), scale_by(k, k.literal(b), alpha)))


@register_exact("rsub")
def _rsub(k: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return k.settle(torch.sub(k.literal(b), scale_by(k, k.literal(a), alpha)))


@register_exact("mul")
def _mul(k: Field, a: Any, b: Any) -> Tensor:
    return k.multiply(k.literal(a), k.literal(b))


@register_exact("div", "true_divide", "divide")
def _div(k: Field, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    divisor = torch.as_tensor(k.literal(b), dtype=torch.float64)
    quotient = k.multiply(k.literal(a), k.inverse(divisor))
    return quotient if rounding_mode is None else k.function(rounding_mode, quotient)  # "floor" or "trunc"


@register_exact("reciprocal")
def _reciprocal(k: Field, x: Tensor) -> Tensor:
    return k.inverse(k.embed(x))


@register_exact("neg")
def _neg(k: Field, x: Tensor) -> Tensor:
    return -x


@register_exact("square")
def _square(k: Field, x: Tensor) -> Tensor:
    return k.multiply(x, x)


@register_exact("pow")
def _pow(k: Field, base: Any, exponent: Any) -> Tensor:
    if not isinstance(exponent, torch.Tensor):
        if float(exponent).is_integer() and abs(exponent) < 1 << 20:
            return k.power(k.literal(base), int(exponent))
        if float(2 * exponent).is_integer() and abs(exponent) < 1 << 20:
            return k.power(k.function("sqrt", k.literal(base)), int(2 * exponent))
        return k.function(f"pow {float(exponent)!r}", k.literal(base), lambda: torch.pow(base, exponent))
    if not isinstance(base, torch.Tensor):
        name = {2: "exp2", math.e: "exp"}.get(base, f"{float(base)!r} to the power")
        return k.function(name, k.embed(exponent), lambda: torch.pow(base, exponent))
    raise UnsupportedOp("aten::pow", "the exact domain has no power of two tensors")


@register_exact("addcmul")
def _addcmul(k: Field, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return k.settle(x + scale_by(k, k.multiply(a, b), value))


@register_exact("addcdiv")
def _addcdiv(k: Field, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return k.settle(x + scale_by(k, k.multiply(a, k.inverse(b)), value))


@register_exact("lerp")
def _lerp(k: Field, start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return k.settle(start + k.multiply(k.settle(end - start), k.literal(weight)))


# ------------------------------------------------------------------------------------------------------- matrix products


@register_exact("mm", "bmm", "mv", "dot")
def _matmul(k: Field, a: Tensor, b: Tensor) -> Tensor:
    by_dims = {(2, 2): aten.mm.default, (3, 3): aten.bmm.default, (2, 1): aten.mv.default, (1, 1): aten.dot.default}
    return k.matmul(k.embed(a), k.embed(b), by_dims[a.dim(), b.dim()])


@register_exact("addmm", "addmv", "baddbmm")
def _addmm(k: Field, x: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return k.settle(scale_by(k, x, beta) + scale_by(k, _matmul(k, a, b), alpha))


@register_exact("addbmm")
def _addbmm(k: Field, x: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return k.settle(scale_by(k, x, beta) + scale_by(k, k.settle(_matmul(k, a, b).sum(0)), alpha))


@register_exact("convolution")
def _convolution(k: Field, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    if weight.numel() > weight.shape[0] * field.BLOCK:  # one element of the result is a sum of this many products
        raise UnsupportedOp("aten::convolution", f"the exact domain adds up at most {field.BLOCK} products in one")
    k.finite("convolution", x, weight)
    found = k.settle(aten.convolution.default(x, weight, None, *rest))
    return found if bias is None else k.settle(found + bias.reshape([-1, *[1] * (found.dim() - 2)]))


# ------------------------------------------------------------------------------------------------------------ reductions


def dims_of(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    return [d % x.dim() if x.dim() else 0 for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: Tensor, dim: Any) -> int:
    return math.prod(x.shape[d] for d in dims_of(x, dim)) if x.dim() else 1


def _floating(dtype: torch.dtype | None) -> None:
    """Refuse results that are not floating-point numbers."""
    if dtype is not None and not dtype.is_floating_point:
        raise UnsupportedOp(f"a sum as {dtype}", "the exact domain has no casts from floating to integer values")


@register_exact("sum")
def sum_over(k: Field, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    _floating(dtype)
    return k.settle(torch.sum(k.embed(x), dims_of(x, dim), keepdim))


@register_exact("mean")
def mean_of(k: Field, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    return k.multiply(sum_over(k, x, dim, keepdim), k.reciprocal(_count(x, dim)))


@register_exact("cumsum")
def _cumsum(k: Field, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    _floating(dtype)
    return k.settle(torch.cumsum(k.embed(x), dim))


@register_exact("prod")
def _prod(
    k: Field, x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    _floating(dtype)
    value = k.embed(x)
    return k.product_along(value.reshape(-1), 0, False) if dim is None else k.product_along(value, dim, keepdim)


@register_exact("cumprod")
def _cumprod(k: Field, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    _floating(dtype)
    found = [piece for piece in k.embed(x).unbind(dim)] if x.dim() else [k.embed(x)]
    for i in range(1, len(found)):
        found[i] = k.multiply(found[i - 1], found[i])
    return torch.stack(found, dim) if x.dim() and found else k.embed(x).clone()


@register_exact("var")
def _var(k: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    variance: Tensor = var_mean(k, x, dim, correction, keepdim)[0]
    return variance


@register_exact("var_mean")
def var_mean(
    k: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    if isinstance(dim, bool):  # the old overload: var(x, unbiased)
        dim, correction = None, int(dim)
    if isinstance(correction, bool) or correction is None:
        correction = 1 if correction is None else int(correction)
    mean = mean_of(k, x, dim, True)
    centred = k.settle(x - mean)
    degrees = _count(x, dim) - correction
    total = sum_over(k, k.multiply(centred, centred), dim, keepdim)
    if degrees != int(degrees) or degrees <= 0:
        raise UnsupportedOp("aten::var", f"the exact domain cannot divide by {degrees}")
    return k.multiply(total, k.reciprocal(int(degrees))), mean if keepdim else drop_reduced_dims(mean, x, dim)


def drop_reduced_dims(mean: Tensor, x: Tensor, dim: Any) -> Tensor:
    """Drop the dims of size 1 that a reduction with keepdim has left."""
    dims = set(dims_of(x, dim))
    return mean.reshape([size for d, size in enumerate(mean.shape) if d not in dims])


@register_exact("std")
def _std(k: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    return k.function("sqrt", _var(k, x, dim, correction, keepdim))


@register_exact("linalg_vector_norm", "norm")
def _norm(k: Field, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if p is None or p == 2:
        return k.function("sqrt", sum_over(k, k.multiply(x, x), dim, keepdim))
    if p == 1:
        total: Tensor = sum_over(k, k.choose(torch.abs, x), dim, keepdim)
        return total
    raise UnsupportedOp("aten::linalg_vector_norm", f"the exact domain has no norm of order {p}")
