"""Norms as compilers capture them: one op of aten or of tensor_cast, or RMSNorm taken apart, with casts; and what is like one."""

from __future__ import annotations

import torch

from tcverify.program import Recipe
from tcverify.strategies.draft import DraftValue, PerRank
from tcverify.strategies.functional.writing import ADD, BF16, MUL, FunctionalWriter, new_input
from tcverify.strategies.sequence_parallel.choices import SequenceLayer

_EPS = 1e-5


def norm_of(w: FunctionalWriter, layer: SequenceLayer, value: DraftValue) -> tuple[DraftValue, dict[str, DraftValue]]:
    """Norm the rows of a value; return that, and what else there is to read: "statistic" and "inside"."""
    call, hidden = w.draft.call, w.draft.shape(value)[-1]
    if layer.norm == "none":
        return value, {}
    if layer.norm in ("apart", "product", "unweighted"):
        return _taken_apart(w, layer, value)
    gain = _gain(w, layer, value)
    if layer.norm == "tensor_cast":
        return call("tensor_cast::rms_norm", value, gain, _EPS, rms=1.0), {}
    if layer.norm == "rms_norm":
        return call("aten::rms_norm", value, [hidden], gain, _EPS, rms=1.0), {}
    if layer.norm == "fused":
        both = call("aten::_fused_rms_norm", value, [hidden], gain, _EPS, rms=1.0)
        return _items(w, layer, both, 1)
    bias = new_input(w, "bias", (hidden,), dtype=w.draft.spec(value).dtype)
    if layer.norm == "layer":
        return call("aten::layer_norm", value, [hidden], gain, bias, _EPS, rms=1.0), {}
    several = call("aten::native_layer_norm", value, [hidden], gain, bias, _EPS, rms=1.0)
    return _items(w, layer, several, 2)


def _items(
    w: FunctionalWriter, layer: SequenceLayer, several: DraftValue, last: int
) -> tuple[DraftValue, dict[str, DraftValue]]:
    """The normed value and, where it is read, the last of the statistics."""
    normed = w.draft.item(several, 0)
    return normed, {"statistic": w.draft.item(several, last)} if layer.users == "statistic" else {}


def _gain(w: FunctionalWriter, layer: SequenceLayer, value: DraftValue) -> DraftValue:
    spec = w.draft.spec(value)
    kind = "varying" if layer.odd == "weight-varies" else "replicated"
    if kind == "varying":
        w.labels.append(layer.odd)
    return new_input(w, "gain", spec.shape[-1:], kind, dtype=spec.dtype, recipe=Recipe("norm_weight"))


def _taken_apart(
    w: FunctionalWriter, layer: SequenceLayer, value: DraftValue
) -> tuple[DraftValue, dict[str, DraftValue]]:
    """x · rsqrt(mean(x²) + eps) · weight, in another dtype for some of the way, and with what makes it no norm."""
    call, draft = w.draft.call, w.draft
    dtype = draft.spec(value).dtype
    inner = torch.float32 if dtype is BF16 else torch.float64
    odd = layer.odd

    def noted() -> None:
        w.labels.append(odd)

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
    axis = (len(draft.shape(x)) - 2) if odd == "over-tokens" else (-1 if layer.act % 2 else len(draft.shape(x)) - 1)
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
        gain = new_input(w, "gain", draft.shape(value), dtype=dtype, recipe=Recipe("norm_weight"))
    else:
        gain = _gain(w, layer, value)
    normed = call(MUL, *((gain, scaled) if layer.act // 2 else (scaled, gain)), rms=1.0)
    return (call("aten::_to_copy", normed, dtype=dtype) if layer.cast == "around" else normed), inside


__all__ = ["norm_of"]
