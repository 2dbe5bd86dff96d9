"""Programs whose graphs are written by hand, node by node, dead ones included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import fx

from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, RankBinding

SQUARES = (InputSpec("x", (4, 4)), InputSpec("y", (4, 4)))


class Keeping(GraphBuilder):
    """A builder that keeps dead nodes."""

    def finish(self, result: Any) -> fx.Graph:
        self._graph.output(result)
        return self._graph


class Writing(Keeping):
    """Short names for compute, with costs where they are given.

    Attributes:
        x, y: the first and the last input, both [4, 4] unless the program says otherwise.
    """

    x: fx.Node
    y: fx.Node

    def mm(self, a: Any, b: Any = None, cost_s: float | None = None) -> fx.Node:
        return self.work("aten::mm", a, self.y if b is None else b, cost_s=cost_s)

    def relu(self, a: Any, cost_s: float | None = None) -> fx.Node:
        return self.work("aten::relu", a, cost_s=cost_s)

    def add(self, a: Any, b: Any, cost_s: float | None = None) -> fx.Node:
        return self.work("aten::add.Tensor", a, b, cost_s=cost_s)

    def work(self, op: str, *args: Any, cost_s: float | None = None) -> fx.Node:
        node = self.call(op, *args)
        if cost_s is not None:
            node.meta["cost_s"] = cost_s
        return node


W = TypeVar("W", bound=Writing)


def written(
    kind: type[W], builds: Sequence[Callable[[W], Any]], mesh: Mesh, inputs: Sequence[InputSpec] = SQUARES
) -> Program:
    """A program of these graphs: the last one is that of all further ranks."""
    builders: list[W] = []
    graphs = []
    for rank, build in enumerate(builds):
        builder = kind(mesh, {spec.name: spec for spec in inputs}, rank)
        nodes = [builder.input(spec.name) for spec in inputs]
        builder.x, builder.y = nodes[0], nodes[-1]
        graphs.append(builder.finish(build(builder)))
        builders.append(builder)
    which = [min(rank, len(builds) - 1) for rank in range(mesh.world_size)]
    bindings = tuple(RankBinding(i, builders[i].bindings(rank)) for rank, i in enumerate(which))
    return Program(mesh, tuple(graphs), bindings, tuple(inputs))
