"""Writes graphs with asynchronous collectives by hand, moves their nodes about, and asks checks what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.program import Contract, GraphBuilder, InputSpec, Mesh, Program, RankBinding
from tcverify.program.finding import Doubt, Finding
from tcverify.program.graph import copy_graph

DP2 = Mesh.grid({"dp": 2})
DP2_TP2 = Mesh.grid({"dp": 2, "tp": 2})
INPUTS = tuple(InputSpec(name, (4, 4)) for name in ("x", "y"))


class Functional(GraphBuilder):
    """A builder of functional collectives, which keeps dead nodes.

    Attributes:
        x, y: the inputs, both [4, 4].
    """

    x: fx.Node
    y: fx.Node

    def start(self, value: Any, group: str = "dp", kind: str = "all_reduce", cost_s: float | None = None) -> fx.Node:
        arguments = {"all_gather_into_tensor": (2, group), "reduce_scatter_tensor": ("sum", 2, group)}
        more = arguments.get(kind, ("sum", group))
        return self.timed(self.call(f"_c10d_functional::{kind}", value, *more), cost_s)

    def wait(self, value: Any) -> fx.Node:
        return self.call("_c10d_functional::wait_tensor", value)

    def mm(self, a: Any, b: Any = None, cost_s: float | None = None) -> fx.Node:
        return self.timed(self.call("aten::mm", a, self.y if b is None else b), cost_s)

    def relu(self, a: Any, cost_s: float | None = None) -> fx.Node:
        return self.timed(self.call("aten::relu", a), cost_s)

    def add(self, a: Any, b: Any, cost_s: float | None = None) -> fx.Node:
        return self.timed(self.call("aten::add.Tensor", a, b), cost_s)

    def add_(self, a: Any, b: Any, cost_s: float | None = None) -> fx.Node:
        return self.timed(self.call("aten::add_.Tensor", a, b), cost_s)

    @staticmethod
    def timed(node: fx.Node, cost_s: float | None) -> fx.Node:
        if cost_s is not None:
            node.meta["cost_s"] = cost_s
        return node

    def finish(self, result: Any) -> fx.Graph:
        self._graph.output(result)
        return self._graph


Build = Callable[[Functional], Any]


def program(*builds: Build, mesh: Mesh = DP2, inputs: Sequence[InputSpec] = INPUTS) -> Program:
    """A program of these graphs: one for all ranks, or one per rank."""
    made: list[Functional] = []
    graphs = []
    for i, build in enumerate(builds):
        builder = Functional(mesh, {spec.name: spec for spec in inputs}, i)
        nodes = [builder.input(spec.name) for spec in inputs]
        builder.x, builder.y = nodes[0], nodes[-1]
        graphs.append(builder.finish(build(builder)))
        made.append(builder)
    which = [min(rank, len(builds) - 1) for rank in range(mesh.world_size)]
    bindings = tuple(RankBinding(i, made[i].bindings(rank)) for rank, i in enumerate(which))
    return Program(mesh, tuple(graphs), bindings, tuple(inputs))


def edited(made: Program, edit: Callable[[fx.Graph, dict[str, fx.Node]], Any]) -> Program:
    """The program with copies of its graphs, each after an edit that is given its nodes by name."""
    graphs = []
    for graph in made.graphs:
        copy = copy_graph(graph)
        edit(copy, {node.name: node for node in copy.nodes})
        graphs.append(copy)
    return replace(made, graphs=tuple(graphs))


def moved(made: Program, name: str, *, before: str) -> Program:
    """The program with one node moved."""
    return edited(made, lambda graph, nodes: nodes[before].prepend(nodes[name]))


def reordered(made: Program, order: Sequence[str]) -> Program:
    """The program with its calls in this order."""

    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        for name in order:
            graph.output_node().prepend(nodes[name])

    return edited(made, edit)


def calls(made: Program) -> list[str]:
    return [node.name for node in made.graphs[0].nodes if node.op == "call_function"]


def judge(check: str, original: Program, rewritten: Program, **promises: Any) -> list[Finding]:
    """What a check finds; it has no doubts."""
    found = CHECKS[check](Evidence(Pair(original, rewritten, changed=True), Contract(**promises)))
    assert not [said for said in found if isinstance(said, Doubt)], found
    return [said for said in found if isinstance(said, Finding)]


def kinds(check: str, original: Program, rewritten: Program, **promises: Any) -> list[str]:
    return [finding.kind for finding in judge(check, original, rewritten, **promises)]


def empty(b: Functional, *shape: int) -> fx.Node:
    return b.call("aten::empty.memory_format", list(shape), dtype=torch.float32)
