"""Moves that make the mesh smaller or simpler: fewer ranks, groups in natural order, no unused dims."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tcverify.errors import ProgramError
from tcverify.ops.leaves import leaves
from tcverify.program import REPLICATED, VARYING, InputSpec, Mesh, MeshDim, RankBinding, RankConstant
from tcverify.shrink.graph.given_values import keep_ranks, with_shape
from tcverify.shrink.graph.named_groups import follow_smaller_mesh, names_group, with_group_name
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sizes import BOTH_WAYS
from tcverify.shrink.graph.sketch import Graph, Sketch, SketchStep

#: Names of arguments that hold ranks.
RANK_ARGUMENTS = frozenset({"rank", "rank_group", "source_rank", "target_rank", "peer"})

#: Fewest ranks that a program is reduced to: on one rank collectives mean nothing.
FEWEST = 2

#: Most ranks of programs from whose chains of transfers single ones are taken.
MOST_LINKS = 8


def shrink_mesh(search: SketchSearch) -> None:
    """Drop ranks, then bring the rest into natural order, then drop dims."""
    while any(_attempt(search, ranks) for ranks in (*_smaller(search.sketch.mesh), *_links(search.sketch))):
        pass
    for dim in search.sketch.mesh.dims:
        order = [rank for group in sorted(dim.groups, key=len, reverse=True) for rank in group]
        _attempt(search, order)
    for name in [dim.name for dim in search.sketch.mesh.dims]:
        search.attempt(_without_dim(search.sketch, name))
    for first, second in itertools.permutations([dim.name for dim in reversed(search.sketch.mesh.dims)], 2):
        if {first, second} <= {dim.name for dim in search.sketch.mesh.dims}:
            search.attempt(_as_one_dim(search.sketch, first, second))


def _attempt(search: SketchSearch, ranks: Sequence[int]) -> bool:
    edits = [_on_ranks(search.sketch, ranks, keep_local=keep) for keep in (False, True)]
    first = edits[0]
    if first is not None:
        edits += [_proportional(first, size, search.sketch.mesh) for size in _sizes(first)]
    return any(search.attempt(edit, prefer=way) for edit in edits for way in BOTH_WAYS)


def _sizes(sketch: Sketch) -> list[int]:
    return sorted({size for spec in sketch.inputs for size in spec.shape if size > 1})


def _proportional(sketch: Sketch, size: int, before: Mesh) -> Sketch | None:
    """The sketch with all dims of one size as much smaller as the groups have become: what was divisible stays so."""
    old, new = (max(len(group) for dim in mesh.dims for group in dim.groups) for mesh in (before, sketch.mesh))
    if size % old or old == new:
        return None
    inputs = tuple(
        with_shape(spec, tuple(size // old * new if its == size else its for its in spec.shape))
        for spec in sketch.inputs
    )
    return replace(sketch, inputs=inputs)


def _smaller(mesh: Mesh) -> list[list[int]]:
    """The ranks that may be kept: one group of a dim, the first half or all but the last of each, all groups but one."""
    found: dict[tuple[int, ...], None] = {}
    for dim in mesh.dims:
        longest = max(map(len, dim.groups))
        for group in dim.groups:
            found[tuple(sorted(group))] = None
        for keep in ((longest + 1) // 2, longest - 1):
            found[tuple(rank for rank in range(mesh.world_size) if dim.position(rank) < keep)] = None
        for group in dim.groups:
            found[tuple(rank for rank in range(mesh.world_size) if rank not in group)] = None
    kept = [list(ranks) for ranks in found if FEWEST <= len(ranks) < mesh.world_size]
    return sorted(kept, key=len)


def _links(sketch: Sketch) -> list[list[int]]:
    """All ranks but one that others pass on what they receive to: a chain of transfers can close over it."""
    world = sketch.mesh.world_size
    transfers = any("peer" in _rank_names(step) for graph in sketch.graphs for step in graph)
    if not transfers or not FEWEST < world <= MOST_LINKS:
        return []
    return [[rank for rank in range(world) if rank != gone] for gone in reversed(range(world))]


def _rank_names(step: SketchStep) -> list[str]:
    """The names of the arguments of a call that may hold ranks."""
    if step.op != "call_function" or not isinstance(step.target, torch._ops.OpOverload):
        return []
    return [argument.name for argument in step.target._schema.arguments if argument.name in RANK_ARGUMENTS]


def _on_ranks(sketch: Sketch, ranks: Sequence[int], *, keep_local: bool) -> Sketch | None:
    """Return the sketch on these ranks alone, which become ranks 0, 1, …; None when a call means others.

    Args:
        keep_local: whether inputs that are sharded shrink with their groups, so that each rank's shard stays as it is.
    """
    new_number = {old: new for new, old in enumerate(ranks)}
    dims = []
    for dim in sketch.mesh.dims:
        groups = [tuple(new_number[rank] for rank in group if rank in new_number) for group in dim.groups]
        dims.append(MeshDim(dim.name, tuple(sorted((group for group in groups if group), key=min))))
    try:
        mesh = Mesh(len(ranks), tuple(dims))
        inputs = tuple(keep_ranks(spec, sketch.mesh, mesh, ranks) for spec in sketch.inputs)
        if keep_local:
            inputs = tuple(_scaled(spec, sketch.mesh, mesh, ranks[0]) for spec in inputs)
    except ProgramError:
        return None
    graphs, names = _separated(sketch.graphs)
    bindings = []
    for old in ranks:
        constants = dict(sketch.ranks[old].constants)
        for name, renamed in names.items():
            value = _renumbered(_followed(sketch, name, old, new_number), new_number)
            if name in constants and value is None:
                return None
            constants[renamed] = value
        bindings.append(RankBinding(sketch.ranks[old].graph, constants))
    try:
        graphs = tuple(tuple(_relabelled(step, new_number) for step in graph) for graph in graphs)
    except KeyError:
        return None
    smaller = replace(sketch, mesh=mesh, graphs=graphs, ranks=tuple(bindings), inputs=inputs)
    return follow_smaller_mesh(smaller, sketch.mesh, ranks)


def _followed(sketch: Sketch, name: str, rank: int, kept: Mapping[int, int]) -> Any:
    """The value of a constant that means ranks; of a rank that goes, its own: the next but one becomes the next."""
    value = sketch.ranks[rank].constants.get(name)
    for _ in sketch.ranks:
        if type(value) is not int or value in kept or not 0 <= value < len(sketch.ranks):
            break
        value = sketch.ranks[value].constants.get(name)
    return value


def _renumbered(value: Any, new_number: Mapping[int, int]) -> Any:
    """The new number of a rank, or those of a group's members; None when none of them is kept."""
    if isinstance(value, (list, tuple)):
        return [new_number[rank] for rank in value if rank in new_number] or None
    return new_number.get(value)


