"""The device mesh: which ranks exist, and the ordered group of each rank in each mesh dim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tcverify.errors import ProgramError

MAX_WORLD_SIZE = 65536

#: With more ranks than this, the text of a mesh shows one group of each dim.
_SHOWN = 16


@dataclass(frozen=True)
class MeshDim:
    """A named partition of all ranks into ordered groups.

    Groups may have different sizes ([[0], [1, 2]]) and any order ([1, 0]); the position in the group selects a shard.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    def group(self, rank: int) -> tuple[int, ...]:
        """The ordered group of `rank`."""
        return self._place(rank)[0]

    def position(self, rank: int) -> int:
        """Position of `rank` in its group."""
        return self._place(rank)[1]

    def _place(self, rank: int) -> tuple[tuple[int, ...], int]:
        try:
            return self._places[rank]
        except KeyError:
            raise ProgramError(f"mesh dim '{self.name}' has no group for rank {rank}") from None

    @cached_property
    def _places(self) -> dict[int, tuple[tuple[int, ...], int]]:
        """Group and position of every rank: needed so often that a search would make building quadratic in ranks."""
        return {rank: (group, position) for group in self.groups for position, rank in enumerate(group)}


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0 … world_size − 1 and the mesh dims over them.

    Raises:
        ProgramError: a dim does not partition the ranks, or two dims share a name.
    """

    world_size: int
    dims: tuple[MeshDim, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ProgramError(f"world size {self.world_size} is not between 1 and {MAX_WORLD_SIZE}")
        names = [dim.name for dim in self.dims]
        if len(set(names)) != len(names):
            raise ProgramError(f"mesh dims {names} do not have distinct names")
        for dim in self.dims:
            if sorted(itertools.chain(*dim.groups)) != list(range(self.world_size)):
                raise ProgramError(
                    f"groups {[list(g) for g in dim.groups]} of mesh dim '{dim.name}' do not partition "
                    f"ranks 0 to {self.world_size - 1}",
                    "every rank stands in exactly one group of every mesh dim",
                )

    @classmethod
    def grid(cls, sizes: Mapping[str, int]) -> Mesh:
        """A row-major grid: `Mesh.grid({"dp": 2, "tp": 2})` has tp groups [0, 1], [2, 3] and dp groups [0, 2], [1, 3]."""
        if not sizes or any(size < 1 for size in sizes.values()):
            raise ProgramError(f"mesh sizes {dict(sizes)} are not all at least 1")
        world_size = math.prod(sizes.values())
        dims = []
        step = world_size
        for name, size in sizes.items():
            block, step = step, step // size
            groups = tuple(
                tuple(range(start + inner, start + block, step))
                for start in range(0, world_size, block)
                for inner in range(step)
            )
            dims.append(MeshDim(name, groups))
        return cls(world_size, tuple(dims))

    def dim(self, name: str) -> MeshDim:
        """The mesh dim of this name."""
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise ProgramError(f"the mesh has no dim '{name}'", f"its dims are {', '.join(d.name for d in self.dims)}")

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The groups of a rank, by the names of their dims."""
        return {dim.name: dim.group(rank) for dim in self.dims}

    def __str__(self) -> str:
        parts = [f"{dim.name}: {_grouped(dim) if self.world_size <= _SHOWN else _outlined(dim)}" for dim in self.dims]
        return f"{self.world_size} ranks; " + "; ".join(parts)


def _grouped(dim: MeshDim) -> str:
    return " ".join(str(list(group)) for group in dim.groups)


def _outlined(dim: MeshDim) -> str:
    sizes = sorted({len(group) for group in dim.groups})
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    first = [str(rank) for rank in dim.groups[0]]
    shown = first if len(first) <= 4 else [*first[:2], "…", first[-1]]
    if len(dim.groups) == 1:
        return f"1 group of {size}: [{', '.join(shown)}]"
    return f"{len(dim.groups)} groups of {size}: [{', '.join(shown)}] …"
