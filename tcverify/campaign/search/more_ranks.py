"""Moves programs to more ranks, so that a search on other ranks begins with what it has learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tcverify.campaign.search.calls import role_of
from tcverify.errors import TcverifyError
from tcverify.program import Mesh, MeshDim, Program, RankBinding
from tcverify.shrink.graph.legalize import facts_of, legalize_edit
from tcverify.shrink.graph.named_groups import follow_smaller_mesh
from tcverify.shrink.graph.sketch import Sketch, program_of, sketch_of


def move_to_more_ranks(program: Program, world_size: int) -> Iterator[Program]:
    """The same program on more ranks: in larger groups, of larger inputs and of the same ones; and in more groups.

    Yields:
        Nothing where the ranks are no multiple of what they were.
    """
    times, rest = divmod(world_size, program.world_size)
    if rest or times < 2:
        return
    sketch = sketch_of(program)
    wide = [rank // times for rank in range(world_size)]
    repeated = [rank % program.world_size for rank in range(world_size)]
    for dims, sizes, ranks in ((_widened, times, wide), (_widened, 1, wide), (_repeated, 1, repeated)):
        mesh = Mesh(world_size, tuple(dims(dim, program.world_size, times) for dim in sketch.mesh.dims))
        made = _on(sketch, mesh, ranks)
        if made is None:
            continue
        inputs = tuple(
            replace(spec, shape=tuple(sizes * n if n > 1 else n for n in spec.shape)) for spec in made.inputs
        )
        try:
            fitted = legalize_edit(facts_of(made), replace(made, inputs=inputs))
            if fitted is not None:
                yield program_of(fitted.sketch)
        except TcverifyError:
            continue


def _widened(dim: MeshDim, ranks: int, times: int) -> MeshDim:
    """A dim whose groups have so many times the ranks; groups of one rank stay such, and there are more of them."""
    wide = [group for group in dim.groups if len(group) > 1]
    if not wide:
        return _repeated(dim, ranks, times)
    groups = [tuple(times * rank + part for rank in group for part in range(times)) for group in wide]
    groups += [
        (times * rank + part,) for group in dim.groups if len(group) == 1 for rank in group for part in range(times)
    ]
    return MeshDim(dim.name, tuple(groups))


def _repeated(dim: MeshDim, ranks: int, times: int) -> MeshDim:
    """A dim with so many times the groups."""
    groups = (tuple(rank + block * ranks for rank in group) for block in range(times) for group in dim.groups)
    return MeshDim(dim.name, tuple(groups))


def _on(sketch: Sketch, mesh: Mesh, ranks: Sequence[int]) -> Sketch | None:
    """The sketch on another mesh with the same dims; None where ranks have graphs, or constants, whose role is not known.

    Args:
        ranks: the old rank that each rank does the same as.
    """
    if len(sketch.graphs) > 1 or any(sketch.modules):
        return None
    constants: list[dict[str, Any]] = [{} for _ in range(mesh.world_size)]
    for name in sketch.ranks[0].constants:
        role = role_of([binding.constants.get(name) for binding in sketch.ranks], sketch.mesh)
        values = role.on(mesh)
        if values is None:
            return None
        for known, value in zip(constants, values, strict=True):
            known[name] = value
    made = replace(sketch, mesh=mesh, ranks=tuple(RankBinding(0, known) for known in constants))
    return follow_smaller_mesh(made, sketch.mesh, ranks)


__all__ = ["move_to_more_ranks"]
