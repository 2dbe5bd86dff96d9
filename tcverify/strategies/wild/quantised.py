"""Quantised linears in wild programs: of values, or of quantised inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tcverify.program import Recipe
from tcverify.strategies.draft import RANK, DraftGroup, DraftValue, NoSite
from tcverify.strategies.transformer.quantised import BYTES, E4M3, E8M0, I8, OPS, RMS, U8, local_arguments, weights
from tcverify.strategies.transformer.sites import call, new_input, pick, spec_of
from tcverify.strategies.transformer.writing import F32, TransformerWriter


def grow_quantised(w: TransformerWriter, a: DraftValue, b: int, how: int, group: tuple[str, DraftGroup]) -> DraftValue:
    """A quantised linear of a value, or of quantised inputs with as many rows; perhaps with its sum over a group."""
    spec = spec_of(w, a)
    if len(spec.shape) < 2:
        raise NoSite
    inner = spec.shape[-1]
    rows = math.prod(spec.shape[:-1])
    kind = pick(("int8", "int4", "fp8", "mxfp4"), how)
    if not inner or not rows or (kind == "int4" and inner % 2):
        raise NoSite
    placed = ("replicated", "varying")[b % 2]
    x_scale = x_offset = None
    size = a.rms
    if kind == "mxfp4" or (kind == "int8" and how // 4 % 2):
        per_byte = 2 if kind == "mxfp4" else 1
        inner += inner % per_byte
        recipe = BYTES if kind == "mxfp4" else Recipe("integers", 128.0)
        x = new_input(w, "xq", (rows, inner // per_byte), U8 if per_byte == 2 else I8, placed, recipe=recipe)
        size = 1.0
        unit = Recipe("norm_weight", 2.0 ** round(-math.log2(RMS[kind])))
        shape = (rows, -(-inner // 32)) if kind == "mxfp4" else (rows, 1)
        x_scale = new_input(w, "x_scale", shape, E8M0 if kind == "mxfp4" else F32, placed, recipe=unit)
        if kind == "int8":
            x_offset = new_input(w, "x_offset", (1,), torch.int32, recipe=Recipe("constant", 64.0))
    else:
        x = a if len(spec.shape) == 2 else call(w, "aten::reshape", a, [rows, inner])
        if kind == "fp8":
            x = call(w, "aten::_to_copy", x, dtype=E4M3)
            x_scale = new_input(w, "x_scale", (rows, 1), recipe=Recipe("norm_weight"))
    columns = (inner, 4, 8)[how // 8 % 3]
    found = []
    for operand in weights(kind, inner, columns, size):
        where = placed if operand.role == "wq" else "replicated"
        found.append(new_input(w, operand.role, operand.shape, operand.dtype, where, recipe=operand.recipe))
    vector = new_input(w, "bias", (columns,), spec.dtype) if b // 2 % 4 == 0 else None
    given = local_arguments(kind, x, x_scale, found, vector, spec.dtype, x_offset)
    rms = 0.6 if vector is None else 1.2
    if b // 8 % 2:
        made = call(w, f"tensor_cast::{OPS[kind]}_all_reduce", *given, RANK, group[1])
        return replace(made, rms=rms * w.roles.size(group[0]))
    return replace(call(w, f"tensor_cast::{OPS[kind]}", *given), rms=rms)
