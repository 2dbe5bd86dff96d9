"""The ways to write the arguments of a step that mean the same; see `ops.equivalent_arguments`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch.fx.node import map_aggregate

from tcverify.ops import equivalent_arguments
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep
from tcverify.shrink.graph.step_facts import Facts


def forms_of(facts: Facts, graph: int, step: SketchStep) -> dict[int, list[Any]]:
    """By position, the equivalent values of an argument, the plainest first."""
    if step.op != "call_function" or not step.args:
        return {}
    real = facts.typings[graph].real
    operand = map_aggregate(step.args[0], lambda one: real.get(one.name) if isinstance(one, Ref) else one)
    return equivalent_arguments(step.target, step.args, operand)


def with_plain_arguments(facts: Facts, only: Collection[str] | None = None) -> Sketch:
    """Write all arguments in the plainest way, or those of the steps named."""

    def plain(graph: int, step: SketchStep) -> SketchStep:
        if only is not None and step.name not in only:
            return step
        args = list(step.args)
        for place, ways in forms_of(facts, graph, step).items():
            args[place] = ways[0]
        return step if tuple(args) == step.args else replace(step, args=tuple(args))

    graphs = enumerate(facts.sketch.graphs)
    return replace(facts.sketch, graphs=tuple(tuple(plain(i, step) for step in graph) for i, graph in graphs))


__all__ = ["forms_of", "with_plain_arguments"]
