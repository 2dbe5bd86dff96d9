"""Ops of the exact domain that put values into places, choose among them by their order, or move them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcverify.domains.exact.algebra import Field
from tcverify.domains.exact.ops import EXACT, Meaning, register_exact, scale_by
from tcverify.errors import UnsupportedOp

Tensor = torch.Tensor
aten = torch.ops.aten

# ------------------------------------------------------------------------------------ sums into places, and constants


@register_exact("index_add")
def _index_add(k: Field, x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1) -> Tensor:
    return k.settle(torch.index_add(x, dim, index, scale_by(k, source, alpha)))


@register_exact("scatter_add")
def _scatter_add(k: Field, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return k.settle(torch.scatter_add(x, dim, index, source))


@register_exact("index_put")
def _index_put(k: Field, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    return k.settle(torch.ops.aten.index_put.default(x, indices, values, accumulate))


@register_exact("scatter")
def _scatter(k: Field, x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str | None = None) -> Tensor:
    if reduce is not None:
        raise UnsupportedOp("aten::scatter", f"the exact domain has no meaning for reduce={reduce!r}")
    return torch.scatter(x, dim, index, k.literal(source))


@register_exact("constant_pad_nd")
def _pad(k: Field, x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    padded: Tensor = aten.constant_pad_nd.default(k.embed(x), pad, k.literal(value))
    return padded


@register_exact("masked_scatter")
def _masked_scatter(k: Field, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return torch.masked_scatter(x, mask, source)


@register_exact("lift_fresh", "lift_fresh_copy", "lift")
def _lift(k: Field, x: Tensor) -> Tensor:
    return k.constants(x)  # a literal of Python code, or a residue, which stands for itself


@register_exact("full_like")
def _full_like(k: Field, x: Tensor, value: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return torch.full_like(x, value, dtype=dtype)
    return _fill(k, torch.empty_like(x, dtype=torch.float64), value)


@register_exact("masked_fill")
def _masked_fill(k: Field, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return x.masked_fill(mask, k.literal(value))


@register_exact("fill")
def _fill(k: Field, x: Tensor, value: Any) -> Tensor:
    return torch.full_like(x, 0.0).add_(k.literal(value))


@register_exact("where")
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


def run_by_order(k: Field, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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


@register_exact("clamp")
def _clamp(k: Field, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    given = [bound is not None for bound in (min, max)]
    bounds = [torch.as_tensor(k.literal(b), dtype=torch.float64) for b in (min, max) if b is not None]

    def run(value: Tensor, *bounds: Tensor) -> Tensor:
        left = list(bounds)
        return torch.clamp(value, *[left.pop(0) if there else None for there in given])

    found: Tensor = k.choose(run, k.embed(x), *bounds)
    return found


@register_exact("clamp_min")
def _clamp_min(k: Field, x: Tensor, min: Any) -> Any:
    return _clamp(k, x, min)


@register_exact("clamp_max")
def _clamp_max(k: Field, x: Tensor, max: Any) -> Any:
    return _clamp(k, x, None, max)


@register_exact("hardtanh")
def _hardtanh(k: Field, x: Tensor, min_val: Any = -1, max_val: Any = 1) -> Any:
    return _clamp(k, x, min_val, max_val)


@register_exact("leaky_relu")
def _leaky_relu(k: Field, x: Tensor, negative_slope: Any = 0.01) -> Tensor:
    return torch.where(EXACT["gt"](k, x, 0), x, k.multiply(x, k.literal(negative_slope)))


@register_exact("topk")
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
