"""Edits of who reads what: values returned, read once more, taken in place of others; steps repeated, moved, done in place."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tcverify.campaign.search.calls import Type
from tcverify.campaign.search.editor import operands, with_operand
from tcverify.campaign.search.edits.site import Edit, Site
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep, refs, result_of

#: Values that are tried as one operand.
MANY = 8


def return_more(site: Site) -> Iterator[Edit]:
    """Return any value besides, tuples whole."""
    result = {name for graph in site.facts.sketch.graphs for name in refs(result_of(graph))}
    yield from (Edit(partial(_return, site, name), (name,)) for name in reversed(site.values) if name not in result)


def _return(site: Site, name: str) -> Sketch:
    editor = site.editor()
    editor.returns(Ref(name))
    return editor.sketch()


def return_less(site: Site) -> Iterator[Edit]:
    """Return one value less."""
    names = list(dict.fromkeys(name for graph in site.facts.sketch.graphs for name in refs(result_of(graph))))
    if len(names) > 1:
        yield from (Edit(partial(_return_less, site, name), (name,)) for name in names)


def _return_less(site: Site, name: str) -> Sketch | None:
    graphs = []
    for graph in site.facts.sketch.graphs:
        result = result_of(graph)
        if not isinstance(result, tuple):
            return None
        kept = tuple(value for value in result if value != Ref(name))
        graphs.append((*graph[:-1], replace(graph[-1], args=(kept,))))
    return replace(site.facts.sketch, graphs=tuple(graphs))


def change_operand(site: Site) -> Iterator[Edit]:
    """Let a step read another value of the same type, or a new input, also one with a dim more or less, which may broadcast."""
    for step in site.steps:
        for slot, name in enumerate(operands(step)):
            given = site.type(name)
            if given is None:
                continue
            others = (other for other in site.like(given, step.name, MANY) if other != name)
            yield from (Edit(partial(_rewire, site, step.name, slot, other), (step.name, name)) for other in others)
            shape, dtype = given
            shapes = [shape] if not site.is_input(name) or len(site.edges[name]) > 1 else []
            shapes += [(shape[0], *shape), shape[1:]] if shape else []
            for new in shapes:
                yield Edit(partial(_read_new, site, step.name, slot, (new, dtype)), (step.name, name))


def _rewire(site: Site, reader: str, slot: int, other: str) -> Sketch:
    editor = site.editor()
    editor.rewire(reader, slot, Ref(other))
    return editor.sketch()


def _read_new(site: Site, reader: str, slot: int, type_: Type) -> Sketch:
    editor = site.editor()
    editor.rewire(reader, slot, editor.input(*type_))
    return editor.sketch()


def swap_operands(site: Site) -> Iterator[Edit]:
    """Swap two operands of a step."""
    for step in site.steps:
        names = operands(step)
        for a, b in itertools.combinations(range(len(names)), 2):
            if names[a] != names[b]:
                yield Edit(partial(_swap, site, step, (a, names[b]), (b, names[a])), (step.name, names[a], names[b]))


def _swap(site: Site, step: SketchStep, *slots: tuple[int, str]) -> Sketch:
    editor = site.editor()
    for slot, name in slots:
        editor.rewire(step.name, slot, Ref(name))
    return editor.sketch()


def repeat_step(site: Site) -> Iterator[Edit]:
    """Do a step twice: beside each other, for the result or for one place where it is read, or one after the other."""
    for step in site.steps:
        if site.type(step.name) is not None:
            yield Edit(partial(_repeat, site, step, None), (step.name,))
        edges = site.edges.get(step.name, [])
        yield from (Edit(partial(_repeat, site, step, edge), (step.name, edge[0])) for edge in edges)
        for slot, name in enumerate(operands(step)):
            if site.type(name) is not None and site.type(name) == site.type(step.name):
                yield Edit(partial(_repeat_behind, site, step, slot), (step.name,))


def _repeat(site: Site, step: SketchStep, edge: tuple[str, int] | None) -> Sketch:
    editor = site.editor()
    again = editor.call(step.target, step.args, step.kwargs, step.name)
    if edge is None:
        editor.returns(again)
    else:
        editor.rewire(*edge, again)
    return editor.sketch()


def _repeat_behind(site: Site, step: SketchStep, slot: int) -> Sketch:
    editor = site.editor()
    behind = with_operand(step, slot, Ref(step.name))
    again = editor.call(step.target, behind.args, behind.kwargs, step.name)
    editor.redirect(step.name, again)
    return editor.sketch()


def change_selected_result(site: Site) -> Iterator[Edit]:
    """Select another one of several results; select one where all are read."""
    for step in site.all_steps.values():
        if step.selects and len(step.args) > 1 and type(step.args[1]) is int:
            yield from (
                Edit(partial(_select, site, step, index), (step.name,)) for index in range(3) if index != step.args[1]
            )
        real = [typing.real.get(step.name) for typing in site.facts.typings if step.name in typing.real]
        if not real or not isinstance(real[0], tuple):
            continue
        for (reader, slot), index in itertools.product(site.edges.get(step.name, []), range(len(real[0]))):
            if not site.all_steps[reader].selects:
                yield Edit(partial(_select_on_edge, site, step.name, reader, slot, index), (step.name, reader))


def _select(site: Site, step: SketchStep, index: int) -> Sketch:
    editor = site.editor()
    editor.change(replace(step, args=(step.args[0], index)))
    return editor.sketch()


def _select_on_edge(site: Site, name: str, reader: str, slot: int, index: int) -> Sketch:
    editor = site.editor()
    editor.rewire(reader, slot, editor.call(operator.getitem, (Ref(name), index), {}, name))
    return editor.sketch()


#: How a value is written that has been read.
_WRITES = ("in place", "through a view", "as out")


def write_into_value(site: Site) -> Iterator[Edit]:
    """Write into a value: at once, at the end, or behind what reads it; then also through a view of it, or as an `out=`."""
    for name in reversed(site.values):
        if site.type(name) is None:
            continue
        yield from (Edit(partial(_write, site, name, at_once), (name,)) for at_once in (True, False))
        for reader in dict.fromkeys(reader for reader, _ in site.edges.get(name, [])):
            if site.all_steps[reader].calls:
                yield from (Edit(partial(_write_behind, site, name, reader, how), (name, reader)) for how in _WRITES)


def _write(site: Site, name: str, at_once: bool) -> Sketch:
    editor = site.editor()
    if at_once:
        editor.returns(editor.call(torch.ops.aten.add_.Tensor, (Ref(name), 1), {}, name))
    else:
        editor.returns(editor.call(torch.ops.aten.mul_.Tensor, (Ref(name), 2), {}))
    return editor.sketch()


def _write_behind(site: Site, name: str, reader: str, how: str) -> Sketch | None:
    """Write a value that has been read. What is written is not returned: later readers see it, or nothing may."""
    editor, given = site.editor(), site.type(name)
    if how == "through a view":
        if given is None or not given[0]:
            return None
        first = editor.call(torch.ops.aten.slice.Tensor, (Ref(name), 0, 0, 1), {}, name)
        editor.call(torch.ops.aten.add_.Tensor, (first, 1), {}, reader)
    elif how == "as out":
        editor.call(torch.ops.aten.mul.out, (Ref(name), Ref(name)), {"out": Ref(name)}, reader)
    else:
        editor.call(torch.ops.aten.add_.Tensor, (Ref(name), 1), {}, reader)
    return editor.sketch()


def move_step(site: Site) -> Iterator[Edit]:
    """Let a step run as late as it can, or as early."""
    yield from (
        Edit(partial(_move, site, step, late), (step.name,))
        for step, late in itertools.product(site.steps, (True, False))
    )


def _move(site: Site, step: SketchStep, late: bool) -> Sketch:
    graphs = []
    for graph in site.facts.sketch.graphs:
        own = next((one for one in graph if one.name == step.name), None)
        rest = [one for one in graph if one.name != step.name]
        if own is None:
            graphs.append(graph)
            continue
        if late:
            at = next(i for i, one in enumerate(rest) if step.name in one.reads or one.op == "output")
        else:
            needed = [i for i, one in enumerate(rest) if one.name in own.reads or one.op == "placeholder"]
            at = max(needed, default=-1) + 1
        graphs.append((*rest[:at], own, *rest[at:]))
    return replace(site.facts.sketch, graphs=tuple(graphs))


__all__ = [
    "change_operand",
    "change_selected_result",
    "move_step",
    "repeat_step",
    "return_less",
    "return_more",
    "swap_operands",
    "write_into_value",
]
