"""Ops of TensorCast that are a norm, or an activation, and then a quantisation: they are computed as that.

How values are quantised is not modelled; see `tcverify.ops.uninterpreted`. So a pass that fuses the two ops is right if it gives
the fused op what it gave the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tcverify.ops.dialects.tensor_cast.ops import some_function
from tcverify.ops.op import Op
from tcverify.ops.table import lookup, resolve

_KINDS = ("symmetric", "asymmetric", "mxfp4")

#: By name of the fused op: the op whose first result is quantised, and the op that quantises it.
PARTS = {
    **{f"{norm}_quant": (norm, "quantize") for norm in ("rms_norm", "add_rms_norm")},
    "add_rms_norm_quant2": ("add_rms_norm2", "quantize"),
    **{f"{n}_dynamic_quant_{k}": (n, f"dynamic_quantize_{k}") for n in ("rms_norm", "add_rms_norm") for k in _KINDS},
    **{f"add_rms_norm_dynamic_quant2_{k}": ("add_rms_norm2", f"dynamic_quantize_{k}") for k in _KINDS},
    "m3_swiglu_quant": ("m3_swiglu", "dynamic_quantize_mxfp4"),
}

#: Arguments of the op that quantises which the fused op calls otherwise.
_NAMES = {"scale": "quant_scale", "offset": "quant_offset"}


def _computed(name: str, native: bool, *args: Any, **kwargs: Any) -> Any:
    """Compute a fused op; as an uninterpreted function if its parts are not defined.

    Args:
        native: whether parts are computed as in their own dtypes.
    """
    parts = PARTS[name]
    if not all(hasattr(torch.ops.tensor_cast, part) for part in parts):
        return some_function(f"tensor_cast::{name}", *args, **kwargs)
    arguments = resolve(f"tensor_cast::{name}")._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    made = _part(parts[0], native, given)
    first, *rest = made if isinstance(made, tuple) else (made,)
    quantised = _part(parts[1], native, {**given, "x": first})
    if not rest:
        return quantised
    return (*(quantised if isinstance(quantised, tuple) else (quantised,)), *rest)


def _part(name: str, native: bool, given: Mapping[str, Any]) -> Any:
    """Compute one op, from arguments of the fused one by name; what that is not given is as by default."""
    target = resolve(f"tensor_cast::{name}")
    op = lookup(target)
    run = op.native if native and op.native is not None else op.require()
    names = [argument.name for argument in target._schema.arguments]
    return run(**{one: given[own] for one in names for own in (one, _NAMES.get(one, one)) if own in given})


OPS = tuple(
    Op(
        f"tensor_cast::{name}",
        partial(_computed, name, False),
        native=partial(_computed, name, True),
        uninterpreted=True,
    )
    for name in PARTS
)

__all__ = ["OPS", "PARTS"]
