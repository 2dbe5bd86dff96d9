"""The mesh and the inputs of a program, rank by rank: data for the tables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tcverify.program import InputSpec, Program
from tcverify.report.html.collectives import MAX_RANKS
from tcverify.report.sanitize import sanitize

#: Number of groups of a mesh dim that are shown.
MAX_GROUPS = 32


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """An ordered group of a mesh dim."""

    ranks: tuple[int, ...]
    more: int


@dataclass(frozen=True, slots=True)
class Dim:
    name: str
    groups: tuple[MeshGroup, ...]
    more: int


@dataclass(frozen=True, slots=True)
class Input:
    """One input, and which part of it each rank holds; `given` is its shape in the user's program, if different."""

    name: str
    dtype: str
    shape: str
    placement: str
    recipe: str
    parts: tuple[str, ...]
    given: str


def make_dims(program: Program) -> tuple[Dim, ...]:
    return tuple(
        Dim(
            sanitize(dim.name),
            tuple(MeshGroup(g[:MAX_RANKS], max(0, len(g) - MAX_RANKS)) for g in dim.groups[:MAX_GROUPS]),
            max(0, len(dim.groups) - MAX_GROUPS),
        )
        for dim in program.mesh.dims
    )


def make_inputs(
    program: Program, ranks: Sequence[int], real_shapes: Mapping[str, Sequence[int]]
) -> tuple[tuple[Input, ...], tuple[tuple[int, ...], ...]]:
    """Return the inputs, and the ranks of each of their parts: ranks with the same part share an entry."""
    parts = {rank: tuple(_part(spec, program, rank) for spec in program.inputs) for rank in ranks}
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        columns.setdefault(parts[rank], []).append(rank)
    found = [
        _input(spec, tuple(held[i] for held in columns), real_shapes.get(spec.name))
        for i, spec in enumerate(program.inputs)
    ]
    return tuple(found), tuple(map(tuple, columns.values()))


def _input(spec: InputSpec, parts: tuple[str, ...], given: Sequence[int] | None) -> Input:
    placement = ", ".join(f"{placement} over {dim}" for dim, placement in spec.placements) or "replicated"
    recipe = spec.recipe.kind if spec.recipe.scale == 1.0 else f"{spec.recipe.kind} × {spec.recipe.scale:.3g}"
    return Input(
        sanitize(spec.name),
        str(spec.dtype).removeprefix("torch."),
        str(list(spec.shape)),
        sanitize(placement),
        recipe,
        parts,
        str(list(given)) if given is not None else "",
    )


def _part(spec: InputSpec, program: Program, rank: int) -> str:
    """What a rank holds of an input: a slice, an addend, a separate value, or all of it."""
    bounds = spec.bounds(program.mesh, rank)
    cut = any((low, high) != (0, size) for (low, high), size in zip(bounds, spec.shape, strict=True))
    cuts = ["[" + ", ".join(f"{low}:{high}" for low, high in bounds) + "]"] if cut else []
    for name, placement in spec.placements:
        dim = program.mesh.dim(name)
        if placement.kind == "partial":
            cuts.append(f"addend {dim.position(rank) + 1} of {len(dim.group(rank))}")
        elif placement.kind in ("varying", "unknown"):
            cuts.append("its own values")
    return ", ".join(cuts) or "all"


__all__ = ["Dim", "Input", "MeshGroup", "make_dims", "make_inputs"]
