"""Ops on whole tensors that DTensor programs are made of, by family: each picks what it calls from bytes, totally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tcverify.errors import UnsupportedOp
from tcverify.ops import lookup, resolve
from tcverify.program import PARTIAL, VARYING, Placement, Recipe
from tcverify.strategies.transformer.draft import Draft, Value

#: Sizes of dims: what divides evenly by few ranks, by none, fewer elements than ranks, one.
SIZES = (4, 4, 4, 3, 5, 2, 6, 8, 1, 7)

#: How the addends of partial inputs are reduced.
REDUCTIONS = ("sum", "sum", "avg", "max", "min", "product")

_SCALARS = (2.0, -1.5, 0.5, 10.0, 0.0, -1.0, 3.0)

UNARY = (
    "abs", "neg", "relu", "sigmoid", "tanh", "sin", "cos", "exp", "sign", "floor", "ceil", "round", "trunc", "erf", "gelu",
    "silu",
    "logical_not", "isnan", "signbit", "square", "hardtanh", "elu", "softplus", "leaky_relu", "positive", "sgn", "atan",
    "expm1",
    "isfinite", "zeros_like", "ones_like", "clone", "alias", "detach", "nan_to_num", "hardsigmoid", "mish", "frac", "deg2rad",
    "hardswish", "logit", "isneginf", "contiguous", "angle",
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
ALONG = (
    "softmax.int", "log_softmax.int", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin",
    "sort", "topk",
    "flip", "argsort", "renorm", "msort",
)  # fmt: skip
VIEWS = (
    "merge", "divide", "flatten", "unsqueeze", "squeeze.dim", "squeeze", "permute", "transpose.int", "expand", "select.int",
    "slice.Tensor",
    "split.Tensor", "unbind.int", "repeat", "roll", "narrow", "t", "diagonal", "unfold", "constant_pad_nd", "movedim.int",
    "chunk",
    "tensor_split.sections", "repeat_interleave.self_int", "tril", "triu", "split_with_sizes", "view_as_shape", "rot90",
    "tile", "squeeze.dims",
    "diag_embed", "trace", "pixel_shuffle", "broadcast_to", "unflatten",
)  # fmt: skip
INDEXING = (
    "gather", "index_select", "scatter.src", "scatter.value", "scatter_add", "index.Tensor", "index_put", "embedding",
    "index_fill",
    "index_add", "select_scatter", "slice_scatter", "index_copy", "scatter_reduce", "one_hot", "bucketize", "searchsorted",
    "take",
    "index.Two", "embedding_backward",
)  # fmt: skip
PRODUCTS = (
    "mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "dot", "linear", "einsum", "outer", "inner", "kron", "addmv", "addbmm",
    "vdot",
    "linalg_multi_dot", "tensordot", "mm.t",
)  # fmt: skip
#: Not attention: DTensor searches for its placements for a minute (reports/pytorch/dtensor-attention-search-explodes).
NORMS = (
    "native_layer_norm", "layer_norm", "rms_norm", "native_group_norm", "convolution", "nll_loss",
    "cross_entropy", "avg_pool2d",
    "max_pool2d", "log_softmax_nll", "batch_norm", "cosine_similarity", "conv1d", "upsample", "glu", "normalize",
)  # fmt: skip
MANY = ("cat", "stack", "cat.self", "meshgrid", "block_diag", "hstack", "vstack", "addn")
CASTS = (torch.float64, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.int32)
WRITES = (
    "add_.Tensor", "mul_.Scalar", "copy_", "fill_.Scalar", "relu_", "add_.Scalar", "zero_", "clamp_", "masked_fill_.Scalar",
    "div_.Tensor",
)  # fmt: skip

_INTEGERS = (torch.int64, torch.int32)


@dataclass(slots=True)
class Sheet:
    """A program on its way.

    Attributes:
        values: what ops can read, the oldest first.
        inputs: inputs by name, with their dims.
    """

    draft: Draft
    values: list[Value] = field(default_factory=list)
    inputs: int = 0

    def shape(self, value: Value) -> tuple[int, ...]:
        return self.draft.shape(value) or ()

    def dtype(self, value: Value) -> torch.dtype:
        found: torch.dtype = self.draft.specs(value)[0].dtype
        return found

    def input(self, shape: Sequence[int], how: int = 0, dtype: torch.dtype = torch.float32, below: int = 2) -> Value:
        """Add an input; floating ones may be partial over a dim of the mesh, or over two.

        Args:
            how: 0 to 127 for one that is the same on all ranks.
            below: of integers the bound.
        """
        mesh = self.draft.mesh
        name, like = f"x{self.inputs}", Value(0, dtype)
        self.inputs += 1
        kind = {torch.int64: Recipe("integers", float(below)), torch.bool: Recipe("mask")}.get(dtype, Recipe())
        over: list[str] = []
        if how >= 128 and dtype.is_floating_point:
            number = how % (2 * len(mesh.dims))
            over = [mesh.dims[number % len(mesh.dims)].name] if number < len(mesh.dims) else [d.name for d in mesh.dims]
        reduction = REDUCTIONS[how // 8 % len(REDUCTIONS)]
        placed: Placement = PARTIAL if reduction == "sum" else VARYING
        made = self.draft.input(name, tuple(shape), dtype, tuple((dim, placed) for dim in over), kind)
        for dim in over:
            made = self.draft.call("_c10d_functional::all_reduce", like, made, reduction, dim)
            made = self.draft.call("_c10d_functional::wait_tensor", like, made)
        return made

    def call(self, op: str, *args: Any, **kwargs: Any) -> list[Value]:
        """Add a call, if this torch has the op and its arguments fit together; return its tensors."""
        name = f"aten::{op}"
        try:
            if lookup(resolve(name)).run is None:
                return []
            made = self.draft.attempt(name, Value(0, torch.float32), *args, **kwargs)
        except UnsupportedOp:
            return []
        if made is None:
            return []
        found = self.draft.specs(made)[0]
        if not isinstance(found, (tuple, list)):
            return [made]
        parts = []
        for number, spec in enumerate(found):
            if spec is not None and number < 4:
                like = Value(0, spec.dtype)
                parts.append(self.draft.call("getitem", like, made, number))
        return parts

    def fitting(
        self, x: Value, a: int, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> Value:
        """A value of this shape: one that is there, a new input, or a new one that broadcasts to the shape of `x`."""
        wanted = tuple(self.shape(x) if shape is None else shape)
        fits = [v for v in self.values if self.shape(v) == wanted and self.dtype(v) == dtype]
        if a % 4 != 3 and fits:
            return fits[-1 - a // 4 % len(fits)]
        if shape is None and a % 4 == 2:
            cut = a // 4 % (len(wanted) + 1)
            wanted = tuple(1 if (a >> 5) % 2 and n == 0 else s for n, s in enumerate(wanted[cut:]))
        return self.input(wanted, a, dtype)


def floating(sheet: Sheet, x: Value) -> Value:
    """The value, as floating point."""
    if sheet.dtype(x) == torch.float32:
        return x
    return (sheet.call("_to_copy", x, dtype=torch.float32) or [x])[0]


def _unary(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name = UNARY[a % len(UNARY)]
    return s.call(name, x if b % 4 else floating(s, x))


def _scalar(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, number = WITH_SCALAR[a % len(WITH_SCALAR)], _SCALARS[b % len(_SCALARS)]
    if name == "pow.Scalar":
        return s.call(name, abs(number), x)
    if name == "div.Scalar_mode":
        return s.call(name, x, number or 2.0, rounding_mode=(None, "floor", "trunc")[c % 3])
    if name in ("div.Scalar", "fmod.Scalar", "remainder.Scalar", "floor_divide.Scalar", "celu"):
        number = number or 2.0
    if name == "pow.Tensor_Scalar":
        number = (2.0, 3.0, 1.0, 0.0, 4.0)[b % 5]
    if name in ("add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar") and c % 3:
        name = name.replace("Scalar", "Tensor")  # what Python's operators call with a number
    if name == "threshold":
        return s.call(name, floating(s, x), number, -3.0)
    return s.call(name, x, number)


def _binary(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name = BINARY[a % len(BINARY)]
    y = s.fitting(x, b)
    if c % 3 == 1:
        x, y = y, x
    if name in ("add.alpha", "sub.alpha"):
        return s.call(f"{name[:3]}.Tensor", x, y, alpha=_SCALARS[c // 3 % len(_SCALARS)])
    if name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        return s.call(name, floating(s, x), floating(s, y), c // 3 % 3)
    if name == "div.Tensor_mode":
        return s.call(name, x, y, rounding_mode=("floor", "trunc", None)[c // 3 % 3])
    return s.call(name, x, y)


def _ternary(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name = TERNARY[a % len(TERNARY)]
    y = s.fitting(x, b)
    if name in ("where", "masked_fill.Scalar", "masked_fill.Tensor"):
        mask = s.fitting(x, c, dtype=torch.bool)
        if name == "where":
            return s.call("where.self", mask, *((x, y) if a // 8 % 2 else (y, x)))
        return s.call(name, x, mask, 7.0 if name.endswith("Scalar") else s.input((), b))
    z = s.fitting(x, c)
    if name == "lerp.Scalar":
        return s.call(name, x, y, 0.25)
    if name in ("addcmul", "addcdiv"):
        return s.call(name, x, y, z, value=_SCALARS[c // 8 % len(_SCALARS)])
    return s.call(name, x, y, z)


def _dim(s: Sheet, x: Value, a: int) -> int:
    rank = max(1, len(s.shape(x)))
    return a % rank - (rank if a >= 128 else 0)


def _dims(s: Sheet, x: Value, a: int) -> list[int]:
    dims = len(s.shape(x))
    found = [n for n in range(dims) if (a >> n) % 2 == 0]
    return [n - dims for n in found] if a >= 128 else found


def _over_dims(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, dims, keep = OVER_DIMS[a % len(OVER_DIMS)], _dims(s, x, b), bool(c % 2)
    if name not in ("any.dims", "all.dims", "count_nonzero.dim_IntList", "sum.dim_IntList"):
        x = floating(s, x)
    if name in ("var.correction", "std.correction", "var_mean.correction"):
        return s.call(name, x, dims, correction=(1, 0, 2)[c // 2 % 3], keepdim=keep)
    if name == "linalg_vector_norm":
        return s.call(name, x, (2.0, 1.0, float("inf"), float("-inf"), 3.0, 0.0, 0.5, -1.0)[c // 2 % 8], dims, keep)
    if name == "norm.ScalarOpt_dim":
        return s.call(name, x, (2.0, 1.0, 3.0)[c // 2 % 3], dims, keep)
    return s.call(name, x, dims) if name.startswith("count") else s.call(name, x, dims, keep)


def _over_dim(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, dim, keep = OVER_DIM[a % len(OVER_DIM)], _dim(s, x, b), bool(c % 2)
    if name == "kthvalue":
        return s.call(name, x, 1 + c // 2 % 2, dim, keep)
    return (
        s.call(name, x, dim, **({"keepdim": keep} if name == "prod.dim_int" else {}))
        if name == "prod.dim_int"
        else s.call(name, x, dim, keep)
    )


def _over_all(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name = OVER_ALL[a % len(OVER_ALL)]
    x = x if b % 3 else floating(s, x)
    if name in ("linalg_vector_norm", "norm.Scalar"):
        return s.call(name, x, (2.0, 1.0, 3.0, float("inf"))[c % 4])
    return s.call(name, x, bool(c % 2)) if name in ("var", "std") else s.call(name, x)


def _along(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, dim = ALONG[a % len(ALONG)], _dim(s, x, b)
    if name in ("_softmax", "_log_softmax"):
        return s.call(name, floating(s, x), dim, False)
    if name == "flip":
        return s.call(name, x, [dim] if c % 2 else _dims(s, x, c))
    if name == "topk":
        return s.call(name, x, 1 + c // 2 % 3, dim, bool(c % 2), True)
    if name == "sort":
        return s.call(name, x, dim, bool(c % 2))
    if name == "renorm":
        return s.call(name, floating(s, x), 2.0, dim, 0.5)
    return s.call(name, x) if name == "msort" else s.call(name, x, dim)


def _views(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, shape, dim = VIEWS[a % len(VIEWS)], list(s.shape(x)), _dim(s, x, b)
    size, place = (shape[dim] if shape else 1), dim % max(1, len(shape))
    reshape = ("view", "reshape", "_unsafe_view")[c % 3]
    if name == "merge":
        return s.call(
            reshape, x, [*shape[:place], -1 if c >= 128 else _product(shape[place : place + 2]), *shape[place + 2 :]]
        )
    if name in ("divide", "unflatten"):
        inner = next((n for n in (*(2, 3, 4, 1)[c // 4 % 4 :], 1) if size % n == 0), 1)
        parts = [inner, size // inner] if c // 16 % 2 else [size // inner, inner]
        return (
            s.call("unflatten.int", x, place, parts)
            if name == "unflatten"
            else s.call(reshape, x, [*shape[:place], *parts, *shape[place + 1 :]])
        )
    if name == "flatten":
        return s.call(reshape, x, [-1])
    if name == "view_as_shape":
        whole = _product(shape)
        first = next((n for n in (*(3, 2, 5, 4)[c // 4 % 4 :], 2, 1) if whole % n == 0), 1)
        return s.call(reshape, x, [first, -1] if c // 16 % 2 else [whole // first, first])
    simple: dict[str, tuple[Any, ...]] = {
        "unsqueeze": (dim,), "squeeze.dim": (dim,), "squeeze": (), "transpose.int": (dim, _dim(s, x, c)),
        "select.int": (dim, c % max(1, size)),
        "slice.Tensor": (dim, c % 3, size - c // 3 % 2, 1 + c // 6 % 2), "unbind.int": (dim,), "split.Tensor": (1 + c % 4, dim),
        "repeat": ([1 + (c >> n) % 2 for n in range(len(shape))],), "roll": ([1 + c % 3], [dim]),
        "narrow": (dim, c % 2, max(0, size - 1)),
        "t": (), "diagonal": (c % 2, 0, 1), "unfold": (dim, 1 + c % 3, 1 + c // 3 % 2),
        "constant_pad_nd": ([c % 3, c // 3 % 3], 1.5),
        "movedim.int": (dim, _dim(s, x, c)), "chunk": (1 + c % 4, dim), "tensor_split.sections": (1 + c % 4, dim),
        "repeat_interleave.self_int": (2, dim), "tril": (c % 3 - 1,), "triu": (c % 3 - 1,),
        "split_with_sizes": ([c % (size + 1), size - c % (size + 1)], dim),
        "rot90": (1 + c % 3, [0, 1]), "tile": ([1 + (c >> n) % 2 for n in range(len(shape))],),
        "squeeze.dims": (_dims(s, x, c),),
        "diag_embed": (c % 2,), "trace": (), "pixel_shuffle": (2,),
    }  # fmt: skip
    if name == "permute":
        turned = shape and [(n + c) % len(shape) for n in range(len(shape))]
        return s.call(name, x, turned[::-1] if c >= 128 else turned)
    if name in ("expand", "broadcast_to"):
        return s.call(name, x, [*((2,) if c % 2 else ()), *(3 if n == 1 else n for n in shape)])
    return s.call(name, x, *simple[name])


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _indexing(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, shape, dim = INDEXING[a % len(INDEXING)], list(s.shape(x)), _dim(s, x, b)
    if not shape or 0 in shape:
        return []
    size, place = shape[dim], dim % len(shape)
    line = s.input([SIZES[c % len(SIZES)]], 0, torch.int64, size)
    if name in ("gather", "scatter.src", "scatter.value", "scatter_add", "scatter_reduce"):
        form = [*shape[:place], SIZES[c % len(SIZES)] if name == "gather" else size, *shape[place + 1 :]]
        index = s.input(form, 0, torch.int64, size)
        if name.startswith("scatter") and name != "scatter_add":  # which of equal places wins is open: each has its own
            index = (s.call("argsort", s.input(form), dim) or [index])[0]
        more: tuple[Any, ...] = {
            "gather": (),
            "scatter.value": (3.0,),
            "scatter_reduce": (s.input(form, c), "amax"),
        }.get(name, (s.fitting(x, c, form),))
        return s.call("scatter_reduce.two" if name == "scatter_reduce" else name, x, dim, index, *more)
    if name == "index_select":
        return s.call(name, x, dim, line)
    if name in ("index_add", "index_copy", "index_fill"):
        order = (s.call("argsort", s.input([size]), 0) or [line])[0]
        if name == "index_fill":
            return s.call("index_fill.int_Scalar", x, dim, line, 4.0)
        return s.call(name, x, dim, order, s.fitting(x, c, shape))
    if name == "index.Tensor":
        return s.call(name, x, [*[None] * place, line])
    if name == "index.Two":
        if len(shape) < 2:
            return []
        other = s.input([SIZES[c % len(SIZES)]], 0, torch.int64, shape[-1])
        first = s.input([SIZES[c % len(SIZES)]], 0, torch.int64, shape[0])
        return s.call("index.Tensor", x, [first, *[None] * (len(shape) - 2), other])
    if name == "index_put":
        rows = (s.call("argsort", s.input([size]), 0) or [line])[0]
        return s.call(name, x, [*[None] * place, rows], s.fitting(x, c, shape), bool(c % 2))
    if name == "embedding":
        table = s.input([SIZES[c % len(SIZES)] + 3, 4], c)
        return s.call(name, table, s.input(shape, 0, torch.int64, SIZES[c % len(SIZES)] + 3))
    if name == "embedding_backward":
        index = s.input([shape[0]], 0, torch.int64, 5)
        return s.call("embedding_dense_backward", x, index, 5, -1, False) if len(shape) == 2 else []
    if name == "select_scatter":
        return s.call(name, x, s.fitting(x, c, [*shape[:place], *shape[place + 1 :]]), dim, c % size)
    if name == "slice_scatter":
        return s.call(name, x, s.fitting(x, c, [*shape[:place], size - 1, *shape[place + 1 :]]), dim, 1, size)
    if name == "one_hot":
        return s.call(name, s.input(shape, 0, torch.int64, 4), 4)
    if name == "take":
        return s.call(name, x, s.input([3], 0, torch.int64, _product(shape)))
    edges = (s.call("sort", s.input([5], c), 0) or [line])[0]
    return s.call("bucketize.Tensor", x, edges) if name == "bucketize" else s.call("searchsorted.Tensor", edges, x)


def _products(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, x = PRODUCTS[a % len(PRODUCTS)], floating(s, x)
    shape, wide = list(s.shape(x)), SIZES[c % len(SIZES)]
    if not shape:
        return []
    inner = shape[-1]
    if len(shape) == 2:
        right = s.fitting(x, b, [inner, wide])
        if name in ("mm", "matmul"):
            return s.call(name, x, right)
        if name == "mm.t":
            turned = s.call("t", x)
            return s.call("mm", turned[0], s.fitting(x, b, [shape[0], wide])) if turned else []
        if name == "addmm":
            bias = s.input([wide] if c // 16 % 2 else [shape[0], wide], c)
            return s.call(name, bias, x, right, beta=(1, 0.5)[c // 32 % 2], alpha=(1, 2)[c // 64 % 2])
        if name in ("mv", "addmv"):
            vector = s.fitting(x, b, [inner])
            return s.call("mv", x, vector) if name == "mv" else s.call(name, s.input([shape[0]], c), x, vector)
        if name == "kron":
            return s.call(name, x, s.input([2, 2], b))
        if name == "tensordot":
            return s.call(name, x, s.fitting(x, b), [0], [0])
        if name == "linalg_multi_dot":
            return s.call(name, [x, right, s.input([wide, 3], c)])
    if len(shape) == 3:
        right = s.fitting(x, b, [shape[0], inner, wide])
        if name in ("bmm", "matmul"):
            return s.call(name, x, right)
        if name in ("baddbmm", "addbmm"):
            bias = s.input([shape[1], wide] if name == "addbmm" or c // 16 % 2 else [shape[0], shape[1], wide], c)
            return s.call(name, bias, x, right)
        if name == "einsum":
            return s.call(name, ("bij,bjk->bik", "bij,bjk->ik", "bij,bjk->bk")[c // 16 % 3], [x, right])
    if len(shape) == 1:
        if name in ("dot", "vdot", "inner"):
            return s.call(name, x, s.fitting(x, b, shape))
        if name == "outer":
            return s.call(name, x, s.input([wide], b))
    if name == "linear":
        return s.call(name, x, s.input([wide, inner], b), s.input([wide], c) if c % 2 else None)
    return s.call("matmul", x, s.input([inner, wide], b)) if a % 2 else s.call("matmul", x, s.input([inner], b))


def _layers(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, x = NORMS[a % len(NORMS)], floating(s, x)
    shape = list(s.shape(x))
    if not shape:
        return []
    wide = shape[-1]
    if name in ("native_layer_norm", "layer_norm", "rms_norm"):
        form = shape[-1:] if b % 3 else shape[-2:]
        weight = s.input(form, b) if b % 2 else None
        bias = s.input(form, c) if c % 2 and weight is not None else None
        if name == "rms_norm":
            return s.call(name, x, form, weight, 1e-5)
        return s.call(name, x, form, weight, bias, 1e-5)
    if name in ("convolution", "avg_pool2d", "max_pool2d", "native_group_norm", "batch_norm", "upsample"):
        if len(shape) != 4:
            shape = [2, 4, SIZES[b % len(SIZES)], 6]
            x = s.input(shape, b)
        if name == "convolution":
            channels, step, pad = SIZES[c % 5], (1, 1, 3, 2)[c // 8 % 4], (0, 1)[c // 16 % 2]
            return s.call(
                name,
                x,
                s.input([channels, shape[1], 3, 3 if c % 2 else 1], c),
                s.input([channels], b) if c // 4 % 2 else None,
                [1, step],
                [pad, pad if c % 2 else 0],
                [1, 1],
                False,
                [0, 0],
                1,
            )
        if name == "native_group_norm":
            groups = 2 if shape[1] % 2 == 0 else 1
            return s.call(name, x, s.input([shape[1]], c), None, shape[0], shape[1], shape[2] * shape[3], groups, 1e-5)
        if name == "batch_norm":
            return s.call("_native_batch_norm_legit.no_stats", x, None, None, True, 0.1, 1e-5)
        if name == "upsample":
            return s.call("upsample_nearest2d", x, [shape[2] * 2, shape[3] * 2])
        return s.call("avg_pool2d" if name == "avg_pool2d" else "max_pool2d_with_indices", x, [2, 2], [1 + c % 2, 1])
    if name in ("nll_loss", "cross_entropy", "log_softmax_nll"):
        if len(shape) != 2 or 0 in shape:
            return []
        target, weight = s.input(shape[:1], 0, torch.int64, wide), s.input([wide], 0) if c % 2 else None
        if name == "cross_entropy":
            return s.call("cross_entropy_loss", x, target, weight, c // 2 % 3, -100, 0.0)
        if name == "log_softmax_nll":
            x = (s.call("_log_softmax", x, 1, False) or [x])[0]
        return s.call("nll_loss_forward", x, target, weight, c // 2 % 3, 1 if c // 8 % 2 else -100)
    if name == "cosine_similarity":
        return s.call(name, x, s.fitting(x, b, shape), _dim(s, x, c))
    if name == "conv1d":
        return s.call(
            "convolution",
            s.input([2, 3, SIZES[b % len(SIZES)] + 2], b),
            s.input([4, 3, 3], c),
            None,
            [1],
            [c % 2],
            [1],
            False,
            [0],
            1,
        )
    if name == "glu":
        return s.call(name, x, _dim(s, x, c))
    return s.call("linalg_norm", x, None, [_dim(s, x, c)], True)


def _many(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name, shape, dim = MANY[a % len(MANY)], list(s.shape(x)), _dim(s, x, c)
    y = s.fitting(x, b, shape, s.dtype(x)) if s.dtype(x) in (torch.float32, torch.bool) else x
    if name == "cat":
        place = dim % max(1, len(shape))
        other = s.input([*shape[:place], SIZES[b % len(SIZES)], *shape[place + 1 :]], b) if shape and c % 2 else y
        return s.call("cat", [x, other, x][: 2 + c // 2 % 2], dim)
    if name == "cat.self":
        return s.call("cat", [x, x], dim)
    if name == "stack":
        return s.call("stack", [x, y], dim)
    if name == "addn":
        total = s.call("add.Tensor", x, y)
        return s.call("add.Tensor", total[0], x) if total else []
    return s.call(name, [x, y])


def _cast(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    return s.call("_to_copy", x, dtype=CASTS[a % len(CASTS)])


def _write(s: Sheet, x: Value, a: int, b: int, c: int) -> list[Value]:
    name = WRITES[a % len(WRITES)]
    fresh = s.call("clone", x)
    if not fresh:
        return []
    args: tuple[Any, ...] = {
        "mul_.Scalar": (2.0,),
        "fill_.Scalar": (3.0,),
        "relu_": (),
        "add_.Scalar": (1.5,),
        "zero_": (),
        "clamp_": (-0.5, 0.5),
    }.get(name, ())
    if name in ("add_.Tensor", "copy_", "div_.Tensor"):
        args = (s.fitting(x, b),)
    if name == "masked_fill_.Scalar":
        args = (s.fitting(x, c, dtype=torch.bool), 2.0)
    return s.call(name, fresh[0], *args)


Family = Callable[[Sheet, Value, int, int, int], list[Value]]

FAMILIES: tuple[Family, ...] = (
    _unary, _scalar, _binary, _ternary, _over_dims, _over_dim, _over_all, _along, _views, _views, _indexing, _products,
    _layers, _many, _cast,
    _write, _over_dims, _views, _binary, _scalar,
)  # fmt: skip

__all__ = ["FAMILIES", "REDUCTIONS", "SIZES", "Sheet"]
