"""FSDP programs: layers gather their sharded parameters, compute, free them; gradients are reduced and scattered.

The structure is that of traced FSDP2: shards are cast and copied into a buffer, the buffer is gathered, split and copied
into unsharded parameters, which are inputs of the graph that are freed and allocated around their use.
"""

from __future__ import annotations

import math
from typing import Any

from tcverify.program import GraphBuilder, Mesh, Program, spmd_program
from tcverify.strategies.fsdp.choices import WIDTH, FsdpLayer, FsdpSetting, decode_fsdp_choices
from tcverify.strategies.fsdp.layers import BF16, F32, LayerParams, Param, inputs_of
from tcverify.strategies.fsdp.writing import FsdpWriter
from tcverify.strategies.timing import decode_timing, with_timing
from tcverify.strategies.transformer.roles import Roles, roles_of


def decode_fsdp(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into an FSDP program, with costs. Parts that do not fit are left out."""
    setting, records, timing = decode_fsdp_choices(choices)
    return with_timing(program_of(mesh, setting, records), decode_timing(timing))


def program_of(mesh: Mesh, setting: FsdpSetting, records: tuple[FsdpLayer, ...]) -> Program:
    """Write a program of these layers, without costs."""
    roles = roles_of(mesh)
    layers = _layers(mesh, roles, setting, records)
    inputs = inputs_of(roles, setting, layers)

    def build(builder: GraphBuilder) -> Any:
        return FsdpWriter(builder, roles, setting, layers).write()

    twists = [layer.record.twist for layer in layers if layer.record.twist != "none"]
    reused = ["reuse"] * any(layer.of is not layer for layer in layers)
    labels = ["fsdp", f"layers={len(layers)}", setting.dtypes, *dict.fromkeys(twists), *reused]
    return spmd_program(mesh, inputs, build, seed=setting.seed, labels=labels)


def _layers(mesh: Mesh, roles: Roles, setting: FsdpSetting, records: tuple[FsdpLayer, ...]) -> list[LayerParams]:
    dims = [roles.main, roles.other or roles.main] if setting.dims == "alternate" else [roles.main]
    unit = math.lcm(*[roles.multiple(dim.name) for dim in mesh.dims])
    hidden = max(1, unit * setting.hidden - setting.uneven)
    dtype = BF16 if setting.dtypes == "bf16" else F32
    layers: list[LayerParams] = []
    for number, record in enumerate(records):
        earlier = [layer for layer in layers if layer.of is layer]
        if record.reuse and earlier and setting.reshard:
            layers.append(LayerParams(number, record, earlier[0].dim, earlier[0].params, earlier[0]))
            continue
        rows = [("w", hidden, hidden)] if record.kind != "mlp" else [("up", hidden, hidden * record.width)]
        rows += {"norm": [("norm", hidden, 0)], "bias": [("bias", hidden, 0)]}.get(record.kind, [])
        rows += [("down", hidden * record.width, hidden)] if record.kind == "mlp" else []
        params = tuple(Param(f"{role}{number}", (r, c) if c else (r,), unit, dtype, role) for role, r, c in rows)
        layers.append(LayerParams(number, record, dims[number % len(dims)], params))
    return layers


__all__ = ["WIDTH", "decode_fsdp", "program_of"]
