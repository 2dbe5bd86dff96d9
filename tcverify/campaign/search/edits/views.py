"""Edits that let a value be viewed as another shape, or lie otherwise in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tcverify.campaign.search.editor import Editor, operands
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


def change_layout(site: Site) -> Iterator[Edit]:
    """Let a value of the same type lie otherwise in memory: its rows in one place, by columns, or as a part of a larger one."""
    for name in site.values:
        given = site.type(name)
        if given is not None and given[0] and site.edges.get(name):
            yield from (Edit(partial(_lay, site, name, how), (name,)) for how in _LAYOUTS)


def _expanded(editor: Editor, value: Ref, shape: tuple[int, ...]) -> Ref:
    row = editor.call(_ATEN.slice.Tensor, (value, 0, 0, 1), {}, value.name)
    return editor.call(_ATEN.expand.default, (row, list(shape)), {}, row.name)


def _by_columns(editor: Editor, value: Ref, shape: tuple[int, ...]) -> Ref:
    turned = editor.call(_ATEN.transpose.int, (value, 0, len(shape) - 1), {}, value.name)
    copied = editor.call(_ATEN.clone.default, (turned,), {"memory_format": torch.contiguous_format}, turned.name)
    return editor.call(_ATEN.transpose.int, (copied, 0, len(shape) - 1), {}, copied.name)


def _part(editor: Editor, value: Ref, shape: tuple[int, ...]) -> Ref:
    joined = editor.call(_ATEN.cat.default, ([value, value],), {}, value.name)
    return editor.call(_ATEN.slice.Tensor, (joined, 0, shape[0], 2 * shape[0]), {}, joined.name)


_ATEN = torch.ops.aten
_LAYOUTS = (_expanded, _by_columns, _part)


def _lay(site: Site, name: str, how: Callable[[Editor, Ref, tuple[int, ...]], Ref]) -> Sketch | None:
    given = site.type(name)
    if given is None:
        return None
    editor = site.editor()
    made = how(editor, Ref(name), given[0])
    editor.redirect(name, made, editor.added)
    return editor.sketch()


__all__ = ["change_layout", "insert_view"]
