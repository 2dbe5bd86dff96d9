"""The state of the reduction of a placed program: the smallest plan so far, and what has been tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tcverify.errors import TcverifyError
from tcverify.ops import DeviceMesh, Layout
from tcverify.ops.dialects.multidevice import REDUCE
from tcverify.ops.shapes import ShapeError
from tcverify.program import Placed, PlacedInput, PlacedPlan, Program
from tcverify.shrink.greedy import Greedy

Weight = tuple[Any, ...]


class PlacedSearch(Greedy):
    """Tries edits of the smallest plan so far and keeps those that are smaller and still show what is looked for.

    Attributes:
        plan: the smallest so far.
        tensors: of the plan, by name.
    """

    def __init__(self, plan: PlacedPlan, shows: Callable[[Program], bool], deadline: float | None) -> None:
        """Raises TcverifyError or ShapeError where the plan makes no program."""
        super().__init__(shows, deadline)
        self.plan = plan
        self.program, self.tensors = plan.tensors()
        self._weight = weight(plan, self.tensors)

    def attempt(self, *edits: PlacedPlan | None) -> bool:
        """Try edits in order until one is kept; returns whether one is.

        Raises:
            OutOfTime: the deadline has passed, and there is something to try.
        """
        return any(self._attempt(edit.live()) for edit in edits if edit is not None and edit.outputs)

    def _attempt(self, plan: PlacedPlan) -> bool:
        if not plan.inputs:
            return False
        try:
            program, tensors = plan.tensors()
        except (TcverifyError, ShapeError):
            return False
        found = weight(plan, tensors)
        if not found < self._weight or not self.ask(program):
            return False
        self.plan, self.program, self.tensors, self._weight = plan, program, tensors, found
        return True


def weight(plan: PlacedPlan, tensors: Mapping[str, Placed]) -> Weight:
    """How large a plan is: what counts more comes first. An edit is kept only where this decreases."""
    per_rank = [0] * plan.world_size
    for step in plan.steps:
        ranks = dict.fromkeys(step.layout.mesh.ranks)
        if step.reshards:
            ranks.update(dict.fromkeys(tensors[step.reads[0]].layout.mesh.ranks))
        for rank in ranks:
            per_rank[rank] += 1
    found = list(layouts(plan))
    meshes = list(dict.fromkeys(layout.mesh for layout in found))
    shapes = [spec.shape for spec in plan.inputs]
    listed = [sum(a > b for a, b in itertools.pairwise(mesh.ranks)) for mesh in meshes]
    reductions = [step.args[2] for step in plan.steps if step.op == REDUCE]
    return (
        max(per_rank),
        len(plan.steps),
        sum(per_rank),
        plan.world_size,
        len(plan.outputs),
        len(plan.inputs),
        sum(mesh.ndim for mesh in meshes),
        sum(mesh.size for mesh in meshes),
        sum(listed),
        sum(math.prod(shape) for shape in shapes),
        sum(map(len, shapes)),
        sum(map(sum, shapes)),
        sum(step.stream_axis is not None for step in plan.steps),
        sum(dim is not None for layout in found for dim in layout.sharding),
        sum(dim for layout in found for dim in layout.sharding if dim is not None),
        sum(spec.dtype is not torch.float32 for spec in plan.inputs),
        sum((spec.recipe.kind != "uniform") + (spec.recipe.scale != 1.0) for spec in plan.inputs),
        sum(reduction != "sum" for reduction in reductions),
        tuple(mesh.ranks for mesh in meshes),
        plan.seed,
    )


def layouts(plan: PlacedPlan) -> Iterator[Layout]:
    """The layouts of all inputs and results."""
    yield from (spec.layout for spec in plan.inputs)
    yield from (step.layout for step in plan.steps)


def meshes_of(plan: PlacedPlan) -> list[DeviceMesh]:
    """The meshes that the plan names, each once."""
    return list(dict.fromkeys(layout.mesh for layout in layouts(plan)))


def as_input(name: str, tensor: Placed, like: PlacedInput | None) -> PlacedInput:
    """An input in the place of a tensor, with values as those of another input."""
    recipe = {} if like is None else {"recipe": like.recipe}
    return PlacedInput(name, tensor.shape, tensor.layout, tensor.dtype, **recipe)


__all__ = ["PlacedSearch", "as_input", "layouts", "meshes_of", "weight"]
