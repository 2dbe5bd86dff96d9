"""Writes programs in host IR by hand: one graph per rank, ranks' inputs all different."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tcverify.execution import Run
from tcverify.program import VARYING, InputSpec, Mesh, Program, RankBinding, Recipe
from tcverify.program.builder import GraphBuilder
from tests.support.naive_layouts import same

#: Divisible by one to four ranks in both dims.
SHAPE = (12, 12)


class Host(GraphBuilder):
    """A builder of one rank's graph.

    Attributes:
        me: the rank.
        x: its input, [12, 12].
        dtype: of the input.
    """

    me: int
    x: fx.Node
    dtype: torch.dtype

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        return self.call("aten::empty.memory_format", list(shape), dtype=dtype or self.dtype)

    def post(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.call(f"host_ir::{op}", *args, **kwargs)

    def wait(self, posted: fx.Node) -> fx.Node:
        self.call("host_ir::wait", posted)
        return posted


Build = Callable[[Host], Sequence[fx.Node]]


def host_program(world_size: int, build: Build, dtype: torch.dtype = torch.float32) -> Program:
    """A program of which each rank runs what `build` writes for it, and returns its nodes."""
    mesh = Mesh.grid({"w": world_size})
    recipe = (
        Recipe() if dtype.is_floating_point else Recipe("mask") if dtype == torch.bool else Recipe("integers", 100.0)
    )
    spec = InputSpec("x", SHAPE, dtype, (("w", VARYING),), recipe)
    graphs = []
    for rank in range(world_size):
        host = Host(mesh, {"x": spec}, rank)
        host.me, host.x, host.dtype = rank, host.input("x"), dtype
        graphs.append(host.finish(tuple(build(host))))
    ranks = tuple(RankBinding(rank, {}) for rank in range(world_size))
    return Program(mesh, tuple(graphs), ranks, (spec,))


def inputs(program: Program) -> dict[int, torch.Tensor]:
    """What each rank is given, in the numbers that programs are run in."""
    values = {rank: program.values(rank)[0] for rank in range(program.world_size)}
    return {rank: value.double() if value.is_floating_point() else value for rank, value in values.items()}


def check(run: Run, expected: dict[int, torch.Tensor], *, exact: bool = True) -> None:
    """Every rank returns what is expected of it, and nothing else."""
    assert run.finished, run.why
    for result in run.ranks:
        found = [tensor for tensor in result.outputs if tensor.numel()]
        assert len(found) == (result.rank in expected), (result.rank, [t.shape for t in found])
        if result.rank in expected and exact:
            assert same(found, expected[result.rank]), result.rank
        elif result.rank in expected:
            torch.testing.assert_close(found[0], expected[result.rank])
