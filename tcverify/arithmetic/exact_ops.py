"""What aten's ops compute in the exact domain, as compositions of an algebra's primitives.

An op stands in one of five places: `EXACT` composes it; `STRUCTURAL` ops move values; `CHOOSING` and `COMPARING` ones go by
the order of symmetric residues; unknown elementwise ops are hashes; for all others torch's own decomposition is taken, and
where there is none the domain has no meaning for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcverify.arithmetic import field
from tcverify.arithmetic.algebra import Field
from tcverify.errors import UnsupportedOp

Tensor = torch.Tensor
aten = torch.ops.aten

#: Computes an op. The first argument is the algebra.
Meaning = Callable[..., Any]
EXACT: dict[str, Meaning] = {}


def exact(*names: str) -> Callable[[Meaning], Meaning]:
    """Register the meaning of aten ops, by name without the overload."""

    def add(meaning: Meaning) -> Meaning:
        EXACT.update(dict.fromkeys(names, meaning))
        return meaning

    return add


def _scaled(k: Field, x: Any, factor: Any) -> Any:
    return x if type(factor) is int and factor == 1 else k.multiply(x, k.literal(factor))


# ---------------------------------------------------------------------------------------------------------- arithmetic


@exact("add")
def _add(k: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return k.settle(torch.add(k.literal(a), _scaled(k, k.literal(b), alpha)))


@exact("sub")
def _sub(k: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return k.settle(torch.sub(k.literal(a), _scaled(k, k.literal(b), alpha)))


@exact("rsub")
def _rsub(k: Field, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return k.settle(torch.sub(k.literal(b), _scaled(k, k.literal(a), alpha)))


@exact("mul")
def _mul(k: Field, a: Any, b: Any) -> Tensor:
    return k.multiply(k.literal(a), k.literal(b))


@exact("div", "true_divide", "divide")
def _div(k: Field, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    divisor = torch.as_tensor(k.literal(b), dtype=torch.float64)
    quotient = k.multiply(k.literal(a), k.inverse(divisor))
    return quotient if rounding_mode is None else k.function(rounding_mode, quotient)  # "floor" or "trunc"


@exact("reciprocal")
def _reciprocal(k: Field, x: Tensor) -> Tensor:
    return k.inverse(k.embed(x))


@exact("neg")
def _neg(k: Field, x: Tensor) -> Tensor:
    return -x


@exact("square")
def _square(k: Field, x: Tensor) -> Tensor:
    return k.multiply(x, x)


@exact("pow")
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


@exact("addcmul")
def _addcmul(k: Field, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return k.settle(x + _scaled(k, k.multiply(a, b), value))


@exact("addcdiv")
def _addcdiv(k: Field, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return k.settle(x + _scaled(k, k.multiply(a, k.inverse(b)), value))


@exact("lerp")
def _lerp(k: Field, start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return k.settle(start + k.multiply(k.settle(end - start), k.literal(weight)))


# ------------------------------------------------------------------------------------------------------- matrix products


@exact("mm", "bmm", "mv", "dot")
def _matmul(k: Field, a: Tensor, b: Tensor) -> Tensor:
    by_dims = {(2, 2): aten.mm.default, (3, 3): aten.bmm.default, (2, 1): aten.mv.default, (1, 1): aten.dot.default}
    return k.matmul(k.embed(a), k.embed(b), by_dims[a.dim(), b.dim()])


@exact("addmm", "addmv", "baddbmm")
def _addmm(k: Field, x: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return k.settle(_scaled(k, x, beta) + _scaled(k, _matmul(k, a, b), alpha))


@exact("addbmm")
def _addbmm(k: Field, x: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return k.settle(_scaled(k, x, beta) + _scaled(k, k.settle(_matmul(k, a, b).sum(0)), alpha))


@exact("convolution")
def _convolution(k: Field, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    if weight.numel() > weight.shape[0] * field.BLOCK:  # one element of the result adds up so many products
        raise UnsupportedOp("aten::convolution", f"the exact domain adds up at most {field.BLOCK} products in one")
    k.finite("convolution", x, weight)
    found = k.settle(aten.convolution.default(x, weight, None, *rest))
    return found if bias is None else k.settle(found + bias.reshape([-1, *[1] * (found.dim() - 2)]))


# ------------------------------------------------------------------------------------------------------------ reductions


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    return [d % x.dim() if x.dim() else 0 for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: Tensor, dim: Any) -> int:
    return math.prod(x.shape[d] for d in _dims(x, dim)) if x.dim() else 1


def _floating(dtype: torch.dtype | None) -> None:
    """Refuse results that are no floating-point numbers."""
    if dtype is not None and not dtype.is_floating_point:
        raise UnsupportedOp(f"a sum as {dtype}", "the exact domain has no casts from floating to integer values")


@exact("sum")
def _sum(k: Field, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    _floating(dtype)
    return k.settle(torch.sum(k.embed(x), _dims(x, dim), keepdim))


@exact("mean")
def _mean(k: Field, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    return k.multiply(_sum(k, x, dim, keepdim), k.reciprocal(_count(x, dim)))


@exact("cumsum")
def _cumsum(k: Field, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    _floating(dtype)
    return k.settle(torch.cumsum(k.embed(x), dim))


@exact("prod")
def _prod(
    k: Field, x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    _floating(dtype)
    value = k.embed(x)
    return k.product_along(value.reshape(-1), 0, False) if dim is None else k.product_along(value, dim, keepdim)


@exact("cumprod")
def _cumprod(k: Field, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    _floating(dtype)
    found = [piece for piece in k.embed(x).unbind(dim)] if x.dim() else [k.embed(x)]
    for i in range(1, len(found)):
        found[i] = k.multiply(found[i - 1], found[i])
    return torch.stack(found, dim) if x.dim() and found else k.embed(x).clone()


@exact("var")
def _var(k: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    variance: Tensor = _var_mean(k, x, dim, correction, keepdim)[0]
    return variance


@exact("var_mean")
def _var_mean(
    k: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    if isinstance(dim, bool):  # the old overload: var(x, unbiased)
        dim, correction = None, int(dim)
    if isinstance(correction, bool) or correction is None:
        correction = 1 if correction is None else int(correction)
    mean = _mean(k, x, dim, True)
    centred = k.settle(x - mean)
    degrees = _count(x, dim) - correction
    total = _sum(k, k.multiply(centred, centred), dim, keepdim)
    if degrees != int(degrees) or degrees <= 0:
        raise UnsupportedOp("aten::var", f"the exact domain cannot divide by {degrees}")
    return k.multiply(total, k.reciprocal(int(degrees))), mean if keepdim else _without(mean, x, dim)


def _without(mean: Tensor, x: Tensor, dim: Any) -> Tensor:
    """Drop the dims of size 1 that a reduction with keepdim has left."""
    dims = set(_dims(x, dim))
    return mean.reshape([size for d, size in enumerate(mean.shape) if d not in dims])


@exact("std")
def _std(k: Field, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    return k.function("sqrt", _var(k, x, dim, correction, keepdim))


@exact("linalg_vector_norm", "norm")
def _norm(k: Field, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if p is None or p == 2:
        return k.function("sqrt", _sum(k, k.multiply(x, x), dim, keepdim))
    if p == 1:
        total: Tensor = _sum(k, k.choose(torch.abs, x), dim, keepdim)
        return total
    raise UnsupportedOp("aten::linalg_vector_norm", f"the exact domain has no norm of order {p}")


# ------------------------------------------------------------------------------------------- functions made of functions


@exact("rsqrt")
def _rsqrt(k: Field, x: Tensor) -> Tensor:
    return k.inverse(k.function("sqrt", k.embed(x)))


@exact("expm1")
def _expm1(k: Field, x: Tensor) -> Tensor:
    return k.settle(k.function("exp", x) - 1)


@exact("log1p")
def _log1p(k: Field, x: Tensor) -> Tensor:
    return k.function("log", k.settle(x + 1))


@exact("erfc")
def _erfc(k: Field, x: Tensor) -> Tensor:
    return k.settle(1 - k.function("erf", x))


@exact("sigmoid")
def _sigmoid(k: Field, x: Tensor) -> Tensor:
    return k.inverse(k.settle(1 + k.function("exp", -k.embed(x))))


@exact("silu")
def _silu(k: Field, x: Tensor) -> Tensor:
    return k.multiply(x, _sigmoid(k, x))


@exact("log_sigmoid_forward")
def _log_sigmoid(k: Field, x: Tensor) -> tuple[Tensor, Tensor]:
    return -k.function("log", k.settle(1 + k.function("exp", -x))), torch.zeros_like(x)


@exact("softplus")
def _softplus(k: Field, x: Tensor, beta: Any = 1, threshold: Any = 20) -> Tensor:
    inside = k.function("exp", _scaled(k, x, beta))
    return k.multiply(k.function("log", k.settle(1 + inside)), k.inverse(torch.tensor(float(k.literal(beta)))))


@exact("gelu")
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


@exact("_softmax", "_safe_softmax", "softmax")
def _softmax(k: Field, x: Tensor, dim: int, half_to_float: Any = None, dtype: Any = None) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    masked = (x == -math.inf).all(dim, keepdim=True)
    x = x.masked_fill(masked, 0.0)  # torch says NaN there, or 0; who asks for such rows replaces them
    _, exponentials = _exponentials(k, x, dim)
    return k.multiply(exponentials, k.inverse(_sum(k, exponentials, [dim], True)))


@exact("_log_softmax", "log_softmax")
def _log_softmax(k: Field, x: Tensor, dim: int, half_to_float: Any = None, dtype: Any = None) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    shifted, exponentials = _exponentials(k, x, dim)
    return k.settle(shifted - k.function("log", _sum(k, exponentials, [dim], True)))


@exact("logsumexp")
def _logsumexp(k: Field, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    largest = k.choose(lambda v: v.amax(dims, keepdim=True), x)
    exponentials = k.function("exp", k.settle(x - largest))
    found = k.settle(k.function("log", _sum(k, exponentials, dims, True)) + largest)
    return found if keepdim else _without(found, x, dims)


@exact("native_layer_norm")
def _native_layer_norm(
    k: Field, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = _var_mean(k, x, dims, 0, True)
    scale = _rsqrt(k, k.settle(variance + k.literal(eps)))
    out = k.multiply(k.settle(x - mean), scale)
    out = out if weight is None else k.multiply(out, weight)
    return out if bias is None else k.settle(out + bias), mean, scale


@exact("_fused_rms_norm")
def _fused_rms_norm(
    k: Field, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    epsilon = torch.finfo(torch.float64).eps if eps is None else eps
    scale = _rsqrt(k, k.settle(_mean(k, k.multiply(x, x), dims, True) + k.literal(epsilon)))
    out = k.multiply(x, scale)
    return out if weight is None else k.multiply(out, weight), scale


# ------------------------------------------------------------------------------------ sums into places, and constants


@exact("index_add")
def _index_add(k: Field, x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1) -> Tensor:
    return k.settle(torch.index_add(x, dim, index, _scaled(k, source, alpha)))


@exact("scatter_add")
def _scatter_add(k: Field, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return k.settle(torch.scatter_add(x, dim, index, source))


@exact("index_put")
def _index_put(k: Field, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    return k.settle(torch.ops.aten.index_put.default(x, indices, values, accumulate))


@exact("scatter")
def _scatter(k: Field, x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str | None = None) -> Tensor:
    if reduce is not None:
        raise UnsupportedOp("aten::scatter", f"the exact domain has no meaning for reduce={reduce!r}")
    return torch.scatter(x, dim, index, k.literal(source))


@exact("constant_pad_nd")
def _pad(k: Field, x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    padded: Tensor = aten.constant_pad_nd.default(k.embed(x), pad, k.literal(value))
    return padded


@exact("masked_scatter")
def _masked_scatter(k: Field, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return torch.masked_scatter(x, mask, source)


@exact("lift_fresh", "lift_fresh_copy", "lift")
def _lift(k: Field, x: Tensor) -> Tensor:
    return k.constants(x)  # a literal of Python code, or a residue, which stands for itself


@exact("full_like")
def _full_like(k: Field, x: Tensor, value: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return torch.full_like(x, value, dtype=dtype)
    return _fill(k, torch.empty_like(x, dtype=torch.float64), value)


@exact("masked_fill")
def _masked_fill(k: Field, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return x.masked_fill(mask, k.literal(value))


@exact("fill")
def _fill(k: Field, x: Tensor, value: Any) -> Tensor:
    return torch.full_like(x, 0.0).add_(k.literal(value))


@exact("where")
def _where(k: Field, condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, k.literal(a), k.literal(b))


# ---------------------------------------------------------------------------------------------------- order of residues

#: Ops that pick among values by their order, and those that say how values are ordered. They take no literals.
CHOOSING = frozenset(
    {
        "max", "min", "amax", "amin", "maximum", "minimum", "abs", "relu", "sort", "cummax", "cummin", "aminmax", "median",
        "fmax", "fmin",
    }
)  # fmt: skip
COMPARING = frozenset({"sign", "sgn", "argmax", "argmin", "argsort", "signbit"})


def by_order(k: Field, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op of `CHOOSING` or `COMPARING`. Ties of a sort stay in order of their index."""
    if name == "sort":
        return k.choose(lambda x: _sorted(x, args[1:], kwargs), args[0])
    if name == "argsort":
        return k.compare(lambda x: _sorted(x, args[1:], kwargs)[1], args[0])
    if name == "signbit":
        return _EXACT_LT(k, args[0], 0)  # −0 is 0
    values = [k.embed(a) for a in args if isinstance(a, Tensor)]
    rest = args[len(values) :]
    run = k.choose if name in CHOOSING else k.compare
    return run(lambda *tensors: func(*tensors, *rest, **kwargs), *values)


