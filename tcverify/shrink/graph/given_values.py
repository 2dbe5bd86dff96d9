"""Inputs with given values, and integers used as indices: their values when shapes, meshes or sizes shrink.

Given values belong to elements: a smaller input keeps those at the same indices. So an input keeps its purpose in a captured
graph: a table of positions stays one, a mask stays triangular.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tcverify.program import InputSpec, Mesh, Recipe
from tcverify.program.placement import VARIES
from tcverify.shrink.graph.sketch import Sketch


def with_shape(spec: InputSpec, shape: tuple[int, ...]) -> InputSpec:
    """The input with another global shape; of given values, those at the indices that are left.

    Where dims grow, what is given stays as it is, which makes no program: that is for questions, not for trials.
    """
    old, new = spec.shape, replace(spec, shape=shape)
    if spec.recipe.kind != "given" or math.prod(old) == math.prod(shape):
        return new
    if len(old) != len(shape) or any(now > before for before, now in zip(old, shape, strict=True)):
        return new
    blocks = _blocks(spec)
    corner = tuple(slice(size) for size in shape)
    chosen = [block[corner] for block in blocks]
    return replace(new, recipe=_given(chosen))


def keep_ranks(spec: InputSpec, before: Mesh, after: Mesh, ranks: Sequence[int]) -> InputSpec:
    """The input on a mesh that has lost ranks: what is given to each member follows the ranks that are left.

    Args:
        ranks: the old number of each rank.
    """
    if spec.recipe.kind != "given" or not math.prod(spec.shape):
        return spec
    blocks = _blocks(spec)
    varying = [name for name, placement in spec.placements if placement.kind in VARIES]
    if len(blocks) < 2 or not varying:
        return spec

    def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
        return tuple(mesh.dim(name).position(rank) for name in varying)

    number = {at: i for i, at in enumerate(itertools.product(*_lengths(before, varying, ranks[0])))}
    left = {coordinates(after, new): coordinates(before, old) for new, old in enumerate(ranks)}
    wanted = itertools.product(*_lengths(after, varying, 0))
    chosen = [blocks[number.get(left.get(at, ()), 0)] for at in wanted]
    return replace(spec, recipe=_given(chosen))


def _lengths(mesh: Mesh, names: Sequence[str], rank: int) -> list[range]:
    return [range(len(mesh.dim(name).group(rank))) for name in names]


def fix_to_rank(spec: InputSpec, mesh: Mesh, rank: int, seed: int) -> InputSpec:
    """The input as a rank holds it, the same on all ranks."""
    recipe = spec.recipe
    if recipe.kind == "given":
        recipe = _given([spec.values(mesh, rank, seed).to(_wide(spec))])
    return replace(spec, shape=spec.local_shape(mesh, rank), placements=(), recipe=recipe)


def plain_input(spec: InputSpec) -> InputSpec:
    """Drawn values in place of given ones, and plain ones in place of others; integers stay in the range that they have."""
    if spec.dtype.is_floating_point:
        return replace(spec, recipe=Recipe())
    if spec.recipe.kind == "wide":
        return replace(spec, recipe=Recipe("integers", 2.0))
    if spec.recipe.kind != "given":
        return spec
    if spec.dtype is torch.bool:
        return replace(spec, recipe=Recipe("mask"))
    if min(spec.recipe.values, default=0) < 0:
        return spec
    return replace(spec, recipe=Recipe("integers", max(spec.recipe.values, default=0) + 1))


def clamp_indices(sketch: Sketch, sizes: Mapping[int, int]) -> Sketch | None:
    """The sketch with integers adapted to still index a dim that shrinks, if they did so before; None if nothing changes.

    Args:
        sizes: new size of a dim, by old size. Integers count as indices of the smallest of these that exceeds them.
    """
    inputs = tuple(_below(spec, sizes) for spec in sketch.inputs)
    return None if inputs == sketch.inputs else replace(sketch, inputs=inputs)


def _below(spec: InputSpec, sizes: Mapping[int, int]) -> InputSpec:
    recipe = spec.recipe
    if spec.dtype.is_floating_point or spec.dtype is torch.bool or recipe.kind not in ("integers", "given"):
        return spec
    above = recipe.scale if recipe.kind == "integers" else max(recipe.values, default=0) + 1
    size = sizes[min(old for old in sizes if old >= above)] if above <= max(sizes, default=0) else 0
    if not 0 < size < above:
        return spec
    if recipe.kind == "integers":
        return replace(spec, recipe=Recipe("integers", float(size)))
    values = tuple(value if value < 0 else math.fmod(value, size) for value in recipe.values)
    return replace(spec, recipe=replace(recipe, values=values))


def _wide(spec: InputSpec) -> torch.dtype:
    return torch.float64 if spec.dtype.is_floating_point else torch.int64


def _blocks(spec: InputSpec) -> torch.Tensor:
    """What is given, by member."""
    return torch.tensor(spec.recipe.values, dtype=_wide(spec)).reshape(-1, *spec.shape)


def _given(blocks: Sequence[torch.Tensor]) -> Recipe:
    return Recipe("given", values=tuple(value for block in blocks for value in block.flatten().tolist()))


__all__ = ["clamp_indices", "fix_to_rank", "keep_ranks", "plain_input", "with_shape"]