def _rank_arguments(step: SketchStep) -> Iterable[tuple[int | str, Any]]:
    """The arguments of a call that hold ranks, by position or name."""
    if step.op != "call_function" or not isinstance(step.target, torch._ops.OpOverload):
        return
    names = [argument.name for argument in step.target._schema.arguments]
    for position, (name, value) in enumerate(zip(names, step.args, strict=False)):
        if name in RANK_ARGUMENTS:
            yield position, value
    for name, value in step.kwargs.items():
        if name in RANK_ARGUMENTS:
            yield name, value


def _with_arguments(step: SketchStep, new: Mapping[int | str, Any]) -> SketchStep:
    args = tuple(new.get(position, value) for position, value in enumerate(step.args))
    return replace(step, args=args, kwargs={name: new.get(name, value) for name, value in step.kwargs.items()})


def _relabelled(step: SketchStep, new_number: Mapping[int, int]) -> SketchStep:
    """Renumber ranks that a call contains itself. Raises KeyError if none of a call's ranks is kept."""
    new: dict[int | str, Any] = {}
    for where, value in _rank_arguments(step):
        if isinstance(value, int) or (isinstance(value, (list, tuple)) and all(type(v) is int for v in value)):
            new[where] = _renumbered(value, new_number)
            if new[where] is None:
                raise KeyError(value)
    return _with_arguments(step, new) if new else step


