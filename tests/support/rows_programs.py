"""Pieces of programs with functional collectives and norms of aten's ops; `sequence_programs` judges them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.sequence_programs import Builder

C10D = "_c10d_functional::"
ADD, MUL, VIEW = "aten::add.Tensor", "aten::mul.Tensor", "aten::view"
EPS = 1e-5


def started(b: Builder, value: Any, dim: str = "tp", op: str = "sum") -> Any:
    return b.call(f"{C10D}all_reduce", value, op, dim)


def waited(b: Builder, start: Any) -> Any:
    return b.call(f"{C10D}wait_tensor", start)


def summed(b: Builder, value: Any, dim: str = "tp", op: str = "sum") -> Any:
    """The all_reduce of a value, waited for."""
    return waited(b, started(b, value, dim, op))


def gathered(b: Builder, value: Any, members: int = 2, dim: str = "tp") -> Any:
    return waited(b, b.call(f"{C10D}all_gather_into_tensor", value, members, dim))


def hidden(value: Any) -> int:
    return int(value.meta["val"].shape[-1])


def apart(b: Builder, value: Any, weight: str = "w", square: str = "pow", eps: str = ADD, swapped: bool = False) -> Any:
    """RMSNorm taken apart."""
    squared = b.call(MUL, value, value) if square == "product" else b.call("aten::pow.Tensor_Scalar", value, 2)
    mean = b.call("aten::mean.dim", squared, [-1], True)
    scale = b.call("aten::rsqrt", b.call(eps, mean, EPS))
    scaled = b.call(MUL, scale, value) if swapped else b.call(MUL, value, scale)
    return b.call(MUL, b[weight], scaled) if swapped else b.call(MUL, scaled, b[weight])


def cast(b: Builder, value: Any, dtype: torch.dtype) -> Any:
    return b.call("aten::_to_copy", value, dtype=dtype)


def wide_around(b: Builder, value: Any) -> Any:
    """In another dtype from before the norm to behind its weight."""
    return cast(b, apart(b, cast(b, value, torch.float64)), torch.float32)


def converted_around(b: Builder, value: Any) -> Any:
    """As Inductor writes casts."""
    wide = b.call("prims::convert_element_type", value, torch.float64)
    return b.call("prims::convert_element_type", apart(b, wide), torch.float32)


def wide_before_weight(b: Builder, value: Any) -> Any:
    """In another dtype up to the weight."""
    wide = cast(b, value, torch.float64)
    mean = b.call("aten::mean.dim", b.call("aten::pow.Tensor_Scalar", wide, 2), [len(wide.meta["val"].shape) - 1], True)
    scaled = b.call(MUL, wide, b.call("aten::rsqrt", b.call("aten::add.Scalar", mean, EPS)))
    return b.call(MUL, b["w"], cast(b, scaled, torch.float32))


def fused(b: Builder, value: Any) -> Any:
    both = b.call("aten::_fused_rms_norm", value, [hidden(value)], b["w"], EPS)
    return b.graph.getitem(both, 0)


def native_layer_norm(b: Builder, value: Any) -> Any:
    several = b.call("aten::native_layer_norm", value, [hidden(value)], b["w"], b["w"], EPS)
    return b.graph.getitem(several, -3)


#: Every norm that moves, by name.
NORMS: dict[str, Callable[[Builder, Any], Any]] = {
    "taken apart": apart,
    "a product for the square": lambda b, v: apart(b, v, square="product"),
    "operands the other way round": lambda b, v: apart(b, v, swapped=True),
    "a number added to the mean": lambda b, v: apart(b, v, eps="aten::add.Scalar"),
    "casts around": wide_around,
    "casts of prims": converted_around,
    "a cast before the weight": wide_before_weight,
    "_fused_rms_norm": fused,
    "rms_norm": lambda b, v: b.call("aten::rms_norm", v, [hidden(v)], b["w"], EPS),
    "rms_norm without weight": lambda b, v: b.call("aten::rms_norm", v, [hidden(v)]),
    "layer_norm": lambda b, v: b.call("aten::layer_norm", v, [hidden(v)], b["w"], b["w"], EPS),
    "native_layer_norm": native_layer_norm,
    "tensor_cast's": lambda b, v: b.rms_norm(v),
}
