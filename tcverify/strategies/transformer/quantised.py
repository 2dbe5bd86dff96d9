"""Quantised linears in drawn programs: operands of each, sized so that results are O(1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tcverify.program import VARYING, Placement, Recipe, shard
from tcverify.strategies.draft import RANK, DraftGroup, DraftValue
from tcverify.strategies.transformer.writing import F32, TransformerWriter, activation, layout_of, relayout

I8, U8, E4M3, E8M0 = torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
BYTES = Recipe("integers", 256.0)  # two elements of four bits each, sign-mixed

OPS = {"int8": "static_quant_linear", "int4": "static_quant_linear_int4", "fp8": "fp8_linear", "mxfp4": "mxfp4_linear"}
#: Root mean square of an element as stored.
RMS = {"int8": 37.0, "int4": 4.6, "fp8": 0.58, "mxfp4": 2.9}


class Operand(NamedTuple):
    """An input of a linear: arguments of `ProgramDraft.input`, except the placement."""

    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    recipe: Recipe


def weights(kind: str, inner: int, columns: int, size: float) -> list[Operand]:
    """The weight [inner, columns], packed where the kind is, its scale, and the offset of int8.

    Args:
        size: root mean square of what it multiplies; of the products' sum it becomes about 0.6.
    """
    scale = 2.0 ** round(math.log2(0.6 / (math.sqrt(max(inner, 1)) * max(size, 1e-2) * RMS[kind])))
    gain = Recipe("norm_weight", scale)
    if kind == "int8":  # integers are drawn from 0 on; the offset makes them sign-mixed
        return [
            Operand("wq", (inner, columns), I8, Recipe("integers", 128.0)),
            Operand("w_scale", (columns,), F32, gain),
            Operand("w_offset", (columns,), torch.int32, Recipe("constant", 64.0)),
        ]
    if kind == "int4":
        return [Operand("wq", (inner // 2, columns), U8, BYTES), Operand("w_scale", (columns,), F32, gain)]
    if kind == "fp8":
        return [Operand("wq", (inner, columns), E4M3, Recipe()), Operand("w_scale", (columns,), F32, gain)]
    blocks = -(-inner // 32)
    return [Operand("wq", (inner // 2, columns), U8, BYTES), Operand("w_scale", (columns, blocks), E8M0, gain)]


def local_arguments(
    kind: str,
    x: DraftValue,
    x_scale: DraftValue | None,
    found: Sequence[DraftValue],
    bias: DraftValue | None,
    dtype: torch.dtype,
    x_offset: DraftValue | None = None,
) -> tuple[object, ...]:
    """The arguments of the local op: `found` are the values of `weights`."""
    w, w_scale = found[:2]
    if kind in ("int8", "int4"):
        return x, w, w_scale, found[2] if len(found) > 2 else None, x_scale, x_offset, bias, dtype
    return x, w, x_scale, w_scale, bias, dtype


# -------------------------------------------------------------------------------------------------- structured programs


def project_quantised(
    w: TransformerWriter, kind: str, value: DraftValue, width: int, dim: str, vector: DraftValue | None, fused: bool
) -> DraftValue:
    """Multiply tokens [·, width], sharded over `dim`, by a quantised weight back to H; perhaps sum over the dim at once.

    MXFP4 tokens are inputs of their own, since nothing makes them from others.
    """
    hidden, before = w.setting.hidden, value.layout
    if kind == "int4" and any(width % (2 * size) for size in w.roles.sizes(dim)):
        kind = "int8"  # some rank would get half a byte
    flat = layout_of(w, before.order, True)
    rows: Placement = shard(0)
    x_scale = None
    if kind == "mxfp4":
        width, rows = 2 * max(2, hidden // 2), VARYING
        x = activation(w, "packed", flat, (dim, VARYING), U8, BYTES, width // 2)
        x_scale = activation(w, "x_scale", flat, (dim, VARYING), E8M0, Recipe("norm_weight", 0.25), -(-width // 32))
        size = 0.25 * RMS[kind]
    else:
        x, size = relayout(w, value, flat), value.rms
        if kind == "fp8":
            x = replace(w.draft.call("aten::_to_copy", x, dtype=E4M3, labels=("cast",)), dtype=E4M3)
            x_scale = w.draft.input("x_scale", (1,), F32, (), Recipe("norm_weight"))
    found = []
    for operand in weights(kind, width, hidden, size):
        shared = operand.role != "wq" and kind != "mxfp4"
        placements = w.roles.declared([] if shared else [(dim, rows)])
        found.append(w.draft.input(operand.role, operand.shape, operand.dtype, placements, operand.recipe))
    given = local_arguments(kind, x, x_scale, found, vector, w.dtype)
    labels = ("quantised", kind)
    like = replace(x, dtype=w.dtype, layout=flat, dense=True, rms=0.6 if vector is None else 0.9)
    if fused:
        op = f"tensor_cast::{OPS[kind]}_all_reduce"
        made = w.draft.call(op, *given, RANK, DraftGroup(dim), like=like, labels=(*labels, "fused-reduce"))
        made = replace(made, rms=like.rms * w.roles.size(dim))
    else:
        made = w.draft.call(f"tensor_cast::{OPS[kind]}", *given, like=like, labels=labels)
    return relayout(w, made, before, hidden)