def _separated(graphs: Sequence[Graph]) -> tuple[tuple[Graph, ...], dict[str, str]]:
    """Give rank constants that mean ranks separate names, if the same constants also mean sizes or offsets.

    Returns:
        The graphs, and by name of a constant that means ranks, its name in these graphs.
    """
    ranks: set[str] = set()
    others: set[str] = set()
    for graph in graphs:
        for step in graph:
            held = {value.name for _, value in _rank_arguments(step) if isinstance(value, RankConstant)}
            ranks |= held
            spots = {where for where, _ in _rank_arguments(step)}
            rest = [a for i, a in enumerate(step.args) if i not in spots]
            rest += [v for k, v in step.kwargs.items() if k not in spots]
            others |= _constants(rest)
    names = {name: name if name not in others else f"{name}_of_rank" for name in sorted(ranks)}
    if all(old == new for old, new in names.items()):
        return tuple(graphs), names

    def renamed(step: SketchStep) -> SketchStep:
        new = {
            where: RankConstant(names[value.name])
            for where, value in _rank_arguments(step)
            if isinstance(value, RankConstant)
        }
        return _with_arguments(step, new) if new else step

    return tuple(tuple(renamed(step) for step in graph) for graph in graphs), names


def _constants(values: Any) -> set[str]:
    return {constant.name for constant in leaves(values, RankConstant)}


def _scaled(spec: InputSpec, before: Mesh, after: Mesh, rank: int) -> InputSpec:
    """The input on a smaller mesh, with shards as large as they were for a rank that becomes rank 0."""
    shape = list(spec.shape)
    for name, placement in spec.placements:
        if placement.kind == "shard" and placement.dim is not None:
            members, left = len(before.dim(name).group(rank)), len(after.dim(name).group(0))
            shape[placement.dim] = -(-shape[placement.dim] // members) * left
    return with_shape(spec, tuple(shape))


def _without_dim(sketch: Sketch, name: str) -> Sketch | None:
    """The sketch without a mesh dim, where no two ranks share a group of it, or no input is placed over it and no call
    names its groups."""
    dim = sketch.mesh.dim(name)
    alone = all(len(group) == 1 for group in dim.groups)
    placed = any(over == name and p.kind != "replicated" for spec in sketch.inputs for over, p in spec.placements)
    groups = [list(dim.group(rank)) for rank in range(sketch.mesh.world_size)]
    if names_group(sketch, name):
        return None
    called = any(g in b.constants.values() for g, b in zip(groups, sketch.ranks, strict=True) if len(g) > 1)
    if len(sketch.mesh.dims) < 2 or ((placed or called) and not alone):
        return None
    dims = tuple(other for other in sketch.mesh.dims if other.name != name)
    inputs = tuple(
        replace(spec, placements=tuple((over, p) for over, p in spec.placements if over != name))
        for spec in sketch.inputs
    )
    return replace(sketch, mesh=Mesh(sketch.mesh.world_size, dims), inputs=inputs)


def _as_one_dim(sketch: Sketch, keep: str, drop: str) -> Sketch | None:
    """The sketch in which groups of `keep` replace those of `drop`, which are the same except for their order."""
    kept, dropped = sketch.mesh.dim(keep), sketch.mesh.dim(drop)
    if {frozenset(group) for group in kept.groups} != {frozenset(group) for group in dropped.groups}:
        return None
    bindings = []
    for rank, binding in enumerate(sketch.ranks):
        constants = {
            name: list(kept.group(rank)) if value == list(dropped.group(rank)) else value
            for name, value in binding.constants.items()
        }
        bindings.append(replace(binding, constants=constants))
    inputs = []
    for spec in sketch.inputs:
        placements = {over: placement for over, placement in spec.placements if over != drop}
        for over, placement in spec.placements:
            if over == drop and placements.get(keep, REPLICATED) in (REPLICATED, VARYING):
                placements[keep] = placement
        inputs.append(replace(spec, placements=tuple(placements.items())))
    dims = tuple(dim for dim in sketch.mesh.dims if dim.name != drop)
    mesh = Mesh(sketch.mesh.world_size, dims)
    renamed = with_group_name(sketch, drop, keep)
    return replace(renamed, mesh=mesh, ranks=tuple(bindings), inputs=tuple(inputs))


__all__ = ["shrink_mesh"]
