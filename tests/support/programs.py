"""Small programs that several tests share."""

from __future__ import annotations

from dataclasses import replace

import torch

from tcverify.program import (
    PARTIAL,
    GraphBuilder,
    InputSpec,
    Mesh,
    Program,
    Recipe,
    spmd_program,
)

TP2 = Mesh.grid({"tp": 2})
X = InputSpec("x", (4, 8), placements=(("tp", PARTIAL),))
GAIN = InputSpec("gain", (8,), recipe=Recipe("norm_weight"))


def reduce_then_norm(mesh: Mesh = TP2, dtype: torch.dtype = torch.float32) -> Program:
    """all_reduce → rms_norm; returns both."""

    def build(b: GraphBuilder) -> object:
        x, gain = b.input("x"), b.input("gain")
        reduced = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        return reduced, b.call("tensor_cast::rms_norm", reduced, gain, 1e-6)

    return spmd_program(mesh, [replace(spec, dtype=dtype) for spec in (X, GAIN)], build, seed=1)
