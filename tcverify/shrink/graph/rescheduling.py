"""Moves that remove a node and change something else with it, in programs with timing.

A scheduling pass produces another schedule when a node is removed: overlaps with it disappear, and with them a finding about
the schedule of which the node was not the cause. So in small programs a node is removed together with an edge, so that
the nodes that it separated can overlap, or with plain costs of all kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from tcverify.program import InputSpec
from tcverify.shrink.graph.moves import ways_around
from tcverify.shrink.graph.replacements import stand_ins
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sketch import Ref, Replacements, Sketch, SketchStep, replace_steps, result_of, with_results
from tcverify.shrink.graph.timing import LONG, SHORT, with_costs

#: Compute nodes of the largest programs on which this is tried.
MOST_NODES = 6

#: Ways to do without a node that are tried.
MOST_WAYS = 2


def bypass_rescheduled(search: SketchSearch) -> None:
    """Bypass single nodes, each with one edge cut, or with other costs."""
    for edits in (_with_other_costs, _with_an_edge_cut):
        for name in list(reversed(search.facts.calls)):
            if not _is_small(search.sketch) or not search.facts.aligned:
                return
            if search.facts.where(name):
                for way in list(islice(ways_around(search, name), MOST_WAYS)):
                    if search.attempt(*edits(search, way)):
                        break


def _is_small(sketch: Sketch) -> bool:
    timed = sketch.streams is not None or any("cost_s" in step.meta for graph in sketch.graphs for step in graph)
    return timed and all(sum(map(_works, graph)) <= MOST_NODES for graph in sketch.graphs)


def _works(step: SketchStep) -> bool:
    return step.calls and not step.selects


# --------------------------------------------------------------------------------------------------------------- costs


def _with_other_costs(search: SketchSearch, way: Replacements) -> Iterator[Sketch]:
    """All costs equal; each in turn shorter than the others, then each in turn longer."""
    shorter = replace_steps(search.sketch, way)
    names = [step.name for step in shorter.graphs[0] if _works(step)]
    yield with_costs(shorter, lambda _: LONG)
    for name in names:
        yield with_costs(shorter, lambda step, name=name: SHORT if step.name == name else LONG)  # type: ignore[misc]
    for name in names:
        yield with_costs(shorter, lambda step, name=name: LONG if step.name == name else SHORT)  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------------- edges


def _with_an_edge_cut(search: SketchSearch, way: Replacements) -> Iterator[Sketch]:
    """One operand of a call a new input; what was read there is returned where nothing else reads it."""
    facts = search.facts
    shorter = replace_steps(search.sketch, way)
    steps = {step.name: step for step in shorter.graphs[0]}
    for reader in [step for step in shorter.graphs[0] if step.calls]:
        for operand in reader.reads:
            if operand not in steps or not facts.where(operand):  # it comes in place of what goes
                continue
            others = [step for step in steps.values() if operand in step.reads and step is not reader]
            if not steps[operand].calls and not others:
                continue
            for spec in stand_ins(facts, search.values, operand)[:1]:
                yield _cut(shorter, reader.name, operand, spec, returned=not others)


def _cut(sketch: Sketch, reader: str, operand: str, spec: InputSpec, *, returned: bool) -> Sketch:
    def leaf(value: Any) -> Any:
        return Ref(spec.name) if value == Ref(operand) else value

    def changed(graph: tuple[SketchStep, ...]) -> tuple[SketchStep, ...]:
        steps = tuple(step.mapped(leaf) if step.name == reader else step for step in graph)
        first = sum(step.op == "placeholder" for step in steps)
        return (*steps[:first], SketchStep(spec.name, "placeholder", spec.name, ()), *steps[first:])

    graphs = tuple(changed(graph) for graph in sketch.graphs)
    cut = replace(sketch, graphs=graphs, inputs=(*sketch.inputs, spec))
    return with_results(cut, lambda i, _: _joined(result_of(cut.graphs[i]), operand)) if returned else cut


def _joined(result: Any, name: str) -> tuple[Any, ...]:
    own = result if isinstance(result, tuple) else (result,)
    return (*own, Ref(name))


__all__ = ["bypass_rescheduled"]
