"""The groups that captured graphs name: found in the capturing process, declared by the user, turned into mesh dims."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from tcverify.capturing.record import Captured, GroupFacts, GroupSize
from tcverify.errors import ProgramError
from tcverify.ops import lookup, qualified_name
from tcverify.program import Mesh, MeshDim


def group_names_in(graph: fx.Graph) -> list[str]:
    """The names of groups that the ops of a graph are given, in order of first use."""
    found = (node.args[place] if place is not None else node.kwargs[key] for node, place, key in _places(graph))
    return list(dict.fromkeys(name for name in found if isinstance(name, str)))


def rename_groups(graph: fx.Graph, names: Mapping[str, str]) -> None:
    """Give groups other names, in place."""
    for node, place, key in list(_places(graph)):
        name: Any = node.kwargs[key] if place is None else node.args[place]
        if name not in names:
            continue
        if place is None:
            node.update_kwarg(key, names[name])
        else:
            node.update_arg(place, names[name])


def _places(graph: fx.Graph) -> Iterator[tuple[fx.Node, int | None, str]]:
    """Where nodes name a group: the position of the argument, or None for a keyword, and its name."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        argument = lookup(node.target).group
        if argument is None:
            continue
        if argument in node.kwargs:
            yield node, None, argument
            continue
        names = [a.name for a in node.target._schema.arguments]
        if argument in names and names.index(argument) < len(node.args):
            yield node, names.index(argument), argument


def find_known_groups(names: Iterable[str]) -> dict[str, GroupFacts]:
    """What this process knows of groups by their c10d names: members, and the mesh dim or description they were made with."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    found = {}
    for name in names:
        try:
            group = _resolve_process_group(name)  # type: ignore[arg-type]
        except (RuntimeError, ValueError, LookupError, TypeError):
            continue
        found[name] = GroupFacts(label_of(group), tuple(dist.get_process_group_ranks(group)))
    return found


def label_of(group: dist.ProcessGroup) -> str | None:
    """What a process group is to all its ranks: the mesh dim that it belongs to, or "world"."""
    described = getattr(group, "group_desc", "") or ""
    if described == "default_pg":
        return "world"
    if described.startswith("mesh_") and described != "mesh_default":
        return described.removeprefix("mesh_")
    return None


def rank_lists(graph: fx.Graph) -> list[tuple[int, ...]]:
    """The groups that the ops of a graph are given as lists of ranks (tensor_cast)."""
    found: dict[tuple[int, ...], None] = {}
    for node in graph.nodes:
        value = rank_arguments(node).get("rank_group")
        if isinstance(value, (list, tuple)) and all(type(rank) is int for rank in value):
            found[tuple(value)] = None
    return list(found)


def rank_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments `rank` and `rank_group` of a call of a tensor_cast op."""
    if node.op != "call_function" or not qualified_name(node.target).startswith("tensor_cast::"):
        return {}
    names = [a.name for a in getattr(node.target, "_schema").arguments]  # noqa: B009 - not every callable has one
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: given[name] for name in ("rank", "rank_group") if name in given}


# ---------------------------------------------------------------------------------------------------- groups → mesh dims


def mesh_of(captures: Sequence[Captured], mesh: Mesh | None) -> tuple[Mesh, list[dict[str, str]]]:
    """Return the mesh of a program, and for every rank the mesh dim of each group that its graph names.

    Groups that all ranks know by one label are one dim; others are put together by the order in which the graphs use them, as
    far as they do not overlap. A rank that is in none of a dim's groups is alone in one.

    Args:
        mesh: the dims that the user names; groups that they do not have are added.

    Raises:
        ProgramError: a group is unknown, or lacks the rank that uses it.
    """
    world_size = len(captures)
    if mesh is not None and mesh.world_size != world_size:
        raise ProgramError(f"the mesh has {mesh.world_size} ranks, but graphs of {world_size} are given")
    dims: dict[str, dict[int, tuple[int, ...]]] = {}  # dim → rank → group
    for dim in mesh.dims if mesh is not None else ():
        dims[dim.name] = {rank: dim.group(rank) for rank in range(world_size)}
    names: list[dict[str, str]] = []
    for rank, captured in enumerate(captures):
        mine: dict[str, str] = {}
        for number, (name, facts) in enumerate(captured.groups.items()):
            if rank not in facts.ranks or any(not 0 <= member < world_size for member in facts.ranks):
                raise ProgramError(
                    f"group '{name}' is {list(facts.ranks)}, but it is used by rank {rank} of {world_size}",
                    "give its ranks with --group NAME=RANKS, or the world size with --world-size",
                )
            mine[name] = _dim_for(facts, number, dims)
        names.append(mine)
    made = []
    for label, groups in dims.items():
        distinct = dict.fromkeys(groups.get(rank, (rank,)) for rank in range(world_size))
        made.append(MeshDim(label, tuple(distinct)))
    if not made:
        made = [MeshDim("world", (tuple(range(world_size)),))]
    return Mesh(world_size, tuple(made)), names


