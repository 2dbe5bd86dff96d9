"""Tensor-parallel layers on functional collectives, as compilers capture them: sums, residuals, norms of aten's ops, products.

What differs from what captured models hold is drawn too: other reductions and groups, norms over other dims, residuals that
vary, writes, and layers that are sequence parallel already.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tcverify.program import VARYING, InputSpec, Mesh, Program, Recipe
from tcverify.strategies.functional.choices import FunctionalSetting
from tcverify.strategies.functional.collectives import WAIT
from tcverify.strategies.functional.flow import ADD, UNARY, FunctionalFlow, group_size, new_input
from tcverify.strategies.functional.programs import add_costs, close_flow
from tcverify.strategies.functional.script import Script, ScriptValue
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
from tcverify.strategies.transformer.draft import PerRank
from tcverify.strategies.transformer.roles import roles_of
from tcverify.strategies.transformer.sites import NoSite

_C10D = "_c10d_functional::"


def decode_sequence_functional(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into layers, with costs. A layer that does not fit is left out."""
    choices = choices.ljust(WIDTH, b"\0")
    setting = decode_sequence_setting(choices[:HEADER_WIDTH])
    timing = decode_timing(choices[HEADER_WIDTH : HEADER_WIDTH + TIMING_WIDTH])
    start = HEADER_WIDTH + TIMING_WIDTH
    layers = [decode_layer(choices[start + i * LAYER_WIDTH :][:LAYER_WIDTH]) for i in range(setting.layers)]
    roles = roles_of(mesh)
    flow = FunctionalFlow(Script(mesh), roles, _flow_setting(setting), 0)
    shape = shape_of_tokens(setting, math.lcm(*roles.sizes(roles.main)))
    residual = enter_residual(flow, setting, shape)
    flow.main = residual
    addend = product(flow, residual, 1, 0)
    for layer in layers:
        state = len(flow.script), flow.script.flying, list(flow.outputs), list(flow.labels)
        try:
            residual, addend = write_layer(flow, setting, layer, residual, addend)
        except NoSite:
            flow.script.rollback(state[0], dict(state[1]))
            flow.outputs, flow.labels = state[2], state[3]
    flow.main = addend
    flow.outputs.insert(0, residual)
    return add_costs(close_flow(flow, 8), timing)


def _flow_setting(setting: SequenceSetting) -> FunctionalSetting:
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


def enter_residual(flow: FunctionalFlow, setting: SequenceSetting, shape: tuple[int, ...]) -> ScriptValue:
    """The residual before the first layer."""
    varied = [(flow.roles.other, VARYING)] if setting.data and flow.roles.other is not None else []

    def given(role: str, shape: tuple[int, ...], dtype: torch.dtype, recipe: Recipe) -> ScriptValue:
        return flow.script.input(InputSpec(role, shape, dtype, flow.roles.declared(varied), recipe), 0.6)

    if setting.entry == "embedding":
        table = new_input(flow, "table", (7, shape[-1]))
        ids = given("ids", shape[:-1], torch.int64, Recipe("integers", 7.0))
        return flow.script.call("aten::embedding", table, ids, rms=0.6)
    if setting.entry == "varying":
        return new_input(flow, "x", shape, "varying")
    if setting.entry == "gathered" and setting.tokens != "uneven" and len(flow.roles.sizes(flow.roles.main)) == 1:
        return gather_rows(flow, shape)
    return given("x", shape, flow.dtype, Recipe())


