"""Ops of TensorCast that are a norm, or an activation, and then a quantisation: they are computed as that.

How values are quantised is not modelled; see `tcverify.ops.uninterpreted`. So a pass that fuses the two ops is right if it gives
the fused op what it gave the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tcverify.ops.table import lookup, resolve

_NAME = re.compile(
    r"tensor_cast::(?P<first>(add_)?rms_norm|m3_swiglu)_(?P<dynamic>dynamic_)?quant(?P<both>2)?_?(?P<kind>\w*)"
)
#: Arguments of the fused op that are called otherwise in that which quantises.
_NAMES = {"scale": "quant_scale", "offset": "quant_offset"}


def fused(name: str, native: bool) -> Callable[[Mapping[str, Any]], Any] | None:
    """Return what computes a fused op from its arguments by name; None for another op, or one whose parts nobody has defined.

    Args:
        native: whether parts are computed as in their own dtypes.
    """
    match = _NAME.fullmatch(name)
    if match is None or (match["kind"] and not match["dynamic"]):
        return None
    first = f"{match['first']}{match['both'] or ''}"
    if match["first"] == "m3_swiglu":
        second = "dynamic_quantize_mxfp4"
    else:
        second = f"dynamic_quantize_{match['kind']}" if match["dynamic"] else "quantize"
    defined = torch.ops.tensor_cast
    if not (hasattr(defined, first) and hasattr(defined, second)):
        return None

    def compute(given: Mapping[str, Any]) -> Any:
        made = _part(first, native, given)
        normed, *rest = made if isinstance(made, tuple) else (made,)
        operand = resolve(f"tensor_cast::{second}")._schema.arguments[0].name
        quantised = _part(second, native, {**given, operand: normed})
        if not rest:
            return quantised
        return (*(quantised if isinstance(quantised, tuple) else (quantised,)), *rest)

    return compute


def _part(name: str, native: bool, given: Mapping[str, Any]) -> Any:
    """Compute one op, from arguments of the fused one by name."""
    target = resolve(f"tensor_cast::{name}")
    op = lookup(target)
    run = op.native if native and op.native is not None else op.require()
    names = [argument.name for argument in target._schema.arguments]
    found = {one: given[own] for one in names for own in (one, _NAMES.get(one, one)) if own in given}
    return run(**found)  # what the fused op is not given is as by default


__all__ = ["fused"]
