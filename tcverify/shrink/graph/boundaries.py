"""Moves at both ends of a graph: fewer outputs, a later start, an earlier end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tcverify.program import InputSpec
from tcverify.shrink.graph.async_groups import waits_of
from tcverify.shrink.graph.replacements import stand_ins
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sketch import Ref, Sketch, refs, replace_steps, result_of, with_result, with_results
from tcverify.shrink.graph.step_facts import Facts

#: Outputs that are tried alone.
MANY_OUTPUTS = 8


# ------------------------------------------------------------------------------------------------------------- outputs


def drop_outputs(search: SketchSearch) -> None:
    """Keep one output, or as few as possible."""
    count = max((len(_leaves(result_of(graph))) for graph in search.sketch.graphs), default=0)
    if count < 2:
        return

    def alone(kept: int) -> Sketch:
        return with_results(search.sketch, lambda _, result: _picked(result, {kept}))

    if search.attempt(*map(alone, range(min(count, MANY_OUTPUTS)))):
        return

    def without(gone: list[int]) -> Sketch | None:
        # Counted from the end, so that what is dropped behind them does not move them.
        def pick(_: int, result: Any) -> Any:
            total = len(_leaves(result))
            return _picked(result, {i for i in range(total) if total - 1 - i not in gone})

        return with_results(search.sketch, pick)

    for size in (count // 2, count // 4, 1):
        start = 0
        while size and start < max(len(_leaves(result_of(graph))) for graph in search.sketch.graphs):
            if not search.attempt(without(list(range(start, start + size)))):
                start += size


def _leaves(result: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    found: list[Any] = []
    pending = [result]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending += reversed(value)
        elif isinstance(value, dict):
            pending += reversed(value.values())
        else:
            found.append(value)
    return found


def _picked(result: Any, kept: set[int]) -> Any:
    """Return the result with these leaves alone; containers that become empty go."""
    numbers = itertools.count()
    empty = object()

    def pick(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            items = [made for item in value if (made := pick(item)) is not empty]
            made_container: Any = items if isinstance(value, list) else tuple(items)
            return made_container if items else empty
        if isinstance(value, dict):
            entries = {key: made for key, item in value.items() if (made := pick(item)) is not empty}
            return entries or empty
        return value if next(numbers) in kept else empty

    picked = pick(result)
    return () if picked is empty else picked


def return_operands(search: SketchSearch) -> None:
    """Return what an output is computed from in place of it, so that it goes."""
    again = True
    while again:
        again = False
        for name in dict.fromkeys(n for graph in search.sketch.graphs for n in refs(result_of(graph))):
            if search.attempt(_peeled(search.facts, name)):
                again = True
                break


def _peeled(facts: Facts, name: str) -> Sketch | None:
    def operands(i: int, result: Any) -> Any:
        if name not in facts.steps[i] or not facts.steps[i][name].calls:
            return result
        step = facts.steps[i][name]
        source = facts.steps[i].get(step.reads[0]) if step.selects and step.reads else None
        read = source.reads if source is not None and source.calls else step.reads
        others = [leaf for leaf in _leaves(result) if leaf != Ref(name)]
        new = [Ref(r) for r in read if facts.steps[i][r].calls and Ref(r) not in others]
        return (*others, *new)

    return with_results(facts.sketch, operands)


# ---------------------------------------------------------------------------------------------------------- both ends


def end_earlier(search: SketchSearch) -> None:
    """Find the earliest point at which the program may end, all values that are alive there being returned."""
    if not search.facts.aligned:
        return
    units = _units(search.facts)
    _approach(search, len(units), 0, lambda point: _ended(search.facts, units[:point]))


def start_later(search: SketchSearch) -> None:
    """Find the latest point at which the program may start, with inputs for the values that are needed from there on."""
    if not search.facts.aligned:
        return
    units = _units(search.facts)
    _approach(search, 0, len(units), lambda point: _started(search, units[:point]))


def _approach(search: SketchSearch, good: int, bad: int, cut: Callable[[int], Sketch | None]) -> None:
    """Go from a point at which the program may be cut as far as possible towards one at which it may not, by halves."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        if search.attempt(cut(middle)):
            good = middle
        else:
            bad = middle


def _units(facts: Facts) -> list[list[str]]:
    """The calls of the program in order, each with the selections of its results."""
    units: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for step in facts.sketch.graphs[0] if facts.sketch.graphs else ():
        if step.calls:
            read = step.reads
            owner[step.name] = owner[read[0]] if step.selects and read and read[0] in owner else step.name
            units.setdefault(owner[step.name], []).append(step.name)
    return list(units.values())


def _border(facts: Facts, units: list[list[str]]) -> list[str]:
    """The values that these units make and others, or the output, read."""
    inside = {name for unit in units for name in unit}
    users = facts.users[0]
    return [n for unit in units for n in unit if any(user.name not in inside for user in users.get(n, ()))]


def _ended(facts: Facts, units: list[list[str]]) -> Sketch | None:
    units = [*units, waits_of(facts, {name for unit in units for name in unit})]
    border = tuple(Ref(name) for name in _border(facts, units))
    if not border:
        return None
    inside = {name for unit in units for name in unit}
    graphs = []
    for graph in facts.sketch.graphs:
        kept = tuple(step for step in graph if not step.calls or step.name in inside)
        graphs.append(with_result(kept, border))
    return replace(facts.sketch, graphs=tuple(graphs))


def _started(search: SketchSearch, units: list[list[str]]) -> Sketch | None:
    facts = search.facts
    mapping: dict[str, Ref | InputSpec | None] = {name: None for unit in units for name in unit}
    for name in _border(facts, units):
        specs = stand_ins(facts, search.values, name)
        if all(user.op == "output" for user in facts.users[0][name]):
            continue
        if not specs:
            return None
        mapping[name] = specs[0]
    inside = {Ref(name) for name in mapping}

    def rest(_: int, result: Any) -> Any:
        return _picked(
            result, {i for i, leaf in enumerate(_leaves(result)) if not isinstance(leaf, Ref) or leaf not in inside}
        )

    sketch = with_results(facts.sketch, rest)
    if any(not _leaves(result_of(graph)) for graph in sketch.graphs):
        return None
    return replace_steps(sketch, mapping)


__all__ = ["drop_outputs", "end_earlier", "return_operands", "start_later"]
