"""Moves that make the meshes of a placed program smaller and plainer: fewer ranks, in order, and fewer meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tcverify.errors import ProgramError
from tcverify.ops import DeviceMesh, Layout
from tcverify.program import PlacedPlan
from tcverify.shrink.global_view.search import PlacedSearch, layouts, meshes_of

#: Ranks beyond which they are dropped in halves alone.
MANY_RANKS = 16

#: Changes of the layouts on a mesh.
Change = Callable[[Layout], Layout]


def shrink_meshes(search: PlacedSearch) -> None:
    """Drop ranks everywhere, from single meshes, and mesh dims; let ranks be one; then renumber and sort."""
    _drop_unused(search)
    for rank in reversed(range(search.plan.world_size)[:MANY_RANKS]):
        if rank < search.plan.world_size and search.attempt(*_resized(search.plan, _dropping(rank))):
            _drop_unused(search)
    for mesh in meshes_of(search.plan):
        if mesh in meshes_of(search.plan):
            search.attempt(*(plan for change in _smaller(mesh) for plan in _resized(search.plan, change)))
    _drop_unused(search)
    _let_ranks_be_one(search)
    _drop_unused(search)
    for mesh in meshes_of(search.plan):
        others = [other for other in meshes_of(search.plan) if other.shape == mesh.shape and other != mesh]
        ordered = DeviceMesh(mesh.shape, tuple(sorted(mesh.ranks)))
        search.attempt(*(_moved(search.plan, {mesh: other}) for other in (ordered, *others)))
    _renumber(search)


def _relaid(plan: PlacedPlan, change: Change) -> PlacedPlan:
    """The plan with all layouts changed. Raises ProgramError if a layout is impossible."""
    return replace(
        plan,
        inputs=tuple(replace(spec, layout=change(spec.layout)) for spec in plan.inputs),
        steps=tuple(replace(step, layout=change(step.layout)) for step in plan.steps),
    )


def _moved(plan: PlacedPlan, meshes: Mapping[DeviceMesh, DeviceMesh]) -> PlacedPlan:
    return _relaid(plan, lambda layout: Layout(meshes.get(layout.mesh, layout.mesh), layout.sharding))


def _dropping(rank: int) -> Change:
    """Without a rank, or without what shares a position of a mesh dim with it."""

    def change(layout: Layout) -> Layout:
        mesh = layout.mesh
        if rank not in mesh:
            return layout
        if mesh.ndim > 1:
            return _row(layout, 0 if mesh.shape[0] > 1 else 1, rank)
        return Layout(DeviceMesh.of(*(r for r in mesh.ranks if r != rank)), layout.sharding)

    return change


def _row(layout: Layout, dim: int, without: int) -> Layout:
    """The layout without the position of a rank in a mesh dim."""
    mesh = layout.mesh
    at = mesh.coordinates(without)[dim]
    kept = tuple(rank for rank in mesh.ranks if mesh.coordinates(rank)[dim] != at)
    shape = (*mesh.shape[:dim], mesh.shape[dim] - 1, *mesh.shape[dim + 1 :])
    return Layout(DeviceMesh(shape, kept), layout.sharding)


def _smaller(mesh: DeviceMesh) -> Iterator[Change]:
    """What a mesh alone may become: of one dim fewer, of one rank, or of the first two."""
    if mesh.ndim > 1:
        for dim in range(mesh.ndim):
            kept = tuple(rank for rank in mesh.ranks if mesh.coordinates(rank)[dim] == 0)
            shape = mesh.shape[:dim] + mesh.shape[dim + 1 :]
            yield _cut(mesh, DeviceMesh(shape, kept), dim)
        return
    for count in (1, 2):
        if count < mesh.size:
            for first in range(mesh.size - count + 1):
                yield _cut(mesh, DeviceMesh.of(*mesh.ranks[first : first + count]), None)


def _cut(mesh: DeviceMesh, new: DeviceMesh, dim: int | None) -> Change:
    def change(layout: Layout) -> Layout:
        if layout.mesh != mesh:
            return layout
        kept = tuple(s for i, s in enumerate(layout.sharding) if i != dim)
        return Layout(new, kept)

    return change


def _resized(plan: PlacedPlan, change: Change) -> Iterator[PlacedPlan]:
    """The plan with changed layouts, and with sizes that these can divide: as they are, in proportion, or all of one size."""
    try:
        new = _relaid(plan, change)
    except ProgramError:
        return
    if new == plan:
        return
    yield new
    before, after = list(layouts(plan)), list(layouts(new))
    ratios = {(b.mesh.size, a.mesh.size) for b, a in zip(before, after, strict=True) if b != a}
    for old, now in sorted(ratios):
        yield _scaled(new, lambda size, old=old, now=now: size // old * now if old > 1 and size % old == 0 else size)  # type: ignore[misc]
    unit = math.lcm(*(math.prod(layout.mesh.shape) for layout in after if layout.is_sharded))
    for factor in (1, 2):
        yield _scaled(new, lambda size, factor=factor: factor * unit if size > 1 else 1)  # type: ignore[misc]


def _scaled(plan: PlacedPlan, size: Callable[[int], int]) -> PlacedPlan:
    return replace(plan, inputs=tuple(replace(spec, shape=tuple(map(size, spec.shape))) for spec in plan.inputs))


def _let_ranks_be_one(search: PlacedSearch) -> None:
    """Merge two ranks that share no mesh."""
    world = search.plan.world_size
    for gone in reversed(range(world) if world <= MANY_RANKS else range(0)):
        for kept in range(world):
            meshes = meshes_of(search.plan)
            together = any(gone in mesh and kept in mesh for mesh in meshes)
            if gone != kept and not together and any(gone in mesh for mesh in meshes):
                names = {mesh: _renamed(mesh, {gone: kept}) for mesh in meshes}
                if search.attempt(_compact(_moved(search.plan, names))):
                    break


def _drop_unused(search: PlacedSearch) -> None:
    """Do without ranks that hold nothing."""
    search.attempt(_compact(search.plan))


def _compact(plan: PlacedPlan) -> PlacedPlan:
    """The plan on as many ranks as hold something, two at least, in the old order."""
    used = sorted({rank for mesh in meshes_of(plan) for rank in mesh.ranks})
    names = {rank: number for number, rank in enumerate(used)}
    meshes = {mesh: _renamed(mesh, names) for mesh in meshes_of(plan)}
    return replace(_moved(plan, meshes), world_size=max(2, len(used)))


def _renumber(search: PlacedSearch) -> None:
    """Number ranks in the order in which the plan names them."""
    named = dict.fromkeys(rank for mesh in meshes_of(search.plan) for rank in mesh.ranks)
    names = {rank: number for number, rank in enumerate(named)}
    meshes = {mesh: _renamed(mesh, names) for mesh in meshes_of(search.plan)}
    search.attempt(_moved(search.plan, meshes))


def _renamed(mesh: DeviceMesh, names: Mapping[int, int]) -> DeviceMesh:
    return DeviceMesh(mesh.shape, tuple(names.get(rank, rank) for rank in mesh.ranks))


__all__ = ["shrink_meshes"]
