"""Writes an edit of a program: further inputs and calls, other operands, other results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from tcverify.ops import qualified_name
from tcverify.ops.leaves import leaves
from tcverify.program import InputSpec, Placement, RankConstant, Recipe
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep, result_of, with_result
from tcverify.shrink.graph.step_facts import Facts


class Editor:
    """One edit of a sketch, in every graph that has the steps it names. What it comes to is to be made legal by `legalize_edit`.

    Attributes:
        added: names of inputs and steps that were added, in order.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._graphs = [list(graph) for graph in facts.sketch.graphs]
        self._inputs = list(facts.sketch.inputs)
        self._constants = [dict(binding.constants) for binding in facts.sketch.ranks]
        self._taken = set(facts.names)
        self.added: list[str] = []

    def input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: tuple[tuple[str, Placement], ...] = (),
        recipe: Recipe | None = None,
    ) -> Ref:
        """Add an input; it is equal on all ranks unless `placements` say otherwise."""
        name = next(f"%{i}" for i in itertools.count() if f"%{i}" not in self._taken)
        self._taken.add(name)
        self.added.append(name)
        self._inputs.append(InputSpec(name, tuple(shape), dtype, placements, recipe or plain_recipe(dtype)))
        for graph in self._graphs:
            first = sum(step.op == "placeholder" for step in graph)
            graph.insert(first, SketchStep(name, "placeholder", name, ()))
        return Ref(name)

    def call(self, target: Any, args: Any, kwargs: Mapping[str, Any], behind: str | None = None) -> Ref:
        """Add a call behind a step, or at the end; `RankConstant`s in its arguments are known already."""
        short = qualified_name(target).split("::")[-1].split(".")[0].strip("_") or "op"
        name = next(f"{short}_{i}" for i in itertools.count(1) if f"{short}_{i}" not in self._taken)
        self._taken.add(name)
        self.added.append(name)
        step = SketchStep(name, "call_function", target, tuple(args), dict(kwargs))
        for graph in self._graphs:
            known = {one.name: place for place, one in enumerate(graph)}
            if all(read in known for read in step.reads):
                first = sum(one.op == "placeholder" for one in graph)
                places = [known[read] + 1 for read in step.reads] + [first]
                if behind is None:
                    places.append(len(graph) - 1)
                elif behind in known:
                    places.append(known[behind] + 1)
                graph.insert(max(places), step)
        return Ref(name)

    def constant(self, name: str, values: Sequence[Any]) -> RankConstant:
        """Make a rank constant known, under another name where its own is taken by other values."""
        for number in itertools.count():
            tried = name if number == 0 else f"{name}_{number}"
            if all(known.get(tried, value) == value for known, value in zip(self._constants, values, strict=True)):
                for known, value in zip(self._constants, values, strict=True):
                    known[tried] = value
                return RankConstant(tried)
        raise AssertionError

    def rewire(self, reader: str, slot: int, ref: Any) -> None:
        """Let a step read something else in place of one of its operands, counted over all its arguments."""
        for graph in self._graphs:
            for place, step in enumerate(graph):
                if step.name == reader:
                    graph[place] = with_operand(step, slot, ref)

    def change(self, step: SketchStep) -> None:
        """Put a step in the place of the one of its name."""
        for graph in self._graphs:
            for place, old in enumerate(graph):
                if old.name == step.name:
                    graph[place] = step

    def redirect(self, old: str, new: Ref, besides: Sequence[str] = ()) -> None:
        """Let all readers of a step read another one."""

        def leaf(value: Any) -> Any:
            return new if isinstance(value, Ref) and value.name == old else value

        for graph in self._graphs:
            for place, step in enumerate(graph):
                if old in step.reads and step.name not in besides and step.name != new.name:
                    graph[place] = step.mapped(leaf)

    def returns(self, *more: Ref, instead_of: str = "") -> None:
        """Return these values besides, or (`instead_of`) in place of one that is returned."""
        for number, graph in enumerate(self._graphs):
            names = {step.name for step in graph}
            added = tuple(ref for ref in more if ref.name in names)
            result = result_of(tuple(graph))
            before = result if isinstance(result, tuple) else (result,)
            before = tuple(value for value in before if value != Ref(instead_of))
            self._graphs[number] = list(with_result(tuple(graph), (*before, *added)))

    def sketch(self) -> Sketch:
        """The program as edited."""
        ranks = tuple(
            replace(binding, constants=constants)
            for binding, constants in zip(self.facts.sketch.ranks, self._constants, strict=True)
        )
        graphs = tuple(map(tuple, self._graphs))
        return replace(self.facts.sketch, graphs=graphs, inputs=tuple(self._inputs), ranks=ranks)


def plain_recipe(dtype: torch.dtype) -> Recipe:
    """The recipe of an input of which nothing but its dtype is known."""
    if dtype is torch.bool:
        return Recipe("mask")
    return Recipe() if dtype.is_floating_point or dtype.is_complex else Recipe("integers", 2.0)


def operands(step: SketchStep) -> list[str]:
    """What a step reads, once for each place where it does."""
    return [ref.name for ref in leaves((step.args, step.kwargs), Ref)]


def with_operand(step: SketchStep, slot: int, ref: Any) -> SketchStep:
    numbers = itertools.count()

    def leaf(value: Any) -> Any:
        return ref if isinstance(value, Ref) and next(numbers) == slot else value

    args, kwargs = map_aggregate((step.args, step.kwargs), leaf)
    return replace(step, args=tuple(args), kwargs=dict(kwargs))


__all__ = ["Editor", "operands", "plain_recipe", "with_operand"]
