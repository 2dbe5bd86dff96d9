"""Moves that leave the graph as it is and make the rest plainer: values, placements, dtypes, constants, structure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tcverify.errors import ProgramError
from tcverify.program import InputSpec, Recipe
from tcverify.shrink.graph.argument_forms import with_plain_arguments
from tcverify.shrink.graph.given_values import fix_to_rank, plain_input
from tcverify.shrink.graph.replacements import is_summed
from tcverify.shrink.graph.search import SketchSearch, plain_numbers
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep, refs, result_of, with_results
from tcverify.shrink.graph.step_facts import Facts, rename_steps


def simplify(search: SketchSearch) -> None:
    """Make everything plain at once, or else one thing after the other."""
    if not search.attempt(_plain(search.facts)):
        for change in (_seed, _structure, _dtypes, _constants, _recipes):
            search.attempt(change(search.sketch, None))
        search.attempt(_placements(search.sketch, _free(search.facts)))
        search.attempt(with_plain_arguments(search.facts))
        for name in [spec.name for spec in search.sketch.inputs]:
            search.attempt(*(change(search.sketch, name) for change in (_recipes, _dtypes, _integers)))
        for name in _free(search.facts):
            search.attempt(_placements(search.sketch, [name]))
        for name in search.facts.calls:
            search.attempt(*(_constants(search.sketch, name, place) for place in (0, 1)))
            search.attempt(with_plain_arguments(search.facts, (name,)))
    for name in search.sketch.options:
        search.attempt(_without_option(search.sketch, name))
    if "captured" not in search.sketch.labels:  # else by their names users find nodes in their graph
        search.attempt_as(rename_steps(search.facts, _names(search.sketch)))


def _without_option(sketch: Sketch, name: str) -> Sketch:
    return replace(sketch, options={key: value for key, value in sketch.options.items() if key != name})


def _plain(facts: Facts) -> Sketch:
    sketch = _placements(with_plain_arguments(facts), _free(facts))
    for change in (_seed, _structure, _dtypes, _constants, _recipes):
        sketch = change(sketch, None)
    return sketch


def _free(facts: Facts) -> list[str]:
    """The inputs whose placement matters to no reader of the program: none of them is an addend of a sum."""
    return [spec.name for spec in facts.sketch.inputs if not is_summed(facts, spec.name)]


def _seed(sketch: Sketch, _: str | None) -> Sketch:
    return replace(sketch, seed=0)


def _inputs(sketch: Sketch, only: str | None, change: Callable[[InputSpec], InputSpec]) -> Sketch:
    inputs = tuple(change(spec) if only in (None, spec.name) else spec for spec in sketch.inputs)
    return replace(sketch, inputs=inputs)


def _recipes(sketch: Sketch, only: str | None) -> Sketch:
    """Plain values: independent, between −1 and 1; drawn integers in place of given ones."""
    return _inputs(sketch, only, plain_input)


def _placements(sketch: Sketch, names: Sequence[str]) -> Sketch:
    """These inputs the same on every rank, each of the shape that it has on the first."""

    def change(spec: InputSpec) -> InputSpec:
        if spec.name in names:
            with contextlib.suppress(ProgramError):
                return fix_to_rank(spec, sketch.mesh, 0, sketch.seed)
        return spec

    return replace(sketch, inputs=tuple(change(spec) for spec in sketch.inputs))


def _dtypes(sketch: Sketch, only: str | None) -> Sketch:
    """float32 in place of other floating dtypes; for the whole program, in casts too."""

    def plain(value: Any) -> Any:
        return torch.float32 if isinstance(value, torch.dtype) and value.is_floating_point else value

    made = _inputs(sketch, only, lambda spec: replace(spec, dtype=plain(spec.dtype)))
    if only is not None:
        return made
    graphs = tuple(tuple(step.mapped(plain) for step in graph) for graph in made.graphs)
    return replace(made, graphs=graphs)


def _integers(sketch: Sketch, only: str | None) -> Sketch:
    """float32 in place of integers, if integers are not needed."""

    def change(spec: InputSpec) -> InputSpec:
        if spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool:
            return spec
        return replace(spec, dtype=torch.float32, recipe=Recipe())

    return _inputs(sketch, only, change)


def _constants(sketch: Sketch, only: str | None, place: int = 0) -> Sketch:
    """Plain numbers in place of all others: of those for an op, the one at `place`, or the last."""

    def changed(step: SketchStep) -> SketchStep:
        if only not in (None, step.name) or not step.calls:
            return step
        plain = plain_numbers(step.target)

        def number(value: Any) -> Any:
            return plain[min(place, len(plain) - 1)] if isinstance(value, float) and value not in plain else value

        return step.mapped(number)

    return replace(sketch, graphs=tuple(tuple(changed(step) for step in graph) for graph in sketch.graphs))


def _structure(sketch: Sketch, _: str | None) -> Sketch:
    """One value, or a tuple of values."""

    def flat(_: int, result: Any) -> Any:
        names = refs(result)
        return Ref(names[0]) if len(names) == 1 else tuple(Ref(name) for name in names)

    if not all(refs(result_of(graph)) for graph in sketch.graphs):
        return sketch
    return with_results(sketch, flat)


def _names(sketch: Sketch) -> dict[str, str]:
    """Names without numeric suffixes that are no longer needed."""
    scratch = fx.Graph()
    new: dict[str, str] = {}
    for steps in sketch.graphs:
        for step in steps:
            if step.name not in new and step.op != "output":
                number = r"_?\d+$" if step.op == "placeholder" else r"_\d+$"
                new[step.name] = scratch.placeholder(re.sub(number, "", step.name) or step.name).name
    return new


__all__ = ["simplify"]
