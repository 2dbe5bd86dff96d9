"""Edits that join two kernels: one reads what the other makes, or stands within it; or a kernel with a part of itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.fx.node import map_aggregate

from tcverify.campaign.search.calls import EditDoesNotFit
from tcverify.campaign.search.editor import Editor
from tcverify.campaign.search.edits.site import Edit, Site
from tcverify.program import RankConstant
from tcverify.shrink.graph.sketch import Ref, Sketch, refs, result_of
from tcverify.shrink.graph.step_facts import Facts


def feed_into_kernel(site: Site) -> Iterator[Edit]:
    """Let another kernel read a value: a result goes into the other kernel in place of being returned."""
    yield from (Edit(partial(_feed, site, other, name, hole, False), (name,)) for other, name, hole in _ways(site))


def nest_kernel(site: Site) -> Iterator[Edit]:
    """Let all that read a value read what another kernel makes of it."""
    for other, name, hole in _ways(site):
        if name in site.edges and any(site.all_steps[reader].op != "output" for reader, _ in site.edges[name]):
            yield Edit(partial(_feed, site, other, name, hole, True), (name,))


def _ways(site: Site) -> Iterator[tuple[Facts, str, str]]:
    """Another kernel, a value, and the input of the other kernel that it may stand for."""
    for other in site.kernels:
        for spec in other.sketch.inputs:
            for name in site.values:
                given = site.type(name)
                if given is not None and given[1] == spec.dtype and len(given[0]) == len(_shape(other, spec.name)):
                    yield other, name, spec.name


def _shape(facts: Facts, name: str) -> tuple[int, ...]:
    """The shape of an input as the first rank has it."""
    types = facts.types(name)
    return types[0][0] if types else ()


def _feed(site: Site, other: Facts, name: str, hole: str, inside: bool) -> Sketch | None:
    editor = site.editor()
    given = site.type(name)
    if given is None:
        return None
    made = _add(editor, other, hole, name, given[0])
    if inside:
        first = next((number for number, ref in enumerate(made) if ref.name in editor.added), None)
        if first is None:
            return None
        inner = made.pop(first)
        editor.redirect(name, inner, editor.added)
        editor.returns(*made)
    else:
        editor.returns(*made, instead_of=name)
    return editor.sketch()


def _add(editor: Editor, other: Facts, hole: str, name: str, shape: tuple[int, ...]) -> list[Ref]:
    """Add the calls of a kernel, one of its inputs taken to be a value; return its results, those of the input's type first.

    Raises:
        Misfit: its sizes cannot follow those of the value.
    """
    sizes: dict[int, int] = {}
    for old, new in zip(_shape(other, hole), shape, strict=True):
        if sizes.setdefault(old, new) != new:
            raise EditDoesNotFit
    values: dict[str, Any] = {hole: Ref(name)}
    for spec in other.sketch.inputs:
        if spec.name != hole:
            mapped = tuple(sizes.get(size, size) for size in spec.shape)
            values[spec.name] = editor.input(mapped, spec.dtype, spec.placements, spec.recipe)
    ranks = other.sketch.ranks

    def leaf(value: Any) -> Any:
        if isinstance(value, RankConstant):
            return editor.constant(value.name, [binding.constants.get(value.name) for binding in ranks])
        return values[value.name] if isinstance(value, Ref) else value

    (graph,) = other.sketch.graphs
    for step in graph:
        if step.op == "call_function":
            args, kwargs = map_aggregate((step.args, step.kwargs), leaf)
            values[step.name] = editor.call(step.target, args, kwargs, _last(editor, name))
    made = [(values[result], other.types(result) == other.types(hole)) for result in refs(result_of(graph))]
    return [ref for ref, alike in sorted(made, key=lambda one: not one[1])]


def recompute_value(site: Site) -> Iterator[Edit]:
    """Let one place read, of a value, what the same calls make once more: of the same inputs, of new ones, or of new ones that
    have another dim in front."""
    for name, edges in site.edges.items():
        if not site.is_input(name) and site.type(name) is not None:
            for edge, how in itertools.product(edges, ("same", "new", "wider")):
                yield Edit(partial(_recompute, site, name, edge, how), (name, edge[0]))


def _recompute(site: Site, name: str, edge: tuple[str, int], how: str) -> Sketch:
    needed = {name}
    for step in reversed(site.all_steps.values()):
        if step.name in needed:
            needed.update(step.reads)
    editor = site.editor()
    values: dict[str, Ref] = {}
    for spec in site.facts.sketch.inputs:
        if spec.name in needed:
            shape = (*spec.shape[:1], *spec.shape) if how == "wider" else spec.shape
            placements = tuple(
                (dim, placed) for dim, placed in spec.placements if how == "new" or placed.kind != "shard"
            )
            new = how != "same"
            values[spec.name] = editor.input(shape, spec.dtype, placements, spec.recipe) if new else Ref(spec.name)

    def leaf(value: Any) -> Any:
        return values.get(value.name, value) if isinstance(value, Ref) else value

    for step in site.all_steps.values():
        if step.op == "call_function" and step.name in needed:
            args, kwargs = map_aggregate((step.args, step.kwargs), leaf)
            values[step.name] = editor.call(step.target, args, kwargs, _last(editor, name))
    editor.rewire(*edge, values[name])
    return editor.sketch()


def _last(editor: Editor, name: str) -> str:
    """The step behind which the next one goes: the last one that was added, or the value itself."""
    calls = [added for added in editor.added if not added.startswith("%")]
    return calls[-1] if calls else name


__all__ = ["feed_into_kernel", "nest_kernel", "recompute_value"]
