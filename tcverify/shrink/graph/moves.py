"""Moves inside a graph: fewer nodes, fewer inputs, earlier operands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from tcverify.program import InputSpec
from tcverify.shrink.graph.replacements import may_replace, stand_ins
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sketch import Ref, Replacements, Sketch, replace_steps
from tcverify.shrink.graph.step_facts import Facts

#: Earlier values, and inputs, that are tried in place of one value.
NEAREST = 3

#: How many calls back earlier values are looked for.
DEPTH = 3


# --------------------------------------------------------------------------------------------------------------- nodes


def bypass_many(search: SketchSearch) -> None:
    """Bypass halves, quarters, … of all nodes at once, each by the first way that it can be."""

    def edit(names: list[str]) -> Sketch | None:
        mapping: dict[str, Ref | InputSpec | None] = {}
        for name in names:
            if search.facts.where(name):
                mapping.update(next(iter(ways_around(search, name)), {}))
        return replace_steps(search.sketch, mapping) if mapping else None

    search.in_chunks(list(reversed(_computing(search.facts))), edit, least=2)


def bypass(search: SketchSearch, most: int | None = None) -> None:
    """Bypass single nodes, in every way that each can be.

    Args:
        most: ways that are tried for each; by default all.
    """
    for name in list(reversed(search.facts.calls)):
        if not search.facts.where(name):
            continue
        edits = (replace_steps(search.sketch, way) for way in islice(ways_around(search, name), most))
        if search.attempt(*edits) or search.facts.aligned:
            continue
        for graph in search.facts.where(name):
            ways = list(islice(ways_around(search, name), most))
            if any(search.attempt(replace_steps(search.sketch, way, [graph])) for way in ways):
                break


def _computing(facts: Facts) -> list[str]:
    selections = {step.name for graph in facts.sketch.graphs for step in graph if step.selects}
    return [name for name in facts.calls if name not in selections]


def ways_around(search: SketchSearch, name: str) -> Iterable[Replacements]:
    """Ways to remove a step: what is read in its place, or in place of the results that are selected from it."""
    facts = search.facts
    users = [user for i in facts.where(name) for user in facts.users[i][name]]
    if not users:
        yield {name: None}
        return
    if facts.types(name) is not None:
        yield from ({name: one} for one in substitutes(search, name, name))
        return
    selections = list(dict.fromkeys(user.name for user in users if user.selects and user.reads[0] == name))
    if len(selections) < len({user.name for user in users}):
        return  # all results are read together
    options = [list(substitutes(search, selected, name)) for selected in selections]
    if not all(options):
        return
    for number in range(max(map(len, options))):
        chosen = [listed[min(number, len(listed) - 1)] for listed in options]
        yield {name: None, **dict(zip(selections, chosen, strict=True))}


def substitutes(search: SketchSearch, name: str, source: str) -> Iterable[Ref | InputSpec]:
    """What can be read in place of `name`, a result of `source`: what `source` reads, or is computed from, an input, a new input.

    It is equal on all ranks on which `name` is, and of its shape and dtype; but what `source` reads may, at last, be of any.
    """
    facts, values = search.facts, search.values
    near, far = _ancestors(facts, name, source)
    fitting = [n for n in (*near, *far) if facts.replaceable(name, n)][:NEAREST]
    fitting += [spec.name for spec in facts.sketch.inputs if facts.replaceable(name, spec.name)][:NEAREST]
    fitting += [n for n in near if facts.tensor(n) and facts.precedes(n, name) and not facts.replaceable(name, n)]
    allowed = [n for n in dict.fromkeys(fitting) if may_replace(facts, values, name, n)]
    yield from (Ref(n) for n in allowed if facts.replaceable(name, n))
    yield from stand_ins(facts, values, name)
    yield from (Ref(n) for n in allowed if not facts.replaceable(name, n))


def _ancestors(facts: Facts, name: str, source: str) -> tuple[list[str], list[str]]:
    """What makes `name`'s operands, and what they are computed from, the nearest first and not far."""
    steps = next((facts.steps[i] for i in facts.where(name) if source in facts.steps[i]), None)
    if steps is None:
        return [], []  # a name that only graphs have in which the source is not
    seen = dict.fromkeys(steps[source].reads)
    if steps[source].selects and steps[source].reads:
        seen.update(dict.fromkeys(steps[steps[source].reads[0]].reads))
    near = list(seen)
    level = near
    for _ in range(DEPTH):
        level = [read for n in level for read in steps[n].reads if read not in seen]
        seen.update(dict.fromkeys(level))
    return near, list(seen)[len(near) :]


def read_earlier(search: SketchSearch) -> None:
    """Let calls read earlier values of equal type: inputs first, then what their operands are computed from."""
    for name in [*reversed(search.facts.calls), "output"]:
        for operand in _operands(search.facts, name):
            edits = [_rewired(search.sketch, name, operand, other) for other in _earlier(search, operand)]
            search.attempt(*edits)


def _operands(facts: Facts, name: str) -> list[str]:
    return list(dict.fromkeys(read for steps in facts.steps if name in steps for read in steps[name].reads))


def _earlier(search: SketchSearch, name: str) -> list[str]:
    facts, values = search.facts, search.values
    before = [spec.name for spec in facts.sketch.inputs]
    if facts.where(name) and facts.steps[facts.where(name)[0]][name].calls:
        before += facts.steps[facts.where(name)[0]][name].reads
    fitting = [b for b in dict.fromkeys(before) if facts.replaceable(name, b)]
    return [b for b in fitting if may_replace(facts, values, name, b)][:NEAREST]


def _rewired(sketch: Sketch, name: str, operand: str, other: str) -> Sketch:
    def leaf(value: Any) -> Any:
        return Ref(other) if value == Ref(operand) else value

    graphs = tuple(tuple(step.mapped(leaf) if step.name == name else step for step in graph) for graph in sketch.graphs)
    return replace(sketch, graphs=graphs)


# -------------------------------------------------------------------------------------------------------------- inputs


def drop_inputs(search: SketchSearch) -> None:
    """Drop unused inputs, all at once or one by one."""

    def unread() -> list[str]:
        facts = search.facts
        names = [spec.name for spec in facts.sketch.inputs]
        return [n for n in names if not any(facts.users[i][n] for i in facts.where(n))]

    search.in_chunks(unread(), lambda names: replace_steps(search.sketch, dict.fromkeys(names)))
    for name in unread():
        search.attempt(replace_steps(search.sketch, {name: None}))


def merge_inputs(search: SketchSearch) -> None:
    """Let inputs of one type and placement be one."""
    for name in [spec.name for spec in reversed(search.sketch.inputs)]:
        specs = {spec.name: spec for spec in search.sketch.inputs}
        if name not in specs:
            continue
        same = [
            other.name
            for other in specs.values()
            if other.placements == specs[name].placements and search.facts.replaceable(name, other.name)
        ]
        search.attempt(*(replace_steps(search.sketch, {name: Ref(other)}) for other in same[:NEAREST]))


__all__ = ["bypass", "bypass_many", "drop_inputs", "merge_inputs", "read_earlier", "substitutes", "ways_around"]
