"""Writes graphs with asynchronous collectives by hand, moves their nodes about, and asks checks what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.program import Contract, InputSpec, Mesh, Program
from tcverify.program.finding import Doubt, Finding
from tcverify.program.graph import copy_graph
from tests.support.hand_written import SQUARES, Writing, written

DP2 = Mesh.grid({"dp": 2})
DP2_TP2 = Mesh.grid({"dp": 2, "tp": 2})


class Functional(Writing):
    """A builder of functional collectives."""

    def start(self, value: Any, group: str = "dp", kind: str = "all_reduce", cost_s: float | None = None) -> fx.Node:
        arguments = {
            "all_gather_into_tensor": (2, group),
            "reduce_scatter_tensor": ("sum", 2, group),
            "all_to_all_single": ([2, 2], [2, 2], group),
        }
        more = arguments.get(kind, ("sum", group))
        return self.work(f"_c10d_functional::{kind}", value, *more, cost_s=cost_s)

    def wait(self, value: Any) -> fx.Node:
        return self.call("_c10d_functional::wait_tensor", value)

    def add_(self, a: Any, b: Any, cost_s: float | None = None) -> fx.Node:
        return self.work("aten::add_.Tensor", a, b, cost_s=cost_s)


Build = Callable[[Functional], Any]


def program(*builds: Build, mesh: Mesh = DP2, inputs: Sequence[InputSpec] = SQUARES) -> Program:
    """A program of these graphs: one for all ranks, or one per rank."""
    return written(Functional, builds, mesh, inputs)


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