def _sorted(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("dim", "descending"), args, strict=False)) | kwargs
    return torch.sort(x, dim=given.get("dim", -1), descending=given.get("descending", False), stable=True)


def _comparison(name: str) -> Meaning:
    compare = getattr(torch, name)

    def run(k: Field, a: Any, b: Any) -> Tensor:
        sides = [torch.as_tensor(k.literal(side), dtype=torch.float64) for side in (a, b)]
        if name in ("eq", "ne"):
            return compare(*sides)  # type: ignore[no-any-return]
        return k.compare(compare, *sides)  # type: ignore[no-any-return]

    return run


EXACT.update({name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")})
_EXACT_LT = EXACT["lt"]


@exact("clamp")
def _clamp(k: Field, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    given = [bound is not None for bound in (min, max)]
    bounds = [torch.as_tensor(k.literal(b), dtype=torch.float64) for b in (min, max) if b is not None]

    def run(value: Tensor, *bounds: Tensor) -> Tensor:
        left = list(bounds)
        return torch.clamp(value, *[left.pop(0) if there else None for there in given])

    found: Tensor = k.choose(run, k.embed(x), *bounds)
    return found


@exact("clamp_min")
def _clamp_min(k: Field, x: Tensor, min: Any) -> Tensor:
    return _clamp(k, x, min)


@exact("clamp_max")
def _clamp_max(k: Field, x: Tensor, max: Any) -> Tensor:
    return _clamp(k, x, None, max)


@exact("hardtanh")
def _hardtanh(k: Field, x: Tensor, min_val: Any = -1, max_val: Any = 1) -> Tensor:
    return _clamp(k, x, min_val, max_val)


@exact("leaky_relu")
def _leaky_relu(k: Field, x: Tensor, negative_slope: Any = 0.01) -> Tensor:
    return torch.where(EXACT["gt"](k, x, 0), x, k.multiply(x, k.literal(negative_slope)))


@exact("topk")
def _topk(k: Field, x: Tensor, count: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
        return values.narrow(dim, 0, count).contiguous(), indices.narrow(dim, 0, count).contiguous()

    return k.choose(run, x) if x.dim() else (x.clone(), torch.zeros((), dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------ moving of values

#: Ops that move or copy values, or make zeros and ones. Base names, without the `_copy` and in-place forms.
STRUCTURAL = frozenset(
    {
        "_reshape_alias", "_unsafe_view", "alias", "all", "any", "as_strided", "cat", "clone", "detach", "diag_embed",
        "diagonal", "diagonal_scatter", "embedding", "empty_like", "expand", "flip", "gather", "index", "index_select",
        "isfinite", "isinf", "isnan", "logical_and", "logical_not", "logical_or", "logical_xor",
        "new_ones", "new_zeros", "ones_like", "permute", "pixel_shuffle", "repeat", "repeat_interleave", "reshape", "roll",
        "rot90", "select", "select_scatter", "set", "slice", "slice_scatter", "split", "split_with_sizes",
        "squeeze", "stack", "t", "take", "transpose", "tril", "triu", "unbind", "unfold", "unsafe_chunk", "unsafe_split",
        "unsafe_split_with_sizes", "unsqueeze", "view", "zero", "zeros_like",
    }
)  # fmt: skip


def is_structural(name: str) -> bool:
    """Whether an op of this base name moves values only."""
    return name in STRUCTURAL or (name.endswith("_copy") and name.removesuffix("_copy") in STRUCTURAL)
