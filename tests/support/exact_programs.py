"""Programs, and what a pass may make of them, for the tests of the exact domain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Program, Recipe, spmd_program
from tests.support.programs import TP2

#: Inputs of `program`: x is partial, all others are replicated; `pos` and `gain` are positive.
INPUTS = (
    InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)),
    InputSpec("y", (4, 8)),
    InputSpec("w", (8, 6)),
    InputSpec("v", (6, 5)),
    InputSpec("gain", (8,), recipe=Recipe("norm_weight")),
    InputSpec("pos", (4, 8), recipe=Recipe("norm_weight")),
)


class Writer:
    """Writes graphs: `g.x` is an input, `g("mul.Tensor", a, b)` calls an aten op, `g.total(x)` is an all_reduce."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.inputs = {spec.name: builder.input(spec.name) for spec in INPUTS}

    def __getattr__(self, name: str) -> fx.Node:
        return self.inputs[name]

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.builder.call(op if "::" in op else f"aten::{op}", *args, **kwargs)

    def total(self, value: fx.Node) -> fx.Node:
        return self("tensor_cast::all_reduce", value, self.builder.rank, self.builder.group("tp"))

    def norm(self, value: fx.Node, eps: float = 1e-6) -> fx.Node:
        return self("tensor_cast::rms_norm", value, self.gain, eps)

    def scaled(self, value: fx.Node, factor: float) -> fx.Node:
        return self("mul.Scalar", value, factor)

    def plus(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self("add.Tensor", a, b)


Build = Callable[[Writer], Any]


def program(build: Build) -> Program:
    return spmd_program(TP2, INPUTS, lambda builder: build(Writer(builder)), seed=3)


def becomes(build: Build) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A pass that returns these graphs for any input: rank by rank, in order."""
    target = program(build)
    called: list[fx.GraphModule] = []

    def rewrite(gm: fx.GraphModule) -> fx.GraphModule:
        called.append(target.graph_module(len(called) % target.world_size))
        return called[-1]

    return rewrite


def tensors(outputs: list[Any]) -> list[torch.Tensor]:
    return [value for value in outputs if isinstance(value, torch.Tensor)]
