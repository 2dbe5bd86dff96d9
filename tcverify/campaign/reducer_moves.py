"""Moves that make a graph smaller: fewer outputs, a later start, an earlier end, fewer nodes, fewer inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tcverify.campaign.reducer_facts import Facts
from tcverify.campaign.reducer_search import Search
from tcverify.campaign.reducer_sketch import Ref, Sketch, refs, result_of, substituted, with_result
from tcverify.campaign.reducer_values import may_replace, stand_ins
from tcverify.program import InputSpec

#: What stands in place of steps: an earlier step, an input to be added, or nothing where nobody reads it.
Replacements = Mapping[str, "Ref | InputSpec | None"]

#: Outputs that are tried alone.
MANY_OUTPUTS = 8

#: Inputs that are tried in place of one operand.
NEAREST = 3


def replaced(sketch: Sketch, mapping: Replacements, graphs: Sequence[int] | None = None) -> Sketch:
    """Return the sketch without the steps that `mapping` names (see `substituted`), in all graphs or in some."""
    new = tuple(
        substituted(graph, mapping) if graphs is None or i in graphs else graph for i, graph in enumerate(sketch.graphs)
    )
    added = [spec for spec in mapping.values() if isinstance(spec, InputSpec)]
    return replace(sketch, graphs=new, inputs=(*sketch.inputs, *added))


def with_results(sketch: Sketch, result: Callable[[int, Any], Any]) -> Sketch:
    """Return the sketch in which graph i returns `result(i, what it returns)`."""
    graphs = (with_result(graph, result(i, result_of(graph))) for i, graph in enumerate(sketch.graphs))
    return replace(sketch, graphs=tuple(graphs))


# ------------------------------------------------------------------------------------------------------------- outputs


def drop_outputs(search: Search) -> None:
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


def return_operands(search: Search) -> None:
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


def end_earlier(search: Search) -> None:
    """Find the earliest point at which the program may end, all values that are alive there being returned."""
    if not search.facts.aligned:
        return
    units = _units(search.facts)
    low, high = 0, len(units)
    while high - low > 1:
        middle = (low + high) // 2
        if search.attempt(_ended(search.facts, units[:middle])):
            high = middle
        else:
            low = middle


def start_later(search: Search) -> None:
    """Find the latest point at which the program may start, with inputs for the values that are needed from there on."""
    if not search.facts.aligned:
        return
    units = _units(search.facts)
    low, high = 0, len(units)
    while high - low > 1:
        middle = (low + high) // 2
        if search.attempt(_started(search, units[:middle])):
            low = middle
        else:
            high = middle


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
    border = tuple(Ref(name) for name in _border(facts, units))
    if not border:
        return None
    inside = {name for unit in units for name in unit}
    graphs = []
    for graph in facts.sketch.graphs:
        kept = tuple(step for step in graph if not step.calls or step.name in inside)
        graphs.append(with_result(kept, border))
    return replace(facts.sketch, graphs=tuple(graphs))


def _started(search: Search, units: list[list[str]]) -> Sketch | None:
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
    return replaced(sketch, mapping)


# --------------------------------------------------------------------------------------------------------------- nodes


def bypass_many(search: Search) -> None:
    """Bypass halves, quarters, … of all nodes at once, each by the first way that it can be."""

    def edit(names: list[str]) -> Sketch | None:
        mapping: dict[str, Ref | InputSpec | None] = {}
        for name in names:
            if search.facts.where(name):
                mapping.update(next(iter(_ways(search, name)), {}))
        return replaced(search.sketch, mapping) if mapping else None

    search.in_chunks(list(reversed(_computing(search.facts))), edit, least=2)


def bypass(search: Search) -> None:
    """Bypass single nodes, in every way that each can be."""
    for name in list(reversed(search.facts.calls)):
        if not search.facts.where(name):
            continue
        edits = (replaced(search.sketch, way) for way in _ways(search, name))
        if search.attempt(*edits) or search.facts.aligned:
            continue
        for graph in search.facts.where(name):
            if any(search.attempt(replaced(search.sketch, way, [graph])) for way in list(_ways(search, name))):
                break


def _computing(facts: Facts) -> list[str]:
    selections = {step.name for graph in facts.sketch.graphs for step in graph if step.selects}
    return [name for name in facts.calls if name not in selections]


def _ways(search: Search, name: str) -> Iterable[Replacements]:
    """Ways to do without a step: what is read in its place, or in place of the results that are selected from it."""
    facts = search.facts
    users = [user for i in facts.where(name) for user in facts.users[i][name]]
    if not users:
        yield {name: None}
        return
    if facts.types(name) is not None:
        yield from ({name: one} for one in _substitutes(search, name, name))
        return
    selections = list(dict.fromkeys(user.name for user in users if user.selects and user.reads[0] == name))
    if len(selections) < len({user.name for user in users}):
        return  # somebody reads all results
    options = [list(_substitutes(search, selected, name)) for selected in selections]
    if not all(options):
        return
    for number in range(max(map(len, options))):
        chosen = [listed[min(number, len(listed) - 1)] for listed in options]
        yield {name: None, **dict(zip(selections, chosen, strict=True))}


def _substitutes(search: Search, name: str, source: str) -> Iterable[Ref | InputSpec]:
    """What can be read in place of `name`: an operand of `source`, which makes it, an input, or a new input.

    It has the shape and dtype of `name` and is equal on all ranks on which `name` is.
    """
    facts, values = search.facts, search.values
    step = next(facts.steps[i][source] for i in facts.where(source))
    operands = step.reads
    if step.selects and operands and operands[0] in facts.steps[0]:
        operands = [*operands, *facts.steps[0][operands[0]].reads]
    seen = set()
    inputs = [spec.name for spec in facts.sketch.inputs]
    for number, other in enumerate((*operands, *inputs)):
        if other in seen or not facts.replaceable(name, other):
            continue
        if not may_replace(facts, values, name, other):
            continue
        seen.add(other)
        if number < len(operands) or len(seen) <= NEAREST:
            yield Ref(other)
    yield from stand_ins(facts, values, name)
    # Of another shape: what reads it must take that too.
    for other in operands:
        if other not in seen and facts.tensor(other) and may_replace(facts, values, name, other):
            yield Ref(other)


def read_earlier(search: Search) -> None:
    """Let calls read earlier values of equal type: inputs first, then what their operands are computed from."""
    for name in [*reversed(search.facts.calls), "output"]:
        for operand in _operands(search.facts, name):
            edits = [_rewired(search.sketch, name, operand, other) for other in _earlier(search, operand)]
            search.attempt(*edits)


def _operands(facts: Facts, name: str) -> list[str]:
    return list(dict.fromkeys(read for steps in facts.steps if name in steps for read in steps[name].reads))


def _earlier(search: Search, name: str) -> list[str]:
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


def drop_inputs(search: Search) -> None:
    """Drop inputs that nobody reads, all at once or one by one."""

    def unread() -> list[str]:
        facts = search.facts
        names = [spec.name for spec in facts.sketch.inputs]
        return [n for n in names if not any(facts.users[i][n] for i in facts.where(n))]

    search.in_chunks(unread(), lambda names: replaced(search.sketch, dict.fromkeys(names)))
    for name in unread():
        search.attempt(replaced(search.sketch, {name: None}))


def merge_inputs(search: Search) -> None:
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
        search.attempt(*(replaced(search.sketch, {name: Ref(other)}) for other in same[:NEAREST]))


__all__ = [
    "bypass", "bypass_many", "drop_inputs", "drop_outputs", "end_earlier", "merge_inputs", "read_earlier", "replaced",
    "return_operands", "start_later", "with_results",
]  # fmt: skip
