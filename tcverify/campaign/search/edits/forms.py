"""Edits of what a program is made of: numbers, lists, groups, shapes, placements, dtypes, values, options of the pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx.node import map_aggregate

from tcverify.campaign.search.edits.site import Edit, Site
from tcverify.campaign.search.synthesis import TEXTS
from tcverify.program import PARTIAL, VARYING, InputSpec, Placement, RankConstant, Recipe
from tcverify.shrink.graph.argument_forms import forms_of
from tcverify.shrink.graph.named_groups import group_of, says_group_size, with_group
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep

#: Numbers of the pass that are tried in place of one.
MANY = 8

#: Integers that are moved, and not reckoned with.
WIDE = Recipe("wide")

#: Dtypes that are tried in place of one.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def _leaves(step: SketchStep) -> list[tuple[int | str, Any]]:
    """The constants and operands in a call, each with the position or the keyword of the argument that it is in."""
    found: list[tuple[int | str, Any]] = []
    for where, argument in _arguments(step):
        map_aggregate(argument, lambda value: found.append((where, value)))  # noqa: B023
    return found


def _arguments(step: SketchStep) -> list[tuple[int | str, Any]]:
    return [*enumerate(step.args), *step.kwargs.items()]


def _with_leaf(site: Site, step: SketchStep, place: int, new: Any) -> Sketch:
    numbers = itertools.count()
    args, kwargs = map_aggregate((step.args, step.kwargs), lambda v: new if next(numbers) == place else v)
    return _changed(site, replace(step, args=tuple(args), kwargs=dict(kwargs)))


def change_numbers(site: Site) -> Iterator[Edit]:
    """Other constants: integers near the one there is, and those that the pass names; other floats, dtypes and flags."""
    for step in site.steps:
        fixed = says_group_size(step)
        for place, (where, value) in enumerate(_leaves(step)):
            if where not in fixed and not isinstance(value, (Ref, RankConstant)):
                options = (new for new in dict.fromkeys(_instead(site, value)) if new is not value and new != value)
                yield from (Edit(partial(_with_leaf, site, step, place, new), (step.name,), new) for new in options)


def _instead(site: Site, value: Any) -> Sequence[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value - 1, value + 1, -1, 0, 2 * value, *site.integers[:MANY]]
    if isinstance(value, float):
        return [2 * value, 0.0, 1.0, 0.5, *site.floats[:MANY]]
    return DTYPES if isinstance(value, torch.dtype) and value is not torch.bool else ()


def change_texts(site: Site) -> Iterator[Edit]:
    """Other ways to reduce, to round or to approximate, where a call says one."""
    for step in site.steps:
        names = [argument.name for argument in _declared(step)]
        for where, value in _arguments(step):
            if isinstance(value, str):
                name = names[where] if isinstance(where, int) and where < len(names) else str(where)
                others = (text for text in TEXTS.get(name, ()) if text != value)
                yield from (
                    Edit(partial(_with_argument, site, step, where, text), (step.name,), text) for text in others
                )


def give_default(site: Site) -> Iterator[Edit]:
    """Other values for arguments that a call leaves to their defaults: a pass that makes calls anew may forget these."""
    for step in site.steps:
        declared = _declared(step)
        for place, argument in enumerate(declared):
            if place < len(step.args) or argument.name in step.kwargs or not argument.has_default_value():
                continue
            for new in _besides_default(argument.name, argument.default_value):
                before = [one.default_value for one in declared[len(step.args) : place] if one.has_default_value()]
                given = replace(step, kwargs={**step.kwargs, argument.name: new})
                if not argument.kwarg_only and len(before) == place - len(step.args):
                    given = replace(step, args=(*step.args, *before, new))
                yield Edit(partial(_changed, site, given), (step.name,), new)


def _declared(step: SketchStep) -> Sequence[Any]:
    """The arguments that the op of a step has."""
    schema = getattr(step.target, "_schema", None)
    return () if schema is None else schema.arguments


def _besides_default(name: str, default: Any) -> Sequence[Any]:
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, str):
        return [text for text in TEXTS.get(name, ()) if text != default]
    if isinstance(default, (int, float)):
        return [2 if default == 1 else default + 1, -1]
    return ()


def _changed(site: Site, step: SketchStep) -> Sketch:
    editor = site.editor()
    editor.change(step)
    return editor.sketch()


def change_int_lists(site: Site) -> Iterator[Edit]:
    """Other lists of integers: none, with one less at either end, the other way round, and with the last one twice."""
    for step in site.steps:
        for where, value in _arguments(step):
            if isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
                now = tuple(value)
                for new in dict.fromkeys(((), now[1:], now[:-1], now[::-1], (*now, now[-1]))):
                    if new != now:
                        yield Edit(partial(_with_argument, site, step, where, list(new)), (step.name,))


def _with_argument(site: Site, step: SketchStep, where: int | str, new: Any) -> Sketch:
    args = tuple(new if place == where else value for place, value in enumerate(step.args))
    kwargs = {name: new if name == where else value for name, value in step.kwargs.items()}
    return _changed(site, replace(step, args=args, kwargs=kwargs))


def change_argument_forms(site: Site) -> Iterator[Edit]:
    """Arguments written in another way that means the same: dims counted from the end, open ends, sizes to be inferred."""
    for step in site.steps:
        for where, ways in forms_of(site.facts, site.facts.where(step.name)[0], step).items():
            others = (way for way in ways if way != step.args[where])
            yield from (Edit(partial(_with_argument, site, step, where, way), (step.name,)) for way in others)


def change_groups(site: Site) -> Iterator[Edit]:
    """Let a step take another group of ranks, by its name or as a list; or the same ones in another order."""
    yield from _named_groups(site)
    mesh, ranks = site.facts.sketch.mesh, range(site.facts.sketch.mesh.world_size)
    known = {f"{dim.name}_group": [list(dim.group(rank)) for rank in ranks] for dim in mesh.dims}
    known["alone"], known["all"] = [[rank] for rank in ranks], [list(ranks) for _ in ranks]
    for step in site.steps:
        for place, (_, value) in enumerate(_leaves(step)):
            if not isinstance(value, RankConstant):
                continue
            groups = [binding.constants.get(value.name) for binding in site.facts.sketch.ranks]
            if not all(isinstance(group, (list, tuple)) for group in groups):
                continue
            now = [list(group) for group in groups if group is not None]
            turned = {f"{value.name}_turned": [group[::-1] for group in now]}
            for name, others in {**known, **turned}.items():
                if others != now:
                    yield Edit(partial(_with_group, site, step, place, name, others), (step.name,))


def _named_groups(site: Site) -> Iterator[Edit]:
    for step in site.steps:
        now = group_of(step)
        for dim in site.facts.sketch.mesh.dims if now is not None else ():
            if dim.name != now and len(set(map(len, dim.groups))) == 1:
                new = with_group(step, dim.name, len(dim.groups[0]))
                yield Edit(partial(_changed, site, new), (step.name,))


def _with_group(site: Site, step: SketchStep, place: int, name: str, groups: list[list[int]]) -> Sketch:
    numbers = itertools.count()
    editor = site.editor()
    new = editor.constant(name, groups)

    def leaf(value: Any) -> Any:
        return new if next(numbers) == place else value

    args, kwargs = map_aggregate((step.args, step.kwargs), leaf)
    editor.change(replace(step, args=tuple(args), kwargs=dict(kwargs)))
    return editor.sketch()


def _with_input(site: Site, place: int, spec: InputSpec) -> Sketch:
    inputs = site.facts.sketch.inputs
    return replace(site.facts.sketch, inputs=(*inputs[:place], spec, *inputs[place + 1 :]))


def change_shapes(site: Site) -> Iterator[Edit]:
    """Other shapes: of one input, that broadcast or have more dims; of a size wherever it stands; with a dim more or less."""
    inputs = site.facts.sketch.inputs
    widest = max((spec.shape for spec in inputs), key=len, default=())
    for place, spec in enumerate(inputs):
        shape = spec.shape
        options = [(1, *shape), shape[1:], (*shape, 1)]
        options += [(*shape[:i], 1, *shape[i + 1 :]) for i in range(len(shape))]
        lead = widest[: len(widest) - len(shape)]
        options += [(*lead[-i:], *shape) for i in range(1, len(lead) + 1)]
        placements = tuple((dim, p) for dim, p in spec.placements if p.kind != "shard")
        for option in dict.fromkeys(options):
            if option != shape:
                yield Edit(
                    partial(_with_input, site, place, replace(spec, shape=option, placements=placements)), (spec.name,)
                )
    for size in sorted({n for spec in inputs for n in spec.shape}):
        for new in dict.fromkeys((1, 2, 3, 4, 2 * size, size + 1)):
            if new != size:
                yield Edit(partial(_with_size, site, size, new), ())
    for count in sorted({len(spec.shape) for spec in inputs} - {0, 1}):
        yield from (Edit(partial(_with_dims, site, count, axis), ()) for axis in (None, *range(count - 1)))


def _with_size(site: Site, size: int, new: int) -> Sketch:
    inputs = site.facts.sketch.inputs
    made = (replace(spec, shape=tuple(new if n == size else n for n in spec.shape)) for spec in inputs)
    return replace(site.facts.sketch, inputs=tuple(made))


def _with_dims(site: Site, count: int, axis: int | None) -> Sketch:
    """Take a dim away from all inputs of so many dims, or (None) put one of size 1 before theirs."""

    def changed(spec: InputSpec) -> InputSpec:
        if len(spec.shape) != count:
            return spec
        if axis is None:
            return replace(spec, shape=(1, *spec.shape), placements=_shifted(spec.placements, 0, 1))
        rest = tuple((dim, p) for dim, p in spec.placements if p.kind != "shard" or p.dim != axis)
        shape = (*spec.shape[:axis], *spec.shape[axis + 1 :])
        return replace(spec, shape=shape, placements=_shifted(rest, axis, -1))

    return replace(site.facts.sketch, inputs=tuple(map(changed, site.facts.sketch.inputs)))


def _shifted(placements: tuple[tuple[str, Placement], ...], axis: int, by: int) -> tuple[tuple[str, Placement], ...]:
    return tuple(
        (dim, replace(p, dim=p.dim + by) if p.kind == "shard" and p.dim is not None and p.dim >= axis else p)
        for dim, p in placements
    )


def change_placements(site: Site) -> Iterator[Edit]:
    """Let an input differ between ranks, or be equal on them."""
    for place, spec in enumerate(site.facts.sketch.inputs):
        for dim in site.facts.sketch.mesh.dims:
            now = dict(spec.placements).get(dim.name)
            rest = tuple((name, p) for name, p in spec.placements if name != dim.name)
            if now is not None and now.kind == "shard":
                continue
            options = [rest] if now is not None else []
            options += [(*rest, (dim.name, kind)) for kind in (VARYING, PARTIAL) if kind != now]
            yield from (
                Edit(partial(_with_input, site, place, replace(spec, placements=option)), (spec.name,))
                for option in options
            )


def change_dtypes(site: Site) -> Iterator[Edit]:
    """Other dtypes: of all inputs of one dtype, of these and wherever calls say it, and of one input."""
    inputs = site.facts.sketch.inputs
    said = {value for step in site.steps for _, value in _leaves(step) if isinstance(value, torch.dtype)}
    for old, dtype in itertools.product(dict.fromkeys(spec.dtype for spec in inputs), DTYPES):
        if old not in (dtype, torch.bool):
            made = tuple(_of_dtype(spec, dtype) if spec.dtype is old else spec for spec in inputs)
            yield Edit(partial(replace, site.facts.sketch, inputs=made), ())
            if old in said:
                yield Edit(partial(_with_dtype, site, made, old, dtype), tuple(site.values))
    for place, spec in enumerate(inputs) if len(inputs) > 1 else ():
        if spec.dtype is not torch.bool:
            others = (dtype for dtype in DTYPES if dtype is not spec.dtype)
            yield from (Edit(partial(_with_input, site, place, _of_dtype(spec, one)), (spec.name,)) for one in others)


def _with_dtype(site: Site, inputs: tuple[InputSpec, ...], old: torch.dtype, new: torch.dtype) -> Sketch:
    sketch = site.facts.sketch
    graphs = tuple(tuple(step.mapped(lambda v: new if v is old else v) for step in graph) for graph in sketch.graphs)
    return replace(sketch, inputs=inputs, graphs=graphs)


def _of_dtype(spec: InputSpec, dtype: torch.dtype) -> InputSpec:
    """The input in another dtype; integers, which no number says to be indices, have values that floating point does not."""
    if spec.dtype.is_floating_point == dtype.is_floating_point:
        return replace(spec, dtype=dtype)
    return replace(spec, dtype=dtype, recipe=Recipe() if dtype.is_floating_point else WIDE)


def change_integer_values(site: Site) -> Iterator[Edit]:
    """Integers that floating point does not have, in place of others."""
    for place, spec in enumerate(site.facts.sketch.inputs):
        if spec.recipe.kind == "integers":
            yield Edit(partial(_with_input, site, place, replace(spec, recipe=WIDE)), (spec.name,))


def change_pass_options(site: Site) -> Iterator[Edit]:
    """Other options of the pass: values that drawn programs have had, and none, which leaves it at its default."""
    now = site.facts.sketch.options
    for name, values in site.options.items():
        rest = {key: value for key, value in now.items() if key != name}
        made = [{**rest, name: value} for value in values if name not in now or value != now[name]]
        for options in [*made, rest] if name in now else made:
            yield Edit(partial(replace, site.facts.sketch, options=options), tuple(site.values))


__all__ = [
    "change_argument_forms",
    "change_dtypes",
    "change_groups",
    "change_int_lists",
    "change_integer_values",
    "change_numbers",
    "change_pass_options",
    "change_placements",
    "change_shapes",
]  # fmt: skip
