"""A program under construction, and functions that add an activation, weight or view."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tcverify.program import VARYING, Placement, Recipe, shard
from tcverify.strategies.choices import TransformerSetting
from tcverify.strategies.draft import DraftValue, ProgramDraft, TokenLayout
from tcverify.strategies.transformer.roles import Roles

F32, BF16 = torch.float32, torch.bfloat16


@dataclass(slots=True)
class TransformerWriter:
    """A program under construction: its setting, made concrete, and the activations that later blocks may read.

    Attributes:
        sequence: S.
        partial: recipe of inputs that are addends.
        hidden: what the next block reads.
        residual: the residual stream.
        first: the input x, after its collective.
        extras: values returned besides the last hidden value.
        weights: by role, shape and placements, the latest weight, for tying.
    """

    setting: TransformerSetting
    roles: Roles
    draft: ProgramDraft
    sequence: int
    partial: Recipe
    hidden: DraftValue = field(init=False)
    residual: DraftValue = field(init=False)
    first: DraftValue = field(init=False)
    extras: list[Any] = field(default_factory=list)
    weights: dict[Any, DraftValue] = field(default_factory=dict)
    regions: int = 0

    @property
    def batch(self) -> int:
        return self.setting.batch

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and addends."""
        return F32 if self.setting.dtypes == "f32" else BF16

    def region(self) -> int:
        self.regions += 1
        return self.regions - 1


def activation(
    w: TransformerWriter,
    role: str,
    layout: TokenLayout,
    placement: tuple[str, Placement] | None,
    dtype: torch.dtype,
    recipe: Recipe,
    width: int | None = None,
) -> DraftValue:
    """Add an input of tokens, placed as the setting says over dp and by `placement` over another dim."""
    shape = list(token_shape(w, layout, w.setting.hidden if width is None else width))
    placements = [] if placement is None else [placement]
    data, other = w.setting.data, w.roles.other
    if other is not None and data != "replicated" and recipe.kind != "cancelling" and (placement or ("",))[0] != other:
        axis = 1 if layout == TokenLayout("sb") else 0
        if data == "shard" and w.roles.even and layout != TokenLayout("sb", True):
            shape[axis] *= w.roles.size(other)
            placements.insert(0, (other, shard(axis)))
        else:
            placements.append((other, VARYING))
    declared = w.roles.declared(placements)
    return w.draft.input(role, tuple(shape), dtype, declared, recipe, layout, 0.6 * recipe.scale)


def weight(
    w: TransformerWriter,
    role: str,
    shape: tuple[int, ...],
    placement: tuple[str, Placement] | None,
    recipe: Recipe,
    tie: bool,
) -> DraftValue:
    """Add a weight, or return the latest one of its kind when tied."""
    dtype = F32 if recipe.kind == "norm_weight" and w.setting.dtypes == "bf16-norm32" else w.dtype
    declared = w.roles.declared([] if placement is None else [placement])
    key = role, shape, declared
    if not (tie and key in w.weights):
        w.weights[key] = w.draft.input(role, shape, dtype, declared, recipe)
    return w.weights[key]


def matmul(
    w: TransformerWriter,
    value: DraftValue,
    role: str,
    sizes: tuple[int, int],
    placement: tuple[str, Placement] | None,
    tie: bool,
) -> DraftValue:
    """Multiply tokens by a new weight of global shape `sizes`, scaled so that the result is O(1)."""
    matrix = projection(w, value, role, sizes, placement, tie)
    op = "aten::mm" if value.layout.flat else "aten::matmul"
    value = cast(w, value, w.dtype)
    return replace(w.draft.call(op, value, matrix), rms=0.6)


def projection(
    w: TransformerWriter,
    value: DraftValue,
    role: str,
    sizes: tuple[int, ...],
    placement: tuple[str, Placement] | None,
    tie: bool,
) -> DraftValue:
    """Add a weight [K, N], or one per expert [E, K, N], scaled by 1 / (√K · rms of what it multiplies), a power of two."""
    scale = 2.0 ** round(-math.log2(math.sqrt(sizes[-2]) * max(value.rms, 1e-3)))
    return weight(w, role, sizes, placement, Recipe(scale=scale), tie)


def bias(
    w: TransformerWriter, value: DraftValue, width: int, placement: tuple[str, Placement] | None, tie: bool
) -> DraftValue:
    """Add a bias to tokens."""
    vector = weight(w, "bias", (width,), placement, Recipe(scale=0.5), tie)
    return replace(add(w, value, vector, "bias"), dtype=torch.promote_types(value.dtype, vector.dtype))


def add(w: TransformerWriter, a: DraftValue, b: DraftValue, label: str) -> DraftValue:
    """Add tokens to tokens or to a vector."""
    total = w.draft.call("aten::add.Tensor", a, b, labels=(label,))
    return replace(total, rms=a.rms + b.rms, dtype=torch.promote_types(a.dtype, b.dtype), dense=a.dense and b.dense)


def cast(w: TransformerWriter, value: DraftValue, dtype: torch.dtype) -> DraftValue:
    """Cast, where needed."""
    if value.dtype is dtype:
        return value
    return replace(w.draft.call("aten::_to_copy", value, dtype=dtype, labels=("cast",)), dtype=dtype)


def relayout(w: TransformerWriter, value: DraftValue, to: TokenLayout, width: int = -1) -> DraftValue:
    """Lay tokens out as `to`, by views and, between [B, S, ·] and [S, B, ·], a transposition.

    Args:
        width: the last size; −1 where it differs between ranks (and is not 0).
    """
    to = layout_of(w, to.order, to.flat)
    if value.layout == to:
        return value
    if value.layout.order != to.order and not (w.batch == 1 and to.flat != value.layout.flat):
        value = _view(w, value, TokenLayout(value.layout.order), width)
        turned = w.draft.call("aten::transpose.int", value, 0, 1, labels=("transpose",))
        value = replace(turned, layout=TokenLayout(to.order), dense=False)
    return _view(w, value, to, width)


def _view(w: TransformerWriter, value: DraftValue, to: TokenLayout, width: int) -> DraftValue:
    if value.layout == to:
        return value
    if not value.dense:
        copy = w.draft.call("aten::clone", value, memory_format=torch.contiguous_format)
        value = replace(copy, dense=True)
    viewed = w.draft.call("aten::view", value, list(token_shape(w, to, width)), labels=("view",))
    return replace(viewed, layout=to)


def layout_of(w: TransformerWriter, order: str, flat: bool) -> TokenLayout:
    """The layout; flat tokens of a batch of one, [S, H], have no order of dims."""
    return TokenLayout("bs" if flat and w.batch == 1 else order, flat)


def token_shape(w: TransformerWriter, layout: TokenLayout, width: int) -> tuple[int, ...]:
    if layout.flat:
        return w.batch * w.sequence, width
    return (w.batch, w.sequence, width) if layout.order == "bs" else (w.sequence, w.batch, width)
