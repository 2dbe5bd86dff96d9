"""Norms as compilers capture them: one op of aten or of tensor_cast, or RMSNorm taken apart, with casts; and what is like one."""

from __future__ import annotations

import torch

from tcverify.program import Recipe
from tcverify.strategies.functional.flow import ADD, BF16, MUL, FunctionalFlow, new_input
from tcverify.strategies.functional.script import ScriptValue
from tcverify.strategies.sequence_parallel.choices import SequenceLayer
from tcverify.strategies.transformer.draft import PerRank

_EPS = 1e-5


def norm_of(
    flow: FunctionalFlow, layer: SequenceLayer, value: ScriptValue
) -> tuple[ScriptValue, dict[str, ScriptValue]]:
    """Norm the rows of a value; return that, and what else there is to read: "statistic" and "inside"."""
    call, hidden = flow.script.call, flow.script.shape(value)[-1]
    if layer.norm == "none":
        return value, {}
    if layer.norm in ("apart", "product", "unweighted"):
        return _taken_apart(flow, layer, value)
    gain = _gain(flow, layer, value)
    if layer.norm == "tensor_cast":
        return call("tensor_cast::rms_norm", value, gain, _EPS, rms=1.0), {}
    if layer.norm == "rms_norm":
        return call("aten::rms_norm", value, [hidden], gain, _EPS, rms=1.0), {}
    if layer.norm == "fused":
        both = call("aten::_fused_rms_norm", value, [hidden], gain, _EPS, rms=1.0)
        return _items(flow, layer, both, 1)
    bias = new_input(flow, "bias", (hidden,), dtype=flow.script.spec(value).dtype)
    if layer.norm == "layer":
        return call("aten::layer_norm", value, [hidden], gain, bias, _EPS, rms=1.0), {}
    several = call("aten::native_layer_norm", value, [hidden], gain, bias, _EPS, rms=1.0)
    return _items(flow, layer, several, 2)


def _items(
    flow: FunctionalFlow, layer: SequenceLayer, several: ScriptValue, last: int
) -> tuple[ScriptValue, dict[str, ScriptValue]]:
    """The normed value and, where it is read, the last of the statistics."""
    normed = flow.script.item(several, 0)
    return normed, {"statistic": flow.script.item(several, last)} if layer.users == "statistic" else {}


def _gain(flow: FunctionalFlow, layer: SequenceLayer, value: ScriptValue) -> ScriptValue:
    spec = flow.script.spec(value)
    kind = "varying" if layer.odd == "weight-varies" else "replicated"
    if kind == "varying":
        flow.labels.append(layer.odd)
    return new_input(flow, "gain", spec.shape[-1:], kind, dtype=spec.dtype, recipe=Recipe("norm_weight"))


def _taken_apart(
    flow: FunctionalFlow, layer: SequenceLayer, value: ScriptValue
) -> tuple[ScriptValue, dict[str, ScriptValue]]:
    """x · rsqrt(mean(x²) + eps) · weight, in another dtype for some of the way, and with what makes it no norm."""
    call, script = flow.script.call, flow.script
    dtype = script.spec(value).dtype
    inner = torch.float32 if dtype is BF16 else torch.float64
    odd = layer.odd

    def noted() -> None:
        flow.labels.append(odd)

    x = value if layer.cast == "none" else call("aten::_to_copy", value, dtype=inner)
    if odd == "power-by-rank":
        noted()
        square = call("aten::pow.Tensor_Scalar", x, PerRank("power", lambda rank: 2 + 2 * (rank % 2)))
    elif odd == "cube":
        noted()
        square = call("aten::abs", call("aten::pow.Tensor_Scalar", x, 3))
    elif layer.norm == "product":
        square = call(MUL, x, x)
    else:
        square = call("aten::pow.Tensor_Scalar", x, 2)
    axis = (len(script.shape(x)) - 2) if odd == "over-tokens" else (-1 if layer.act % 2 else len(script.shape(x)) - 1)
    if odd == "no-keepdim":
        noted()
        mean = call("aten::unsqueeze", call("aten::mean.dim", square, [axis]), -1)
    else:
        mean = call("aten::mean.dim", square, [axis], True)
    if odd == "over-tokens":
        noted()
    if odd == "eps-in-place":
        noted()
        total = call("aten::add_.Tensor", mean, _EPS)
    else:
        total = call(ADD if layer.act % 2 else "aten::add.Scalar", mean, _EPS)
    scale = call("aten::rsqrt", total)
    scaled = call(MUL, *((scale, x) if layer.act // 2 else (x, scale)), rms=1.0)
    inside = {"inside": square, "statistic": scale}
    if layer.cast == "before-weight":
        scaled = call("aten::_to_copy", scaled, dtype=dtype)
    if layer.norm == "unweighted":
        return (scaled if layer.cast != "around" else call("aten::_to_copy", scaled, dtype=dtype)), inside
    if odd == "weight-per-row":
        noted()
        gain = new_input(flow, "gain", script.shape(value), dtype=dtype, recipe=Recipe("norm_weight"))
    else:
        gain = _gain(flow, layer, value)
    normed = call(MUL, *((gain, scaled) if layer.act // 2 else (scaled, gain)), rms=1.0)
    return (call("aten::_to_copy", normed, dtype=dtype) if layer.cast == "around" else normed), inside


__all__ = ["norm_of"]
