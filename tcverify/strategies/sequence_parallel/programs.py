"""Tensor-parallel layers on functional collectives, as compilers capture them: sums, residuals, norms of aten's ops, products.

Variations that captured models do not contain are drawn too: other reductions and groups, norms over other dims, residuals that
vary, writes, and layers that are sequence parallel already.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tcverify.program import VARYING, Mesh, Program, Recipe
from tcverify.strategies.draft import DraftValue, NoSite, PerRank, attempt
from tcverify.strategies.functional.choices import FunctionalSetting
from tcverify.strategies.functional.collectives import WAIT
from tcverify.strategies.functional.draft import AsyncDraft
from tcverify.strategies.functional.programs import add_costs, finish_program
from tcverify.strategies.functional.writing import ADD, UNARY, FunctionalWriter, group_size, new_input
from tcverify.strategies.sequence_parallel.choices import (
    HEADER_WIDTH,
    LAYER_WIDTH,
    WIDTH,
    SequenceLayer,
    SequenceSetting,
    decode_layer,
    decode_sequence_setting,
)
from tcverify.strategies.sequence_parallel.norms import norm_of
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.timing import decode_timing
from tcverify.strategies.transformer.roles import roles_of

_C10D = "_c10d_functional::"


def decode_sequence_functional(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into layers, with costs. A layer that does not fit is left out."""
    choices = choices.ljust(WIDTH, b"\0")
    setting = decode_sequence_setting(choices[:HEADER_WIDTH])
    timing = decode_timing(choices[HEADER_WIDTH : HEADER_WIDTH + TIMING_WIDTH])
    start = HEADER_WIDTH + TIMING_WIDTH
    layers = [decode_layer(choices[start + i * LAYER_WIDTH :][:LAYER_WIDTH]) for i in range(setting.layers)]
    roles = roles_of(mesh)
    w = FunctionalWriter(AsyncDraft(mesh), roles, _functional_setting(setting), 0)
    shape = shape_of_tokens(setting, math.lcm(*roles.sizes(roles.main)))
    residual = enter_residual(w, setting, shape)
    w.main = residual
    addend = product(w, residual, 1, 0)

    def write(w: FunctionalWriter, layer: SequenceLayer) -> None:
        nonlocal residual, addend
        residual, addend = write_layer(w, setting, layer, residual, addend)

    for layer in layers:
        attempt(w, write, layer)
    w.main = addend
    w.outputs.insert(0, residual)
    return add_costs(finish_program(w, 8), timing)


def _functional_setting(setting: SequenceSetting) -> FunctionalSetting:
    return FunctionalSetting(
        "sequence", setting.layers, setting.hidden, 1, setting.dtype, False, "varying", 8, setting.seed
    )