def gather_rows(flow: FunctionalFlow, shape: tuple[int, ...]) -> ScriptValue:
    """A residual that each rank has its rows of, gathered."""
    dim = flow.roles.main
    rows = math.prod(shape[:-1])
    if rows % flow.roles.size(dim):
        raise NoSite
    part = new_input(flow, "part", (rows // flow.roles.size(dim), shape[-1]), "shard", dim)
    whole = flow.script.call(WAIT, flow.script.call(f"{_C10D}all_gather_into_tensor", part, group_size(flow, dim), dim))
    return whole if len(shape) == 2 else flow.script.call("aten::view", whole, list(shape))


def product(flow: FunctionalFlow, value: ScriptValue, width: int, act: int) -> ScriptValue:
    """Two products with weights of which each rank has a part: addends of a sum."""
    call, shape = flow.script.call, flow.script.shape(value)
    hidden = shape[-1]
    rows = value if len(shape) == 2 else call("aten::view", value, [-1, hidden])
    up = call("aten::mm", rows, _weight(flow, "up", hidden, width * hidden), rms=0.6)
    up = call((*UNARY[:3], "aten::silu")[act % 4], up)
    down = call("aten::mm", up, _weight(flow, "down", width * hidden, hidden), rms=0.6)
    return down if len(shape) == 2 else call("aten::_unsafe_view", down, list(shape))


def _weight(flow: FunctionalFlow, role: str, rows: int, columns: int) -> ScriptValue:
    recipe = Recipe(scale=2.0 ** round(-math.log2(math.sqrt(rows))))
    return new_input(flow, role, (rows, columns), "varying", dtype=flow.dtype, recipe=recipe)


# --------------------------------------------------------------------------------------------------------------- layers


def write_layer(
    flow: FunctionalFlow, setting: SequenceSetting, layer: SequenceLayer, residual: ScriptValue, addend: ScriptValue
) -> tuple[ScriptValue, ScriptValue]:
    """Write a layer; return the residual behind it and the next addends."""
    call, script = flow.script.call, flow.script
    dim = flow.roles.other if layer.other and flow.roles.other is not None else flow.roles.main
    if layer.reduce == "scattered":
        return write_parallel_layer(flow, layer, residual, addend, dim)
    reduced = write_all_reduce(flow, layer, addend, dim)
    viewed = view_sum(flow, layer, reduced)
    total = residual_sum(flow, layer, viewed, residual, dim)
    shape = script.shape(residual)
    rows = total
    if layer.view == "halved":  # the norm is over half of what was a row
        flow.labels.append("halved")
        rows = call("aten::view", total, [*script.shape(total)[:-1], 2, shape[-1] // 2])
    normed, inside = norm_of(flow, layer, rows)
    if script.shape(normed) != shape:
        normed = call("aten::view", normed, list(shape))
    extra = {"sum": reduced, "residual": total, "normed": normed, "view": viewed, **inside}.get(layer.users)
    if extra is not None:
        flow.labels.append(f"{layer.users}-read")
        flow.outputs.append(call("aten::relu", extra))
    following = product(flow, normed, layer.width, layer.act)
    if layer.odd == "sum-written":
        flow.labels.append(layer.odd)
        call("aten::mul_.Tensor", total, 0.5)
    after = total if script.shape(total) == shape else call("aten::view", total, list(shape))
    return after, following


def write_all_reduce(flow: FunctionalFlow, layer: SequenceLayer, addend: ScriptValue, dim: str) -> ScriptValue:
    """The all_reduce of addends, waited for."""
    call, size = flow.script.call, max(flow.roles.sizes(dim))
    op = layer.reduce if layer.reduce in ("avg", "max") else "sum"
    if layer.reduce != "sum":
        flow.labels.append(layer.reduce)
    rms = addend.rms * (size if op == "sum" else 1)
    if layer.reduce == "coalesced":
        both = call(f"{_C10D}all_reduce_coalesced", [addend, call("aten::neg", addend)], op, dim, rms=rms)
        return call(WAIT, flow.script.item(both, 0))
    if layer.reduce == "in-place":
        return call(WAIT, call(f"{_C10D}all_reduce_", call("aten::clone", addend), op, dim, rms=rms))
    start = call(f"{_C10D}all_reduce", addend, op, dim, rms=rms)
    if layer.odd == "swapped-waits":  # two under way, the later one waited for first
        flow.labels.append(layer.odd)
        second = call(f"{_C10D}all_reduce", call("aten::neg", addend), op, dim, rms=rms)
        flow.outputs.append(call(WAIT, second))
    if layer.wait == "late":
        flow.outputs.append(call("aten::tanh", new_input(flow, "beside", (3,))))
    done = call(WAIT, start)
    if layer.wait == "twice":
        flow.labels.append("waited-twice")
        call("aten::mul_.Tensor", addend, 0.5)
        done = call(WAIT, start)
        if layer.act % 2:
            flow.outputs.append(call("aten::relu", done))
    elif layer.wait == "write-behind":
        flow.labels.append("write-behind")
        call("aten::mul_.Tensor", addend, 0.5)
    return done


def view_sum(flow: FunctionalFlow, layer: SequenceLayer, value: ScriptValue) -> ScriptValue:
    """A sum through a view."""
    shape, call = list(flow.script.shape(value)), flow.script.call
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
    flow: FunctionalFlow, layer: SequenceLayer, value: ScriptValue, residual: ScriptValue, dim: str
) -> ScriptValue:
    """A sum and what is added to it."""
    call, script = flow.script.call, flow.script
    shape = script.shape(residual)
    other = residual
    if layer.residual == "none":
        return value
    if layer.residual == "fresh":
        other = new_input(flow, "r", shape)
    elif layer.residual == "gathered" and len(flow.roles.sizes(flow.roles.main)) == 1:
        other = gather_rows(flow, shape)
    elif layer.residual == "two":
        second = call(f"{_C10D}all_reduce", new_input(flow, "y", shape, "partial", dim), "sum", dim)
        other = call(ADD, call(WAIT, second), residual, rms=second.rms + residual.rms)
    elif layer.residual == "varying":
        other = new_input(flow, "v", shape, "varying")
    elif layer.residual == "row":
        other = new_input(flow, "row", shape[-1:])
    elif layer.residual == "sliced":  # at one place on all ranks, or at another on each
        start = PerRank("row", lambda rank: rank % 2) if layer.act % 2 else 1
        stop = PerRank("row_end", lambda rank: rank % 2 + shape[0]) if layer.act % 2 else 1 + shape[0]
        longer = new_input(flow, "long", (shape[0] + 1, *shape[1:]))
        other = call("aten::slice.Tensor", longer, 0, start, stop)
    if layer.residual not in ("chain", "swapped"):
        flow.labels.append(f"residual-{layer.residual}")
    if layer.odd == "residual-written":
        flow.labels.append(layer.odd)
        other = call("aten::clone", other)
    pair: tuple[Any, Any] = (value, other) if layer.residual == "swapped" else (other, value)
    more: dict[str, Any] = {}
    if layer.odd == "alpha":
        flow.labels.append(layer.odd)
        more = {"alpha": 2}
    total = call(ADD, *pair, rms=value.rms + other.rms, **more)
    if layer.odd == "residual-written":
        call("aten::mul_.Tensor", other, 0.5)
    return total


def write_parallel_layer(
    flow: FunctionalFlow, layer: SequenceLayer, residual: ScriptValue, addend: ScriptValue, dim: str
) -> tuple[ScriptValue, ScriptValue]:
    """A layer whose author scattered the tokens: the residual's own rows, a norm of them, and a gather."""
    call, script, shape = flow.script.call, flow.script, flow.script.shape(residual)
    mesh, rows = script.mesh.dim(dim), math.prod(shape[:-1])
    if len(flow.roles.sizes(dim)) > 1 or rows % flow.roles.size(dim):
        raise NoSite
    flow.labels.append("already-parallel")
    size, step = group_size(flow, dim), rows // flow.roles.size(dim)
    flat = addend if len(shape) == 2 else call("aten::view", addend, [rows, shape[-1]])
    start = call(f"{_C10D}reduce_scatter_tensor", flat, "sum", size, dim, rms=addend.rms * flow.roles.size(dim))
    mine = call(WAIT, start)
    whole = residual if len(shape) == 2 else call("aten::view", residual, [rows, shape[-1]])
    low = PerRank(f"{dim}_low{step}", lambda rank: mesh.position(rank) * step)
    high = PerRank(f"{dim}_high{step}", lambda rank: (mesh.position(rank) + 1) * step)
    part = call("aten::slice.Tensor", whole, 0, low, high)
    total = call(ADD, part, mine, rms=part.rms + mine.rms)
    normed, _ = norm_of(flow, layer, total)

    def back(value: ScriptValue) -> ScriptValue:
        full = call(WAIT, call(f"{_C10D}all_gather_into_tensor", value, size, dim))
        return full if len(shape) == 2 else call("aten::view", full, list(shape))

    return back(total), product(flow, back(normed), layer.width, layer.act)


__all__ = ["WIDTH", "decode_sequence_functional"]
