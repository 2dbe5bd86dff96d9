"""Calls that name a group, when the mesh that has the group changes: sizes, positions and splits follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tcverify.errors import ProgramError
from tcverify.ops import lookup
from tcverify.program import Mesh, RankBinding, RankConstant
from tcverify.program.graph import constant_value
from tcverify.shrink.graph.sketch import Sketch, SketchStep

#: Arguments that hold a size per member, in group order.
_SPLITS = ("output_split_sizes", "input_split_sizes")


def names_group(sketch: Sketch, name: str) -> bool:
    """Whether some call names this group."""
    return any(group_of(step) == name for graph in sketch.graphs for step in graph)


def group_of(step: SketchStep) -> str | None:
    """The name of the group that a call names; None where it names none."""
    found = [value for _, name, value in _arguments(step) if name == lookup(step.target).group]
    return found[0] if found and isinstance(found[0], str) else None


def says_group_size(step: SketchStep) -> set[int | str]:
    """Positions and keywords of arguments that say how large the group is that a call names."""
    return {where for where, name, _ in _arguments(step) if name == "group_size"}


def with_group(step: SketchStep, group: str, size: int | None = None) -> SketchStep:
    """Let a call that names a group name another one.

    Args:
        size: of the other group, where it is not that of the first.
    """
    places: dict[int | str, Any] = {
        where: group for where, name, _ in _arguments(step) if name == lookup(step.target).group
    }
    if size is not None:
        places.update(dict.fromkeys(says_group_size(step), size))
    return _with(step, places)


def with_group_name(sketch: Sketch, old: str, new: str) -> Sketch:
    """Return the sketch whose calls name another group in place of one."""

    def changed(step: SketchStep) -> SketchStep:
        return with_group(step, new) if group_of(step) == old else step

    return replace(sketch, graphs=tuple(tuple(map(changed, graph)) for graph in sketch.graphs))


def follow_smaller_mesh(sketch: Sketch, before: Mesh, ranks: Sequence[int]) -> Sketch | None:
    """Let the sizes, positions and splits in calls that name groups follow a mesh that has lost ranks, or has more of them.

    Args:
        sketch: on the new mesh already.
        before: the mesh as it was.
        ranks: the old number of each rank, or of the one that it does the same as.

    Returns:
        None where they cannot.
    """
    constants = [dict(binding.constants) for binding in sketch.ranks]
    graphs = []
    for number, graph in enumerate(sketch.graphs):
        members = [rank for rank, binding in enumerate(sketch.ranks) if binding.graph == number]
        steps = []
        for step in graph:
            dim = group_of(step)
            if dim is None or not members or dim not in {d.name for d in before.dims}:
                steps.append(step)
                continue
            new: dict[int | str, Any] = {}
            for where, name, value in _arguments(step):
                follow = _following(step, name, dim, sketch.mesh, before, ranks)
                if follow is None:
                    continue
                try:
                    held = {rank: follow(rank, held_value(value, constants[rank])) for rank in members}
                except (ProgramError, TypeError, ValueError, IndexError, KeyError):
                    return None
                new[where] = _written(held, constants, f"{step.name}_{name}")
            steps.append(_with(step, new))
        graphs.append(tuple(steps))
    bound = tuple(RankBinding(b.graph, known) for b, known in zip(sketch.ranks, constants, strict=True))
    return replace(sketch, graphs=tuple(graphs), ranks=bound)


def _following(
    step: SketchStep, name: str, dim: str, now: Mesh, before: Mesh, ranks: Sequence[int]
) -> Callable[[int, Any], Any] | None:
    """How an argument of this name follows: a function of the rank and of what the argument was."""

    def size(rank: int, old: Any) -> Any:
        return len(now.dim(dim).group(rank)) if old == len(before.dim(dim).group(ranks[rank])) else old

    def source(rank: int, old: Any) -> Any:
        return old if old < min(len(group) for group in now.dim(dim).groups) else 0

    def splits(rank: int, old: Any) -> Any:
        known = dict(zip(before.dim(dim).group(ranks[rank]), old, strict=True))
        return [known[ranks[member]] for member in now.dim(dim).group(rank)]

    def peer(rank: int, old: Any) -> Any:
        member, group = before.dim(dim).group(ranks[rank])[old], now.dim(dim).group(rank)
        if all(ranks[one] != member for one in group):
            raise ProgramError(f"rank {member}, to or from which '{step.name}' sends, is gone")
        alike = [one for one in group if ranks[one] == ranks[rank]]
        return group.index([one for one in group if ranks[one] == member][alike.index(rank)])

    def peers(rank: int, old: Any) -> Any:
        return [peer(rank, position) for position in old]

    paired = lookup(step.target).name.endswith("::irecv")
    known: dict[str, Callable[[int, Any], Any]] = {
        "group_size": size, "src": peer if paired else source, "dst": peer, "peer_list": peers,
    }  # fmt: skip
    return known.get(name) or (splits if name in _SPLITS else None)


def held_value(value: Any, constants: Mapping[str, Any]) -> Any:
    """What an argument is on a rank. Raises ProgramError for a rank constant that the rank does not have."""
    return constant_value(value, constants) if isinstance(value, RankConstant) else value


def _written(held: Mapping[int, Any], constants: Sequence[dict[str, Any]], name: str) -> Any:
    """The argument of the call: a value for all ranks, or a rank constant."""
    values = list(held.values())
    if all(value == values[0] for value in values):
        return values[0]
    for rank, value in held.items():
        constants[rank][name] = value
    return RankConstant(name)


def _arguments(step: SketchStep) -> Iterator[tuple[int | str, str, Any]]:
    """Position or keyword, name and value of the arguments of a call that can name a group."""
    if step.op != "call_function" or not isinstance(step.target, torch._ops.OpOverload):
        return
    if lookup(step.target).group is None:
        return
    names = [argument.name for argument in step.target._schema.arguments]
    for position, (name, value) in enumerate(zip(names, step.args, strict=False)):
        yield position, name, value
    for name, value in step.kwargs.items():
        yield name, name, value


def _with(step: SketchStep, new: Mapping[int | str, Any]) -> SketchStep:
    args = tuple(new.get(position, value) for position, value in enumerate(step.args))
    return replace(step, args=args, kwargs={name: new.get(name, value) for name, value in step.kwargs.items()})


__all__ = [
    "follow_smaller_mesh",
    "group_of",
    "held_value",
    "names_group",
    "says_group_size",
    "with_group",
    "with_group_name",
]
