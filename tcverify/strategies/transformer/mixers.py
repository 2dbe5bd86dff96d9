"""What a block computes before its collective: attention, MLP, or something simpler; column-parallel over a mesh dim."""

from __future__ import annotations

from dataclasses import replace

import torch

from tcverify.program import PARTIAL, Recipe, shard
from tcverify.strategies.choices import BlockChoices
from tcverify.strategies.draft import DraftValue
from tcverify.strategies.transformer.writing import (
    TransformerWriter,
    activation,
    bias,
    cast,
    layout_of,
    matmul,
    relayout,
)

_COLUMNS = shard(1)
_VECTOR = shard(0)

#: (query heads, key heads, head size) per rank; the simplest first: MHA, MQA and GQA.
_HEADS = ((1, 1, 2), (2, 1, 2), (2, 2, 2), (1, 1, 4), (4, 2, 2), (2, 1, 4))
#: Columns of the MLP per rank; 0: a total that the group does not divide.
_FEATURES = (1, 2, 3, 4, 2, 4, 2, 0)


def mix(w: TransformerWriter, block: BlockChoices, dim: str, attention: bool) -> tuple[DraftValue, int | None]:
    """Write the block's mixer, parallel over `dim`.

    Returns:
        Its result, and the global last size of it when it needs the row-parallel projection back to H, else None.
    """
    kind = block.mixer
    if kind == "none":
        return w.hidden, None
    layout = w.hidden.layout
    if kind == "direct":
        return activation(w, "partial", layout, (dim, PARTIAL), w.dtype, w.partial), None
    if kind == "row":
        width = 2 * w.roles.multiple(dim)
        placement = shard(1 if layout.flat else 2)
        return activation(w, "features", layout, (dim, placement), w.dtype, Recipe(), width), width
    return _attention(w, block, dim) if attention else _mlp(w, block, dim)


def _columns(
    w: TransformerWriter, block: BlockChoices, dim: str, value: DraftValue, role: str, width: int
) -> DraftValue:
    made = matmul(w, value, role, (w.setting.hidden, width), (dim, _COLUMNS), block.tie)
    return bias(w, made, width, (dim, _VECTOR), block.tie) if block.bias.startswith("column") else made


def _attention(w: TransformerWriter, block: BlockChoices, dim: str) -> tuple[DraftValue, int | None]:
    heads, kv_heads, size = _HEADS[block.width % len(_HEADS)]
    x = cast(w, w.hidden, w.dtype)
    width: int | None = None
    # Without projections, logits stay within 8 only where the rows are short and of size 1.
    if block.mixer == "bare-attention" and w.setting.hidden == 4 and x.rms <= 1:
        query = key = value = x
        size = 2
    else:
        ranks = w.roles.multiple(dim)
        width = ranks * heads * size
        careful = replace(x, rms=1.5 * x.rms)  # logits stay within 8 where x is larger than estimated
        query = _columns(w, block, dim, careful, "wq", width)
        key = _columns(w, block, dim, careful, "wk", ranks * kv_heads * size)
        value = _columns(w, block, dim, x, "wv", ranks * kv_heads * size)
    inner = layout_of(w, "bs", w.batch == 1 and w.hidden.layout.flat)
    query, key, value = (relayout(w, v, inner) for v in (query, key, value))
    leading = [w.sequence] if inner.flat else [w.batch, w.sequence]
    key, value = (w.draft.call("aten::view", v, [*leading, -1, size]) for v in (key, value))
    mask = None
    if block.mask:
        mask = w.draft.input("mask", (w.sequence, w.sequence), torch.bool, (), Recipe("mask"))
    args = (query, key, value, mask, None, None, None, None)
    labels = ("attention", "mask") if block.mask else ("attention",)
    mixed = replace(w.draft.call("tensor_cast::attention", *args, labels=labels), dense=True)
    mixed = replace(mixed, rms=0.8 * value.rms / max(1.0, w.sequence**0.5))
    return relayout(w, mixed, w.hidden.layout), width


def _mlp(w: TransformerWriter, block: BlockChoices, dim: str) -> tuple[DraftValue, int | None]:
    x = cast(w, w.hidden, w.dtype)
    if block.mixer == "bare-silu":
        return w.draft.call("tensor_cast::silu", x), None
    ranks = w.roles.multiple(dim)
    features = _FEATURES[block.width % len(_FEATURES)]
    width = ranks * features if features else 2 * ranks + 1
    gate = _columns(w, block, dim, x, "wgate", width)
    labels = ("mlp",) if features else ("mlp", "uneven-features")
    if block.mixer == "swiglu":
        up = _columns(w, block, dim, x, "wup", width)
        made = w.draft.call("tensor_cast::swiglu", gate, up, labels=labels)
        return replace(made, rms=0.15), width
    made = w.draft.call(f"tensor_cast::{block.mixer}", gate, labels=labels)
    return replace(made, rms=0.25), width
