"""Ops on whole tensors for DTensor programs, by family: each decodes bytes totally into a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tcverify.strategies.draft import DraftValue
from tcverify.strategies.dtensor.indexing import indexing
from tcverify.strategies.dtensor.layers import layers, products
from tcverify.strategies.dtensor.writing import SIZES, DTensorWriter, dim_of, dims_of, to_floating

_SCALARS = (2.0, -1.5, 0.5, 10.0, 0.0, -1.0, 3.0)

UNARY = (
    "abs", "neg", "relu", "sigmoid", "tanh", "sin", "cos", "exp", "sign", "floor", "ceil", "round", "trunc", "erf", "gelu",
    "silu",
    "logical_not", "isnan", "signbit", "square", "hardtanh", "elu", "softplus", "leaky_relu", "positive", "sgn", "atan",
    "expm1",
    "isfinite", "zeros_like", "ones_like", "clone", "alias", "detach", "nan_to_num", "hardsigmoid", "mish", "frac", "deg2rad",
    "hardswish", "logit", "isneginf", "contiguous", "angle", "zero",
)  # fmt: skip

WITH_SCALAR = (
    "add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "rsub.Scalar", "pow.Tensor_Scalar", "clamp_min", "clamp_max",
    "fmod.Scalar",
    "remainder.Scalar", "eq.Scalar", "ne.Scalar", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar", "full_like",
    "fill.Scalar",
    "floor_divide.Scalar", "hardshrink", "softshrink", "celu", "pow.Scalar", "div.Scalar_mode", "xlogy.Scalar_Other",
    "threshold",
)  # fmt: skip

BINARY = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "eq.Tensor", "ne.Tensor", "lt.Tensor",
    "ge.Tensor",
    "logical_and", "logical_or", "logical_xor", "atan2", "remainder.Tensor", "floor_divide", "fmax", "fmin", "hypot",
    "copysign.Tensor",
    "add.alpha", "rsub.Tensor", "heaviside", "mse_loss", "div.Tensor_mode", "copy", "sub.alpha", "le.Tensor", "gt.Tensor",
    "fmod.Tensor",
    "clamp_min.Tensor", "clamp_max.Tensor", "true_divide.Tensor", "dist", "l1_loss", "smooth_l1_loss", "huber_loss",
)  # fmt: skip

TERNARY = (
    "where",
    "lerp.Tensor",
    "addcmul",
    "addcdiv",
    "lerp.Scalar",
    "clamp.Tensor",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
)

#: Reductions over dims, with and without keeping them.
OVER_DIMS = (
    "sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp", "var.correction", "std.correction", "linalg_vector_norm",
    "norm.ScalarOpt_dim",
    "nansum", "any.dims", "all.dims", "var_mean.correction", "count_nonzero.dim_IntList",
)  # fmt: skip
OVER_DIM = (
    "max.dim", "min.dim", "argmax", "argmin", "prod.dim_int", "any.dim", "all.dim", "median.dim", "mode", "kthvalue",
)  # fmt: skip
OVER_ALL = (
    "sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin", "linalg_vector_norm", "norm.Scalar", "var", "std",
    "count_nonzero", "median", "aminmax",
)  # fmt: skip
#: Ops along a dim: whether they are of floating point, and their arguments, of the dim and a byte.
ALONG: dict[str, tuple[bool, Callable[[int, int], tuple[Any, ...]]]] = {
    "softmax.int": (False, lambda dim, c: (dim,)),
    "log_softmax.int": (False, lambda dim, c: (dim,)),
    "_softmax": (True, lambda dim, c: (dim, False)),
    "_log_softmax": (True, lambda dim, c: (dim, False)),
    "cumsum": (False, lambda dim, c: (dim,)),
    "cumprod": (False, lambda dim, c: (dim,)),
    "logcumsumexp": (False, lambda dim, c: (dim,)),
    "cummax": (False, lambda dim, c: (dim,)),
    "cummin": (False, lambda dim, c: (dim,)),
    "sort": (False, lambda dim, c: (dim, bool(c % 2))),
    "topk": (False, lambda dim, c: (1 + c // 2 % 3, dim, bool(c % 2), True)),
    "flip": (False, lambda dim, c: ([dim],)),
    "argsort": (False, lambda dim, c: (dim,)),
    "renorm": (True, lambda dim, c: (2.0, dim, 0.5)),
    "msort": (False, lambda dim, c: ()),
}
VIEWS = (
    "merge", "divide", "flatten", "unsqueeze", "squeeze.dim", "squeeze", "permute", "transpose.int", "expand", "select.int",
    "slice.Tensor",
    "split.Tensor", "unbind.int", "repeat", "roll", "narrow", "t", "diagonal", "unfold", "constant_pad_nd", "movedim.int",
    "chunk",
    "tensor_split.sections", "repeat_interleave.self_int", "tril", "triu", "split_with_sizes", "view_as_shape", "rot90",
    "tile", "squeeze.dims",
    "diag_embed", "trace", "pixel_shuffle", "broadcast_to", "unflatten",
)  # fmt: skip
MANY = ("cat", "stack", "cat.self", "meshgrid", "block_diag", "hstack", "vstack", "addn")
CASTS = (torch.float64, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.int32)


def _unary(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name = UNARY[a % len(UNARY)]
    return w.call(name, x if b % 4 else to_floating(w, x))


def _scalar(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name, number = WITH_SCALAR[a % len(WITH_SCALAR)], _SCALARS[b % len(_SCALARS)]
    if name == "pow.Scalar":
        return w.call(name, abs(number), x)
    if name == "div.Scalar_mode":
        return w.call(name, x, number or 2.0, rounding_mode=(None, "floor", "trunc")[c % 3])
    if name in ("div.Scalar", "fmod.Scalar", "remainder.Scalar", "floor_divide.Scalar", "celu"):
        number = number or 2.0
    if name == "pow.Tensor_Scalar":
        number = (2.0, 3.0, 1.0, 0.0, 4.0)[b % 5]
    if name in ("add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar") and c % 3:
        name = name.replace("Scalar", "Tensor")  # what Python's operators call with a number
    if name == "threshold":
        return w.call(name, to_floating(w, x), number, -3.0)
    return w.call(name, x, number)


def _binary(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name = BINARY[a % len(BINARY)]
    y = w.fitting(x, b)
    if c % 3 == 1:
        x, y = y, x
    if name in ("add.alpha", "sub.alpha"):
        return w.call(f"{name[:3]}.Tensor", x, y, alpha=_SCALARS[c // 3 % len(_SCALARS)])
    if name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        return w.call(name, to_floating(w, x), to_floating(w, y), c // 3 % 3)
    if name == "div.Tensor_mode":
        return w.call(name, x, y, rounding_mode=("floor", "trunc", None)[c // 3 % 3])
    return w.call(name, x, y)


def _ternary(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name = TERNARY[a % len(TERNARY)]
    y = w.fitting(x, b)
    if name in ("where", "masked_fill.Scalar", "masked_fill.Tensor"):
        mask = w.fitting(x, c, dtype=torch.bool)
        if name == "where":
            return w.call("where.self", mask, *((x, y) if a // 8 % 2 else (y, x)))
        return w.call(name, x, mask, 7.0 if name.endswith("Scalar") else w.input((), b))
    z = w.fitting(x, c)
    if name == "lerp.Scalar":
        return w.call(name, x, y, 0.25)
    if name in ("addcmul", "addcdiv"):
        return w.call(name, x, y, z, value=_SCALARS[c // 8 % len(_SCALARS)])
    return w.call(name, x, y, z)


def _over_dims(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name, dims, keep = OVER_DIMS[a % len(OVER_DIMS)], dims_of(w, x, b), bool(c % 2)
    if name not in ("any.dims", "all.dims", "count_nonzero.dim_IntList", "sum.dim_IntList"):
        x = to_floating(w, x)
    if name in ("var.correction", "std.correction", "var_mean.correction"):
        return w.call(name, x, dims, correction=(1, 0, 2)[c // 2 % 3], keepdim=keep)
    if name == "linalg_vector_norm":
        return w.call(name, x, (2.0, 1.0, float("inf"), float("-inf"), 3.0, 0.0, 0.5, -1.0)[c // 2 % 8], dims, keep)
    if name == "norm.ScalarOpt_dim":
        return w.call(name, x, (2.0, 1.0, 3.0)[c // 2 % 3], dims, keep)
    return w.call(name, x, dims) if name.startswith("count") else w.call(name, x, dims, keep)


def _over_dim(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name, dim, keep = OVER_DIM[a % len(OVER_DIM)], dim_of(w, x, b), bool(c % 2)
    if name == "kthvalue":
        return w.call(name, x, 1 + c // 2 % 2, dim, keep)
    return w.call(name, x, dim, keepdim=keep) if name == "prod.dim_int" else w.call(name, x, dim, keep)


def _over_all(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name = OVER_ALL[a % len(OVER_ALL)]
    x = x if b % 3 else to_floating(w, x)
    if name in ("linalg_vector_norm", "norm.Scalar"):
        return w.call(name, x, (2.0, 1.0, 3.0, float("inf"))[c % 4])
    return w.call(name, x, bool(c % 2)) if name in ("var", "std") else w.call(name, x)


def _along(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name = tuple(ALONG)[a % len(ALONG)]
    floating, arguments = ALONG[name]
    if name == "flip" and c % 2 == 0:
        return w.call(name, x, dims_of(w, x, c))
    return w.call(name, to_floating(w, x) if floating else x, *arguments(dim_of(w, x, b), c))


def _views(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name, shape, dim = VIEWS[a % len(VIEWS)], list(w.shape(x)), dim_of(w, x, b)
    size, place = (shape[dim] if shape else 1), dim % max(1, len(shape))
    reshape = ("view", "reshape", "_unsafe_view")[c % 3]
    if name == "merge":
        return w.call(
            reshape, x, [*shape[:place], -1 if c >= 128 else math.prod(shape[place : place + 2]), *shape[place + 2 :]]
        )
    if name in ("divide", "unflatten"):
        inner = next((n for n in (*(2, 3, 4, 1)[c // 4 % 4 :], 1) if size % n == 0), 1)
        parts = [inner, size // inner] if c // 16 % 2 else [size // inner, inner]
        return (
            w.call("unflatten.int", x, place, parts)
            if name == "unflatten"
            else w.call(reshape, x, [*shape[:place], *parts, *shape[place + 1 :]])
        )
    if name == "flatten":
        return w.call(reshape, x, [-1])
    if name == "view_as_shape":
        whole = math.prod(shape)
        first = next((n for n in (*(3, 2, 5, 4)[c // 4 % 4 :], 2, 1) if whole % n == 0), 1)
        return w.call(reshape, x, [first, -1] if c // 16 % 2 else [whole // first, first])
    simple: dict[str, tuple[Any, ...]] = {
        "unsqueeze": (dim,), "squeeze.dim": (dim,), "squeeze": (), "transpose.int": (dim, dim_of(w, x, c)),
        "select.int": (dim, c % max(1, size)),
        "slice.Tensor": (dim, c % 3, size - c // 3 % 2, 1 + c // 6 % 2), "unbind.int": (dim,), "split.Tensor": (1 + c % 4, dim),
        "repeat": ([1 + (c >> n) % 2 for n in range(len(shape))],), "roll": ([1 + c % 3], [dim]),
        "narrow": (dim, c % 2, max(0, size - 1)),
        "t": (), "diagonal": (c % 2, 0, 1), "unfold": (dim, 1 + c % 3, 1 + c // 3 % 2),
        "constant_pad_nd": ([c % 3, c // 3 % 3], 1.5),
        "movedim.int": (dim, dim_of(w, x, c)), "chunk": (1 + c % 4, dim), "tensor_split.sections": (1 + c % 4, dim),
        "repeat_interleave.self_int": (2, dim), "tril": (c % 3 - 1,), "triu": (c % 3 - 1,),
        "split_with_sizes": ([c % (size + 1), size - c % (size + 1)], dim),
        "rot90": (1 + c % 3, [0, 1]), "tile": ([1 + (c >> n) % 2 for n in range(len(shape))],),
        "squeeze.dims": (dims_of(w, x, c),),
        "diag_embed": (c % 2,), "trace": (), "pixel_shuffle": (2,),
    }  # fmt: skip
    if name == "permute":
        turned = shape and [(n + c) % len(shape) for n in range(len(shape))]
        return w.call(name, x, turned[::-1] if c >= 128 else turned)
    if name in ("expand", "broadcast_to"):
        return w.call(name, x, [*((2,) if c % 2 else ()), *(3 if n == 1 else n for n in shape)])
    return w.call(name, x, *simple[name])


def _many(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    name, shape, dim = MANY[a % len(MANY)], list(w.shape(x)), dim_of(w, x, c)
    y = w.fitting(x, b, shape, x.dtype) if x.dtype in (torch.float32, torch.bool) else x
    if name == "cat":
        place = dim % max(1, len(shape))
        other = w.input([*shape[:place], SIZES[b % len(SIZES)], *shape[place + 1 :]], b) if shape and c % 2 else y
        return w.call("cat", [x, other, x][: 2 + c // 2 % 2], dim)
    if name == "cat.self":
        return w.call("cat", [x, x], dim)
    if name == "stack":
        return w.call("stack", [x, y], dim)
    if name == "addn":
        total = w.call("add.Tensor", x, y)
        return w.call("add.Tensor", total[0], x) if total else []
    return w.call(name, [x, y])


def _cast(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    return w.call("_to_copy", x, dtype=CASTS[a % len(CASTS)])


def _in_place(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    """An op of another family in the form that works in place, on a copy of `x`; or as it is, where torch has no such form."""
    family = _WITH_IN_PLACE_FORM[c % len(_WITH_IN_PLACE_FORM)]
    fresh = w.call("clone", x)
    if not fresh:
        return []
    w.written = fresh[0]
    try:
        return family(w, fresh[0], a, b, c // len(_WITH_IN_PLACE_FORM))
    finally:
        w.written = None


Family = Callable[[DTensorWriter, DraftValue, int, int, int], list[DraftValue]]

_WITH_IN_PLACE_FORM: tuple[Family, ...] = (_unary, _scalar, _binary, _ternary, _views, _along, indexing)

FAMILIES: tuple[Family, ...] = (
    _unary, _scalar, _binary, _ternary, _over_dims, _over_dim, _over_all, _along, _views, _views, indexing, products,
    layers, _many, _cast,
    _in_place, _over_dims, _views, _binary, _scalar,
)  # fmt: skip

__all__ = ["FAMILIES"]
