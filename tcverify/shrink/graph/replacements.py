"""Inputs that can replace a value of a program: of its shape and dtype, with only those properties that the value has.

A pass may rely on values being equal on all members of a group. So such a value may only be replaced by one that is equal too, or
a program that violates the pass's precondition would refute it. A run in lockstep shows which values are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcverify.errors import TcverifyError
from tcverify.execution import Lockstep, Run
from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import PARTIAL, VARYING, InputSpec, MeshDim, Program, Recipe, shard
from tcverify.shrink.graph.sketch import SketchStep
from tcverify.shrink.graph.step_facts import Facts

#: Elements of all values on all ranks that are kept at most: 1 GiB of float64. Of larger programs, nothing is known to be equal.
MAX_ELEMENTS = 1 << 27


class Values:
    """What a run of a program shows of its values. Where it does not run, nothing is known to be equal.

    Attributes:
        run: the run; None where it did not come to its end.
    """

    def __init__(self, program: Program) -> None:
        self._mesh = program.mesh
        self._declared = {
            spec.name: frozenset(dim for dim, placement in spec.placements if placement.kind != "replicated")
            for spec in program.inputs
        }
        self._dims = [dim for dim in program.mesh.dims if any(len(group) > 1 for group in dim.groups)]
        self._known: dict[str, frozenset[str]] = {}
        self._by_rank: list[dict[str, Any]] = []
        self.run: Run | None = None
        try:
            run = Lockstep().run(program, observe=_elements(program) <= MAX_ELEMENTS)
        except (TcverifyError, RuntimeError, TypeError, ValueError):
            return  # it holds what has no meaning here
        if run.finished:
            self.run = run
            self._by_rank = [result.values for result in run.ranks if result.values is not None]

    def varies(self, name: str) -> frozenset[str]:
        """The mesh dims over whose groups a value is not known to be equal."""
        found = self._known.get(name)
        if found is None:
            apart = {dim.name for dim in self._dims if not self._equal(name, dim)}
            found = self._known[name] = frozenset(apart | self._declared.get(name, frozenset()))
        return found

    def _equal(self, name: str, dim: MeshDim) -> bool:
        if not self._by_rank:
            return False
        missing = object()
        for first, *others in dim.groups:
            mine = self._by_rank[first].get(name, missing)
            if any(not _same(mine, self._by_rank[other].get(name, missing)) for other in others):
                return False
        return True

    def recipe(self, name: str, dtype: torch.dtype) -> Recipe:
        """A recipe for values of a dtype; integers stay in the range of those seen, since they may be indices."""
        if dtype is torch.bool:
            return Recipe("mask")
        if dtype.is_floating_point or dtype.is_complex:
            return Recipe()
        seen = [values.get(name) for values in self._by_rank]
        largest = max((int(v.double().max()) for v in seen if isinstance(v, torch.Tensor) and v.numel()), default=0)
        return Recipe("integers", float(max(largest + 1, 1)))

    def positive(self, name: str) -> bool:
        """Whether a value is made of floating-point numbers above zero alone, on all ranks that have it."""
        seen = [values[name] for values in self._by_rank if name in values]
        return bool(seen) and all(
            isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel() > 0 and bool((v > 0).all())
            for v in seen
        )


def _elements(program: Program) -> int:
    """Elements of all values on all ranks, as far as metadata tells."""
    sizes = []
    for graph in program.graphs:
        specs = [spec for node in graph.nodes for spec in pytree.tree_leaves(node.meta.get("val"))]
        sizes.append(sum(spec.numel for spec in specs if isinstance(spec, TensorSpec)))
    return sum(sizes[binding.graph] for binding in program.ranks)


def _same(a: Any, b: Any) -> bool:
    first, second = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if len(first) != len(second):
        return False
    for x, y in zip(first, second, strict=True):
        if isinstance(x, torch.Tensor):
            if not isinstance(y, torch.Tensor) or x.shape != y.shape:
                return False
            if not bool(((x == y) | ((x != x) & (y != y))).all()):  # a NaN equals a NaN here
                return False
        elif x is not y and x != y:
            return False
    return True


#: Recipes of positive values, for inputs that replace such values.
POSITIVE = Recipe("norm_weight")


def stand_ins(facts: Facts, values: Values, name: str, graphs: Sequence[int] | None = None) -> list[InputSpec]:
    """Inputs that can replace the value of a step, those with the fewest properties first; under the name of a future
    placeholder.

    Args:
        graphs: in these graphs; by default in all that have the step.

    Returns:
        Empty if the step returns no tensor, or no input can have its shapes on the ranks.
    """
    shapes, types = facts.rank_shapes(name, graphs), facts.types(name, graphs)
    if not shapes or not types:
        return []
    mesh, dtype = facts.sketch.mesh, types[0][1]
    recipe = values.recipe(name, dtype)
    varying = [dim for dim in mesh.dims if dim.name in values.varies(name)]
    kind = PARTIAL if is_summed(facts, name) else VARYING
    first = next(iter(shapes.values()))
    options = [(first, tuple((dim.name, kind) for dim in varying))]
    for dim in varying:
        rest = tuple((other.name, VARYING) for other in varying if other is not dim)
        for axis in reversed(range(len(first))):
            size = sum(shapes[member][axis] if member in shapes else 0 for member in dim.groups[0])
            options.append(((*first[:axis], size, *first[axis + 1 :]), ((dim.name, shard(axis)), *rest)))
    made = [InputSpec(f"%{name}", shape, dtype, placements, recipe) for shape, placements in options]
    return [spec for spec in made if all(spec.local_shape(mesh, rank) == shape for rank, shape in shapes.items())]


def may_replace(facts: Facts, values: Values, name: str, by: str) -> bool:
    """Whether `by` is equal on all ranks on which `name` is; addends of a sum stay different besides."""
    apart, those = values.varies(name), values.varies(by)
    return those == apart or (those < apart and not is_summed(facts, name))


def is_summed(facts: Facts, name: str) -> bool:
    """Whether a collective that reduces reads a value: its values on the ranks are then addends."""

    def reduces(user: SketchStep) -> bool:
        return user.collective and "reduce" in qualified_name(user.target)

    return any(reduces(user) for i in facts.where(name) for user in facts.users[i][name])


__all__ = ["POSITIVE", "Values", "is_summed", "may_replace", "stand_ins"]