def _dim_for(facts: GroupFacts, number: int, dims: dict[str, dict[int, tuple[int, ...]]]) -> str:
    """The dim to which a group belongs; it is added to the first that has room for it."""
    candidates = [facts.label] if facts.label in dims else []
    candidates += [label for label, groups in dims.items() if all(groups.get(r) == facts.ranks for r in facts.ranks)]
    stem = facts.label or f"group{number}"
    tried = 0
    while True:
        for label in candidates:
            groups = dims[label]
            if all(groups.get(rank, facts.ranks) == facts.ranks for rank in facts.ranks):
                groups.update(dict.fromkeys(facts.ranks, facts.ranks))
                return label
        label = stem if tried == 0 else f"{stem}_{tried}"
        dims.setdefault(label, {})
        candidates, tried = [label], tried + 1


def mesh_of_sizes(sizes: Mapping[str, GroupSize], world_size: int | None) -> Mesh:
    """The mesh with the given groups as dims, if only their sizes are known.

    Groups are made dim by dim, the outermost first, and are named by numbers in that order. One as large as all the others
    together is the whole world.

    Args:
        world_size: the number of ranks, if known; a further, outermost dim is added if there are more.

    Raises:
        ProgramError: so many ranks do not hold groups of these sizes.
    """
    grid = {_dim_name(name): sizes[name].size for name in _in_order(sizes)}
    total = math.prod(grid.values())
    whole = [
        name
        for name, size in grid.items()
        if len(grid) > 1 and (name == _dim_name("0") or size == world_size or (len(grid) > 2 and size * size == total))
    ]
    inner = {name: size for name, size in grid.items() if name not in whole[:1]}
    ranks = math.prod(inner.values())
    if world_size is not None and world_size % ranks:
        said = " and ".join(f"'{name}' of {one.size}" for name, one in sizes.items())
        raise ProgramError(f"{world_size} ranks do not hold groups {said}", "give another --world-size, or the --mesh")
    if world_size is not None and world_size > ranks:
        inner = {"others": world_size // ranks, **inner}
    mesh = Mesh.grid(inner)
    if not whole:
        return mesh
    return Mesh(mesh.world_size, (*mesh.dims, MeshDim(whole[0], (tuple(range(mesh.world_size)),))))


def _in_order(sizes: Mapping[str, GroupSize]) -> list[str]:
    """The names of groups in the order in which they were made."""
    return sorted(sizes, key=lambda name: (int(name) if name.isdecimal() else -1, name))


def _dim_name(name: str) -> str:
    return name if name.isidentifier() else f"pg{re.sub(r'[^0-9A-Za-z]', '_', name)}"


def mesh_text(mesh: Mesh) -> str:
    """The dims of a mesh with the sizes of their groups, as --mesh takes them."""
    return ",".join(f"{dim.name}={len(dim.groups[0])}" for dim in mesh.dims)


def groups_from_sizes(sizes: Mapping[str, GroupSize], mesh: Mesh, rank: int) -> dict[str, GroupFacts]:
    """The groups of a rank of which only sizes are known: of the dim of that name or size, or, where there are as many groups as
    dims, in their order. Those that may be of several dims are left out.

    Raises:
        ProgramError: no dim has groups of that size.
    """
    found: dict[str, GroupFacts] = {}
    ordered = _in_order(sizes)
    in_order = len(ordered) == len(mesh.dims) and all(
        sizes[name].size == len(dim.group(rank)) for name, dim in zip(ordered, mesh.dims, strict=True)
    )
    for number, name in enumerate(ordered):
        fitting = [dim for dim in mesh.dims if len(dim.group(rank)) == sizes[name].size]
        if not fitting:
            raise ProgramError(
                f"group '{name}' has {sizes[name].size} ranks, and no dim of the mesh {mesh_text(mesh)} has this size",
                f"give another --mesh, or the ranks of the group: --group {name}=0,1;2,3",
            )
        named = [dim for dim in fitting if dim.name in (name, _dim_name(name))]
        chosen = named or (fitting if len(fitting) == 1 else [mesh.dims[number]] if in_order else [])
        if chosen:
            found[name] = GroupFacts(chosen[0].name, chosen[0].group(rank))
    return found


def rank_at(sizes: Mapping[str, GroupSize], mesh: Mesh) -> int | None:
    """The first rank at its declared position in its groups; None if nothing is declared, or no rank is."""
    for rank in range(mesh.world_size) if sizes else ():
        dims = {name: mesh.dim(str(facts.label)) for name, facts in groups_from_sizes(sizes, mesh, rank).items()}
        if dims and all(dim.position(rank) == sizes[name].position for name, dim in dims.items()):
            return rank
    return None


def unknown_group(name: str, rank: int) -> ProgramError:
    return ProgramError(
        f"group '{name}' in the graph of rank {rank} has no known ranks",
        f"give its mesh dim, e.g. --mesh tp=2 --group {name}=tp, or its ranks: --group {name}=0,1",
    )


__all__ = [
    "find_known_groups",
    "group_names_in",
    "groups_from_sizes",
    "label_of",
    "mesh_of",
    "mesh_of_sizes",
    "mesh_text",
    "rank_arguments",
    "rank_at",
    "rank_lists",
    "rename_groups",
    "unknown_group",
]  # fmt: skip
