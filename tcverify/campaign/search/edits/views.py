"""Edits that let a value be viewed as another shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tcverify.campaign.search.editor import operands
from tcverify.campaign.search.edits.site import Edit, Site
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep

#: The view that is taken where the pass names none.
VIEW = torch.ops.aten.view.default


def insert_view(site: Site) -> Iterator[Edit]:
    """Put a view between a value and one of its readers, or all of them; let a view there is make another shape."""
    views = list(dict.fromkeys(call.target for call in site.calls if _is_view(call.target))) or [VIEW]
    for step in site.steps:
        given = site.type(operands(step)[0]) if _is_view(step.target) and operands(step) else None
        if given is not None:
            for shape in _forms(given[0]):
                if list(shape) != list(step.args[1] if len(step.args) > 1 else ()):
                    yield Edit(partial(_with_shape, site, step, shape), (step.name,))
    for name in site.values:
        given = site.type(name)
        edges = site.edges.get(name, [])
        for shape in _forms(given[0]) if given is not None and edges else ():
            for edge in [None, *edges] if len(edges) > 1 else [None]:
                at = (name, edge[0]) if edge else (name,)
                yield from (Edit(partial(_view, site, name, view, shape, edge), at) for view in views)


def _is_view(target: Any) -> bool:
    """Whether an op makes a view of its first operand, of a shape that is its second one, and takes nothing else."""
    schema = getattr(target, "_schema", None)
    if schema is None or len(schema.arguments) < 2 or schema.arguments[0].alias_info is None:
        return False
    first, second, *rest = schema.arguments
    shaped = str(second.type) in ("List[int]", "List[SymInt]") and second.name in ("size", "shape")
    return shaped and not first.alias_info.is_write and all(one.has_default_value() for one in rest)


def _forms(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of as many elements that keep the dims, with one of size 1 more or less, or join or exchange the first two."""
    found = [shape, (1, *shape)]
    if len(shape) > 1:
        first, second, *rest = shape
        found += [(first * second, *rest), (second, first, *rest), (-1, shape[-1])]
        found += [(second, *rest)] if first == 1 else []
    return list(dict.fromkeys(found))


def _with_shape(site: Site, step: SketchStep, shape: tuple[int, ...]) -> Sketch:
    editor = site.editor()
    editor.change(replace(step, args=(step.args[0], list(shape), *step.args[2:])))
    return editor.sketch()


def _view(site: Site, name: str, view: Any, shape: tuple[int, ...], edge: tuple[str, int] | None) -> Sketch:
    editor = site.editor()
    made: Ref = editor.call(view, (Ref(name), list(shape)), {}, name)
    if edge is None:
        editor.redirect(name, made, [made.name])
    else:
        editor.rewire(*edge, made)
    return editor.sketch()


__all__ = ["insert_view"]