def shape_of_tokens(setting: SequenceSetting, members: int) -> tuple[int, ...]:
    """The shape of activations, for groups whose sizes have this least common multiple."""
    hidden = setting.hidden
    batch, sequence = {
        "sequence": (2, 2 * members),
        "batch": (members, 3),
        "product": (2, members * 3 // 2) if members % 2 == 0 else (members, 5),
        "square": (1, math.lcm(hidden, members)),
        "members": (1, members),
        "uneven": (1, 2 * members + 1),
    }[setting.tokens]
    if setting.tokens == "square":
        hidden = sequence
    return (batch * sequence, hidden) if setting.layout == "flat" else (batch, sequence, hidden)


def enter_residual(w: FunctionalWriter, setting: SequenceSetting, shape: tuple[int, ...]) -> DraftValue:
    """The residual before the first layer."""
    varied = [(w.roles.other, VARYING)] if setting.data and w.roles.other is not None else []

    def given(role: str, shape: tuple[int, ...], dtype: torch.dtype, recipe: Recipe) -> DraftValue:
        return w.draft.input(role, shape, dtype, w.roles.declared(varied), recipe, rms=0.6)

    if setting.entry == "embedding":
        table = new_input(w, "table", (7, shape[-1]))
        ids = given("ids", shape[:-1], torch.int64, Recipe("integers", 7.0))
        return w.draft.call("aten::embedding", table, ids, rms=0.6)
    if setting.entry == "varying":
        return new_input(w, "x", shape, "varying")
    if setting.entry == "gathered" and setting.tokens != "uneven" and len(w.roles.sizes(w.roles.main)) == 1:
        return gather_rows(w, shape)
    return given("x", shape, w.dtype, Recipe())


def gather_rows(w: FunctionalWriter, shape: tuple[int, ...]) -> DraftValue:
    """A residual that each rank has its rows of, gathered."""
    dim = w.roles.main
    rows = math.prod(shape[:-1])
    if rows % w.roles.size(dim):
        raise NoSite
    part = new_input(w, "part", (rows // w.roles.size(dim), shape[-1]), "shard", dim)
    whole = w.draft.call(WAIT, w.draft.call(f"{_C10D}all_gather_into_tensor", part, group_size(w, dim), dim))
    return whole if len(shape) == 2 else w.draft.call("aten::view", whole, list(shape))


def product(w: FunctionalWriter, value: DraftValue, width: int, act: int) -> DraftValue:
    """Two products with weights of which each rank has a part: addends of a sum."""
    call, shape = w.draft.call, w.draft.shape(value)
    hidden = shape[-1]
    rows = value if len(shape) == 2 else call("aten::view", value, [-1, hidden])
    up = call("aten::mm", rows, _weight(w, "up", hidden, width * hidden), rms=0.6)
    up = call((*UNARY[:3], "aten::silu")[act % 4], up)
    down = call("aten::mm", up, _weight(w, "down", width * hidden, hidden), rms=0.6)
    return down if len(shape) == 2 else call("aten::_unsafe_view", down, list(shape))


def _weight(w: FunctionalWriter, role: str, rows: int, columns: int) -> DraftValue:
    recipe = Recipe(scale=2.0 ** round(-math.log2(math.sqrt(rows))))
    return new_input(w, role, (rows, columns), "varying", dtype=w.dtype, recipe=recipe)


# --------------------------------------------------------------------------------------------------------------- layers


def write_layer(
    w: FunctionalWriter, setting: SequenceSetting, layer: SequenceLayer, residual: DraftValue, addend: DraftValue
) -> tuple[DraftValue, DraftValue]:
    """Write a layer; return the residual behind it and the next addends."""
    call, draft = w.draft.call, w.draft
    dim = w.roles.other if layer.other and w.roles.other is not None else w.roles.main
    if layer.reduce == "scattered":
        return write_parallel_layer(w, layer, residual, addend, dim)
    reduced = write_all_reduce(w, layer, addend, dim)
    viewed = view_sum(w, layer, reduced)
    total = residual_sum(w, layer, viewed, residual, dim)
    shape = draft.shape(residual)
    rows = total
    if layer.view == "halved":  # the norm is over half of what was a row
        w.labels.append("halved")
        rows = call("aten::view", total, [*draft.shape(total)[:-1], 2, shape[-1] // 2])
    normed, inside = norm_of(w, layer, rows)
    if draft.shape(normed) != shape:
        normed = call("aten::view", normed, list(shape))
    extra = {"sum": reduced, "residual": total, "normed": normed, "view": viewed, **inside}.get(layer.users)
    if extra is not None:
        w.labels.append(f"{layer.users}-read")
        w.outputs.append(call("aten::relu", extra))
    following = product(w, normed, layer.width, layer.act)
    if layer.odd == "sum-written":
        w.labels.append(layer.odd)
        call("aten::mul_.Tensor", total, 0.5)
    after = total if draft.shape(total) == shape else call("aten::view", total, list(shape))
    return after, following


def write_all_reduce(w: FunctionalWriter, layer: SequenceLayer, addend: DraftValue, dim: str) -> DraftValue:
    """The all_reduce of addends, waited for."""
    call, size = w.draft.call, max(w.roles.sizes(dim))
    op = layer.reduce if layer.reduce in ("avg", "max") else "sum"
    if layer.reduce != "sum":
        w.labels.append(layer.reduce)
    rms = addend.rms * (size if op == "sum" else 1)
    if layer.reduce == "coalesced":
        both = call(f"{_C10D}all_reduce_coalesced", [addend, call("aten::neg", addend)], op, dim, rms=rms)
        return call(WAIT, w.draft.item(both, 0))
    if layer.reduce == "in-place":
        return call(WAIT, call(f"{_C10D}all_reduce_", call("aten::clone", addend), op, dim, rms=rms))
    start = call(f"{_C10D}all_reduce", addend, op, dim, rms=rms)
    if layer.odd == "swapped-waits":  # two in flight, the later one waited for first
        w.labels.append(layer.odd)
        second = call(f"{_C10D}all_reduce", call("aten::neg", addend), op, dim, rms=rms)
        w.outputs.append(call(WAIT, second))
    if layer.wait == "late":
        w.outputs.append(call("aten::tanh", new_input(w, "beside", (3,))))
    done = call(WAIT, start)
    if layer.wait == "twice":
        w.labels.append("waited-twice")
        call("aten::mul_.Tensor", addend, 0.5)
        done = call(WAIT, start)
        if layer.act % 2:
            w.outputs.append(call("aten::relu", done))
    elif layer.wait == "write-behind":
        w.labels.append("write-behind")
        call("aten::mul_.Tensor", addend, 0.5)
    return done


def view_sum(w: FunctionalWriter, layer: SequenceLayer, value: DraftValue) -> DraftValue:
    """A sum through a view."""
    shape, call = list(w.draft.shape(value)), w.draft.call
    if layer.view == "same":
        return call("aten::view", value, shape)
    if layer.view == "rows" and layer.residual == "none":
        return call("aten::view", value, [-1, shape[-1]])
    if layer.view == "unsqueezed":
        return call("aten::unsqueeze", value, 0) if len(shape) == 2 else value
    if layer.view == "detached":
        return call("aten::detach", value)
    if layer.view == "turned" and len(shape) == 2 and shape[0] == shape[1]:
        return call("aten::t", value)
    return value


def residual_sum(
    w: FunctionalWriter, layer: SequenceLayer, value: DraftValue, residual: DraftValue, dim: str
) -> DraftValue:
    """A sum and what is added to it."""
    call, draft = w.draft.call, w.draft
    shape = draft.shape(residual)
    other = residual
    if layer.residual == "none":
        return value
    if layer.residual == "fresh":
        other = new_input(w, "r", shape)
    elif layer.residual == "gathered" and len(w.roles.sizes(w.roles.main)) == 1:
        other = gather_rows(w, shape)
    elif layer.residual == "two":
        second = call(f"{_C10D}all_reduce", new_input(w, "y", shape, "partial", dim), "sum", dim)
        other = call(ADD, call(WAIT, second), residual, rms=second.rms + residual.rms)
    elif layer.residual == "varying":
        other = new_input(w, "v", shape, "varying")
    elif layer.residual == "row":
        other = new_input(w, "row", shape[-1:])
    elif layer.residual == "sliced":  # at one place on all ranks, or at another on each
        start = PerRank("row", lambda rank: rank % 2) if layer.act % 2 else 1
        stop = PerRank("row_end", lambda rank: rank % 2 + shape[0]) if layer.act % 2 else 1 + shape[0]
        longer = new_input(w, "long", (shape[0] + 1, *shape[1:]))
        other = call("aten::slice.Tensor", longer, 0, start, stop)
    if layer.residual not in ("chain", "swapped"):
        w.labels.append(f"residual-{layer.residual}")
    if layer.odd == "residual-written":
        w.labels.append(layer.odd)
        other = call("aten::clone", other)
    pair: tuple[Any, Any] = (value, other) if layer.residual == "swapped" else (other, value)
    more: dict[str, Any] = {}
    if layer.odd == "alpha":
        w.labels.append(layer.odd)
        more = {"alpha": 2}
    total = call(ADD, *pair, rms=value.rms + other.rms, **more)
    if layer.odd == "residual-written":
        call("aten::mul_.Tensor", other, 0.5)
    return total


def write_parallel_layer(
    w: FunctionalWriter, layer: SequenceLayer, residual: DraftValue, addend: DraftValue, dim: str
) -> tuple[DraftValue, DraftValue]:
    """A layer whose author scattered the tokens: the residual's own rows, a norm of them, and a gather."""
    call, draft, shape = w.draft.call, w.draft, w.draft.shape(residual)
    mesh, rows = draft.mesh.dim(dim), math.prod(shape[:-1])
    if len(w.roles.sizes(dim)) > 1 or rows % w.roles.size(dim):
        raise NoSite
    w.labels.append("already-parallel")
    size, step = group_size(w, dim), rows // w.roles.size(dim)
    flat = addend if len(shape) == 2 else call("aten::view", addend, [rows, shape[-1]])
    start = call(f"{_C10D}reduce_scatter_tensor", flat, "sum", size, dim, rms=addend.rms * w.roles.size(dim))
    mine = call(WAIT, start)
    whole = residual if len(shape) == 2 else call("aten::view", residual, [rows, shape[-1]])
    low = PerRank(f"{dim}_low{step}", lambda rank: mesh.position(rank) * step)
    high = PerRank(f"{dim}_high{step}", lambda rank: (mesh.position(rank) + 1) * step)
    part = call("aten::slice.Tensor", whole, 0, low, high)
    total = call(ADD, part, mine, rms=part.rms + mine.rms)
    normed, _ = norm_of(w, layer, total)

    def back(value: DraftValue) -> DraftValue:
        full = call(WAIT, call(f"{_C10D}all_gather_into_tensor", value, size, dim))
        return full if len(shape) == 2 else call("aten::view", full, list(shape))

    return back(total), product(w, back(normed), layer.width, layer.act)


__all__ = ["WIDTH", "decode_sequence_functional"]
