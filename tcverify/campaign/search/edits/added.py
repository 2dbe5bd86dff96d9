"""Edits that add a call, of an op that the pass names or that programs have shown."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from tcverify.campaign.search.calls import CallPattern
from tcverify.campaign.search.editor import Editor, operands
from tcverify.campaign.search.edits.site import NEAREST, Edit, Site
from tcverify.ops import TensorSpec
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep, replace_steps

#: How the other operands of a call are chosen: new inputs, the value itself, or other values there are, the nearest first.
NEW, SAME = 0, 1


def _ways(pattern: CallPattern) -> range:
    return range(1 if len(pattern.types) == 1 else 2 + NEAREST)


def _chosen(
    site: Site, editor: Editor, pattern: CallPattern, hole: int, name: str, before: str | None, way: int
) -> list[Ref] | None:
    """Operands of a call that reads a value; None where this way chooses as another one does."""
    given = site.type(name)
    if given is None:
        return None
    made: list[Ref] = []
    differs = way == NEW
    for number, type_ in enumerate(pattern.types_for(hole, given)):
        fitting: list[str] = []
        if number == hole or (way == SAME and type_ == given):
            fitting = [name]
        elif way > SAME:
            fitting = [other for other in site.like(type_, before) if other != name][way - SAME - 1 :]
        if fitting:
            made.append(Ref(fitting[0]))
            differs = differs or number != hole
        else:
            made.append(editor.input(*type_))
    return made if differs else None


def _results(pattern: CallPattern) -> tuple[Any, ...]:
    return tuple(pattern.result) if isinstance(pattern.result, (tuple, list)) else (pattern.result,)


def _several(pattern: CallPattern) -> bool:
    return isinstance(pattern.result, (tuple, list))


def _selected(editor: Editor, made: Ref, pattern: CallPattern, index: int) -> Ref:
    return editor.call(operator.getitem, (made, index), {}, made.name) if _several(pattern) else made


# ---------------------------------------------------------------------------------------------------- one more reader


def read_value_again(site: Site) -> Iterator[Edit]:
    """Read any value once more, by each call, and return what comes of it."""
    for pattern, name in itertools.product(site.calls, site.values):
        given = site.type(name)
        for hole in range(len(pattern.types)):
            if given is not None:
                yield from (
                    Edit(partial(_read, site, pattern, hole, name, way), (name,), pattern.name)
                    for way in _ways(pattern)
                )


def _read(site: Site, pattern: CallPattern, hole: int, name: str, way: int) -> Sketch | None:
    editor = site.editor()
    given = site.type(name)
    refs = _chosen(site, editor, pattern, hole, name, None, way)
    if refs is None or given is None:
        return None
    made = pattern.add(editor, refs, pattern.types_for(hole, given)[0])
    editor.returns(*(_selected(editor, made, pattern, index) for index in range(len(_results(pattern)))))
    return editor.sketch()


# ----------------------------------------------------------------------------------------------------------- on an edge


def insert_call_on_edge(site: Site) -> Iterator[Edit]:
    """Put a call between a value and one of its readers, or all of them."""
    for pattern, name in itertools.product(site.calls, site.values):
        given = site.type(name)
        edges = site.edges.get(name, [])
        for hole, (index, result) in itertools.product(range(len(pattern.types)), enumerate(_results(pattern))):
            if given is None or not isinstance(result, TensorSpec):
                continue
            for edge, way in itertools.product([None, *edges] if len(edges) > 1 else [None], _ways(pattern)):
                yield Edit(
                    partial(_put, site, pattern, hole, name, index, edge, way),
                    (name, edge[0]) if edge else (name,),
                    pattern.name,
                )


def _put(
    site: Site, pattern: CallPattern, hole: int, name: str, index: int, edge: tuple[str, int] | None, way: int
) -> Sketch | None:
    editor = site.editor()
    given = site.type(name)
    before = next((value for value in site.values[site.values.index(name) + 1 :] if not site.is_input(value)), None)
    refs = _chosen(site, editor, pattern, hole, name, before, way)
    if refs is None or given is None:
        return None
    made = pattern.add(editor, refs, pattern.types_for(hole, given)[0], name)
    chosen = _selected(editor, made, pattern, index)
    if edge is None:
        editor.redirect(name, chosen, [made.name])
    else:
        editor.rewire(*edge, chosen)
    return editor.sketch()


# --------------------------------------------------------------------------------------------------- in place of a value


def replace_input_by_call(site: Site) -> Iterator[Edit]:
    """Let a call of new inputs make what was an input, or any value."""
    for pattern, name in itertools.product(site.calls, site.values):
        given = site.type(name)
        for index, result in enumerate(_results(pattern)):
            if given is not None and isinstance(result, TensorSpec):
                yield Edit(partial(_produce, site, pattern, name, index), (name,), pattern.name)


def _produce(site: Site, pattern: CallPattern, name: str, index: int) -> Sketch | None:
    given = site.type(name)
    types = pattern.types_making(index, given) if given is not None else None
    if types is None:
        return None
    editor = site.editor()
    made = pattern.add(editor, [editor.input(*type_) for type_ in types], types[0])
    _selected(editor, made, pattern, index)
    sketch = _first(editor)
    ref = Ref(editor.added[-1])
    if not site.is_input(name):
        return replace_steps(sketch, {name: ref})

    def leaf(value: Any) -> Any:
        return ref if isinstance(value, Ref) and value.name == name else value

    graphs = tuple(
        tuple(step.mapped(leaf) if name in step.reads else step for step in graph if step.name != name)
        for graph in sketch.graphs
    )
    return replace(sketch, graphs=graphs, inputs=tuple(spec for spec in sketch.inputs if spec.name != name))


def _first(editor: Editor) -> Sketch:
    """Put the calls that were added before all others, so that all others may read them."""

    def ordered(graph: tuple[SketchStep, ...]) -> tuple[SketchStep, ...]:
        given = [step for step in graph if step.op == "placeholder"]
        new = [step for step in graph if step.name in editor.added and step.op != "placeholder"]
        rest = [step for step in graph if step.name not in editor.added and step.op != "placeholder"]
        return (*given, *new, *rest)

    sketch = editor.sketch()
    return replace(sketch, graphs=tuple(map(ordered, sketch.graphs)))


# ------------------------------------------------------------------------------------------------------ in place of an op


def change_op(site: Site) -> Iterator[Edit]:
    """Put another op in the place of a step: it reads what fits of the step's operands, and new inputs or the first one again."""
    for step, pattern in itertools.product(site.steps, site.calls):
        names = [name for name in dict.fromkeys(operands(step)) if site.type(name) is not None]
        if pattern.target is step.target or not names:
            continue
        results = range(len(_results(pattern)))
        selected = any(site.all_steps[reader].selects for reader, _ in site.edges.get(step.name, []))
        for way in ("first", "again", "second") if len(pattern.types) > 1 else ("first",):
            for index in results if _several(pattern) and not selected else (0,):
                yield Edit(partial(_exchange, site, step, pattern, names, way, index), (step.name,), pattern.name)


def _exchange(
    site: Site, step: SketchStep, pattern: CallPattern, names: list[str], way: str, index: int
) -> Sketch | None:
    given = site.type(names[0])
    if given is None:
        return None
    editor = site.editor()
    types = pattern.types_for(0, given)
    left = list(names)
    chosen: list[Ref] = []
    for number, type_ in enumerate(types):
        fitting = [name for name in left if site.type(name) == type_]
        if fitting and not (way == "second" and number == 1):
            left.remove(fitting[0])
            chosen.append(Ref(fitting[0]))
        elif way == "again" and type_ == given:
            chosen.append(Ref(names[0]))
        else:
            chosen.append(editor.input(*type_))
    made = pattern.add(editor, chosen, types[0], step.name)
    selections = [reader for reader, _ in site.edges.get(step.name, []) if site.all_steps[reader].selects]
    if selections and not _several(pattern):
        for one in selections:
            editor.redirect(one, made)
    editor.redirect(step.name, made if selections else _selected(editor, made, pattern, index), [made.name])
    return editor.sketch()


__all__ = ["change_op", "insert_call_on_edge", "read_value_again", "replace_input_by_call"]
