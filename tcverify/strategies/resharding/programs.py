"""Programs whose tensors carry layouts: they are moved between meshes, reduced, and computed with in between.

Of the mesh that a program is drawn on only the number of ranks counts: its tensors lie on meshes of their own.
"""

from __future__ import annotations

from tcverify.ops import Layout
from tcverify.program import Mesh, PlacedPlan, Program
from tcverify.strategies.resharding.choices import (
    RECORDS,
    WIDTH,
    ReshardingSetting,
    decode_resharding_choices,
    fitting_mesh,
    mesh_of,
)
from tcverify.strategies.resharding.flow import ReshardingFlow
from tcverify.strategies.resharding.motifs import MOTIFS

#: Default numbers of ranks of drawn programs; the simplest first.
RESHARDING_WORLD_SIZES = (2, 3, 4, 4, 4, 5, 6, 6)

#: What a theme's first record is.
_FIRST = {"stages": "stages", "pipelined": "pipelined", "scattered": "scattered", "streams": "streams"}


def decode_resharding(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a program on as many ranks as `mesh` has. Parts that do not fit, or are unused, are left out."""
    return plan_of(mesh.world_size, choices).build()


def plan_of(world_size: int, choices: bytes) -> PlacedPlan:
    """The plan from which `decode_resharding` builds a program."""
    setting, records = decode_resharding_choices(choices)
    flow = open_flow(world_size, setting)
    for number, record in enumerate(records[:RECORDS]):
        kind = _FIRST.get(setting.theme, record.kind) if number == 0 else record.kind
        if kind != "none":
            flow.attempt(MOTIFS[kind], record)
    return flow.plan(["resharding", setting.theme, str(setting.dtype).removeprefix("torch.")])


def open_flow(world_size: int, setting: ReshardingSetting) -> ReshardingFlow:
    """A program with one input, sharded on its first dim or whole."""
    flow = ReshardingFlow(world_size, setting)
    mesh = mesh_of(world_size, setting.mesh, setting.where)
    sharded = fitting_mesh(mesh, setting.shape[0])
    whole = sharded is None or setting.how % 4 == 3
    flow.input(setting.shape, Layout.replicated(mesh) if whole or sharded is None else Layout.sharded(sharded, 0))
    return flow


__all__ = ["RESHARDING_WORLD_SIZES", "WIDTH", "decode_resharding", "open_flow", "plan_of"]
