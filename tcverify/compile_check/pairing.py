"""Makes a pair of programs, before and after a pass, of what was observed on every rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from unittest import mock

import torch.distributed as dist
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.application.pair import Pair
from tcverify.capturing import Captured, GroupFacts, for_all_ranks, program_of
from tcverify.capturing.groups import group_names_in, mesh_of, rename_groups
from tcverify.compile_check.graph_facts import EVERY, Placements, SharedFacts
from tcverify.compile_check.observing import Observation
from tcverify.errors import ProgramError
from tcverify.ops import qualified_name
from tcverify.program import Mesh, MeshDim, Placement, Program
from tcverify.program.graph import copy_graph, same_structure


def pair_of(seen: Sequence[Observation], mesh: Mesh | None, placements: Placements) -> Pair:
    """Return the programs before and after the pass.

    Args:
        seen: by rank.
        mesh: the mesh dims, where the user names them.
        placements: of inputs; names that these graphs do not have are for other graphs.

    Raises:
        ProgramError: the graphs of the ranks do not fit together.
    """
    captures = [_with_groups(one) for one in seen]
    whole, names = mesh_of(captures, mesh)
    original = program_of(captures, mesh, _said(captures, placements, whole))
    rewrites: Counter[str] = Counter()
    for one in seen:
        rewrites.update(one.rewrites)
    pair = Pair(original, changed=any(one.changed for one in seen), rewrites=dict(rewrites))
    for one in seen:
        for defect in one.defects:
            if all(known.aspect != defect.aspect for known in pair.defects):
                pair.defects.append(defect)
    after = [one.after for one in seen if one.after is not None]
    if len(after) < len(seen):
        pair.listing = next(one.listing for one in seen if one.after is None)
        return pair
    if not any(one.touched for one in seen):
        pair.rewritten = original
        return pair
    graphs = [_placed_in(original, rank, one.graph, names[rank]) for rank, one in enumerate(after)]
    modules = [one.module for one in after]
    pair.rewritten = original.with_graphs(graphs, modules if any(modules) else ())
    return pair


def shared_facts_of(captures: Sequence[Captured], mesh: Mesh | None) -> list[SharedFacts]:
    """What the ranks have in common before the pass, for each rank in the names of its own graph.

    Raises:
        ProgramError: the graphs of the ranks do not fit together.
    """
    _, names = mesh_of(captures, mesh)
    found = []
    for module, dims in zip(program_of(captures, mesh).graph_modules(), names, strict=True):
        alike = tuple(name for name, dim in dims.items() if dim in module.meta["alike"])
        found.append(SharedFacts(alike, tuple(sorted(module.meta.get("same_numbers", ())))))
    return found


def shared_facts_for_all(captured: Captured, rank: int, mesh: Mesh) -> SharedFacts:
    """The same where the graph of one rank stands for all. Raises as `shared_facts_of` does."""
    return shared_facts_of(for_all_ranks(captured, mesh, rank), mesh)[rank]


def groups_in(one: Observation) -> dict[str, GroupFacts]:
    """The groups that a graph names before or after the pass, and those of its inputs."""
    return _with_groups(one).groups


def _with_groups(one: Observation) -> Captured:
    if one.after is None:
        return one.before
    return replace(one.before, groups={**one.before.groups, **one.after.groups})


def _said(captures: Sequence[Captured], placements: Placements, mesh: Mesh) -> dict[str, dict[str, Placement]]:
    """What the user says of the inputs that these graphs have, over the dims that they have."""
    dims = {dim.name for dim in mesh.dims}
    found = {}
    for captured in captures:
        for one in captured.inputs:
            everywhere = placements.get(EVERY) if one.placements is None else None
            said = placements.get(one.name, everywhere)
            if said is not None and one.recipe.kind != "given":
                found[one.name] = {dim: placement for dim, placement in said.items() if dim in dims}
    return found


def _placed_in(original: Program, rank: int, graph: fx.Graph, names: dict[str, str]) -> fx.Graph:
    """A rewritten graph with the mesh dims and the inputs of the program."""
    placed = copy_graph(graph)
    rename_groups(placed, names)
    mine = [n for n in original.graphs[original.ranks[rank].graph].nodes if n.op == "placeholder"]
    theirs = [n for n in placed.nodes if n.op == "placeholder"]
    for own, node in zip(mine, theirs, strict=True):
        node.target = own.target
    dims = {dim.name for dim in original.mesh.dims}
    strange = next((name for name in group_names_in(placed) if name not in dims), None)
    if strange is not None:
        raise ProgramError(f"the pass names the group '{strange}' on rank {rank}, which is unknown")
    return placed


# -------------------------------------------------------------------------------------------------- one rank for all


def mesh_for(groups: Mapping[str, GroupFacts], world_size: int) -> Mesh:
    """The mesh of a job of which one rank is known: its groups are taken as those of a grid, as `init_device_mesh` makes them.

    Raises:
        ProgramError: a group is not one of a grid.
    """
    dims: dict[str, MeshDim] = {}
    for number, facts in enumerate(groups.values()):
        name = facts.label or f"group{number}"
        dim = MeshDim(name, _grid(facts, world_size))
        if dims.setdefault(name, dim).groups != dim.groups:
            dims[f"{name}_{number}"] = MeshDim(f"{name}_{number}", dim.groups)
    return Mesh(world_size, tuple(dims.values()) or (MeshDim("world", (tuple(range(world_size)),)),))


def _grid(facts: GroupFacts, world_size: int) -> tuple[tuple[int, ...], ...]:
    ranks = facts.ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block = step * len(ranks)
    regular = step > 0 and all(b - a == step for a, b in itertools.pairwise(ranks)) and world_size % block == 0
    if not regular or ranks[0] % block >= step:
        raise ProgramError(
            f"the group {list(ranks)} is not a row of a grid of {world_size} ranks, so the groups of other ranks are unknown",
            "give the mesh: checked(pass, mesh=Mesh(...))",
        )
    return tuple(
        tuple(start + offset + step * i for i in range(len(ranks)))
        for start in range(0, world_size, block)
        for offset in range(step)
    )


#: Ops whose integers say which part of a value a rank takes.
_PARTS = (
    "slice", "select", "narrow", "slice_scatter", "select_scatter", "roll", "arange", "full", "index", "scalar_tensor",
    "getitem", "split", "broadcast", "scatter", "gather", "add", "sub", "mul", "pad", "constant_pad_nd",
)  # fmt: skip


def pair_for_all(
    seen: Observation, rank: int, mesh: Mesh, placements: Placements, apply: Callable[[fx.GraphModule], fx.GraphModule]
) -> tuple[Pair, str | None]:
    """Return the programs of all ranks, given one rank's graph before and after the pass.

    Where what the pass has inserted may depend on the rank, the pass is applied to the graphs of the other ranks: copies whose
    `meta["rank"]` says so, under a `torch.distributed.get_rank` that does as well.

    Args:
        apply: applies the pass to the graph of another rank.

    Returns:
        The pair, and why the graphs of other ranks are in doubt, or None.

    Raises:
        ProgramError: the groups of other ranks are not known.
    """
    groups = groups_in(seen)
    before = for_all_ranks(replace(seen.before, groups=groups), mesh, rank)
    if seen.after is None:
        return pair_of([replace(seen, before=one) for one in before], mesh, placements), None
    after = for_all_ranks(replace(seen.after, groups=groups), mesh, rank)
    everywhere = [replace(seen, before=one, after=other) for one, other in zip(before, after, strict=True)]
    pair = pair_of(everywhere, mesh, placements)
    suspect = _suspect(seen)
    if suspect is None or pair.rewritten is None:
        return pair, None
    doubt = (
        f"node '{suspect}' may depend on the rank, but only rank {rank} was given to the pass, and it does not read "
        "gm.meta['rank'] nor torch.distributed.get_rank()"
    )
    graphs = []
    differ = False
    for other, module in enumerate(pair.original.graph_modules()):
        known = pair.rewritten.graph(other)
        if other != rank:
            with _as_rank(other):
                made = apply(module).graph
            differ = differ or not same_structure(known, made)
            known = made
        graphs.append(known)
    if differ:
        pair.rewritten = pair.original.with_graphs(graphs)
    return pair, None if differ else doubt


def _suspect(seen: Observation) -> str | None:
    """The first node whose integers the pass has brought in, and may depend on the rank."""
    if seen.after is None:
        return None
    known = {_numbers(node) for node in seen.before.graph.nodes}
    for node in seen.after.graph.nodes:
        name = qualified_name(node.target).split("::")[-1].split(".")[0].removesuffix("_copy")
        if node.op == "call_function" and name in _PARTS and _numbers(node) not in known and _numbers(node)[1]:
            return str(node.name)
    return None


def _numbers(node: fx.Node) -> tuple[str, tuple[int, ...]]:
    """What a node calls, and the integers that it is given."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return str(node.target), tuple(value for value in leaves if type(value) is int)


def _as_rank(rank: int) -> mock._patch[object]:
    """Inside, this process believes to be another rank."""

    def get_rank(group: dist.ProcessGroup | None = None) -> int:
        return rank if group is None else dist.get_process_group_ranks(group).index(rank)

    return mock.patch.object(dist, "get_rank", get_rank)


__all__ = ["groups_in", "mesh_for", "pair_for_all", "pair_of", "shared_facts_for_all", "shared_facts_of"]
