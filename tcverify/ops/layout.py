"""Layouts: on which ranks the parts of one tensor lie, and which part each of them holds.

A tensor carries an ordered mesh, of any ranks, and for each mesh dim at most one tensor dim that is sharded over it. Position
in the mesh, never rank number, picks a shard. Ranks outside the mesh hold nothing.
Source: nvFuser's DeviceMesh and device-parallel axes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tcverify.errors import ProgramError

#: More dims than any mesh has.
MAX_DIMS = 16

#: How to write a layout.
HINT = "write the mesh, then replicated or shard(DIM) for each of its dims: [0, 1] shard(0)"


def shorten_repr(value: object) -> str:
    """The text of an invalid mesh or layout, cut if it is long."""
    form = reprlib.Repr()
    form.maxstring = form.maxother = 100
    return form.repr(value)


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """An n-dimensional array of distinct ranks. Meshes are equal when shape and order are.

    Attributes:
        shape: sizes per mesh dim, each at least 1.
        ranks: in row-major order.

    Raises:
        ProgramError: a rank occurs twice or is negative, there are not as many as the shape says, or it has more than `MAX_DIMS`
            dims.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.ndim > MAX_DIMS:
            raise ProgramError(f"a mesh has {self.ndim} dims, and can have {MAX_DIMS}")
        if not self.shape or min(self.shape) < 1 or math.prod(self.shape) != len(self.ranks):
            raise ProgramError(f"a mesh of shape {list(self.shape)} cannot hold {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ProgramError(f"mesh {self} names a rank twice, or a negative one")

    @classmethod
    def of(cls, *ranks: int) -> DeviceMesh:
        """A 1-D mesh of these ranks, in this order."""
        return cls((len(ranks),), ranks)

    @classmethod
    def nested(cls, rows: Any) -> DeviceMesh:
        """A mesh given by nested lists, e.g. [[0, 1], [2, 3]].

        Raises:
            ProgramError: they are ragged, empty, or hold something else than ranks.
        """
        shape: list[int] = []
        level = [rows]
        while level and isinstance(level[0], (list, tuple)):
            lengths = {len(row) if isinstance(row, (list, tuple)) else -1 for row in level}
            if len(lengths) != 1 or lengths == {0}:
                raise ProgramError(f"{shorten_repr(rows)} is not a mesh: its rows are empty or of different lengths")
            shape.append(lengths.pop())
            level = list(itertools.chain.from_iterable(level))
        if not shape or any(type(rank) is not int for rank in level):
            raise ProgramError(f"{shorten_repr(rows)} is not a mesh of ranks", "write it as [0, 1] or [[0, 1], [2, 3]]")
        return cls(tuple(shape), tuple(level))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands, per mesh dim. Raises `ProgramError` if it is not in the mesh."""
        if rank not in self.ranks:
            raise ProgramError(f"rank {rank} is not in mesh {self}")
        position, found = self.ranks.index(rank), []
        for size in reversed(self.shape):
            position, at = divmod(position, size)
            found.append(at)
        return tuple(reversed(found))

    def slice(self, rank: int, dim: int) -> tuple[int, ...]:
        """The team of the ranks at the same position as `rank` except for mesh dim `dim`, in order.

        Raises:
            ProgramError: the rank is not in the mesh, or there is no such dim.
        """
        at = self.coordinates(rank)
        if not 0 <= dim < self.ndim:
            raise ProgramError(f"mesh {self} has no dim {dim}")
        step = math.prod(self.shape[dim + 1 :])
        first = self.ranks.index(rank) - at[dim] * step
        return self.ranks[first : first + self.shape[dim] * step : step]

    def slices(self, dim: int) -> list[tuple[int, ...]]:
        """The teams of all slices along a mesh dim."""
        return list(dict.fromkeys(self.slice(rank, dim) for rank in self.ranks))

    def relabelled(self, new: Sequence[int]) -> DeviceMesh:
        """The mesh with rank r called new[r]."""
        return DeviceMesh(self.shape, tuple(new[rank] for rank in self.ranks))

    def __str__(self) -> str:
        def rows(ranks: Sequence[int], shape: Sequence[int]) -> str:
            if len(shape) == 1:
                return f"[{', '.join(map(str, ranks))}]"
            step = len(ranks) // shape[0]
            return f"[{', '.join(rows(ranks[i : i + step], shape[1:]) for i in range(0, len(ranks), step))}]"

        return rows(self.ranks, self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor on a mesh.

    Attributes:
        mesh: the ranks that hold the tensor.
        sharding: per mesh dim, the tensor dim that is divided over it, or None if all hold the same.

    Raises:
        ProgramError: there are not as many entries as mesh dims, or a tensor dim is divided over two of them.
    """

    mesh: DeviceMesh
    sharding: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.sharding) != self.mesh.ndim:
            raise ProgramError(f"mesh {self.mesh} has {self.mesh.ndim} dims, and {len(self.sharding)} placements")
        dims = [dim for dim in self.sharding if dim is not None]
        if len(set(dims)) != len(dims) or any(dim < 0 for dim in dims):
            raise ProgramError(
                f"layout '{self}' divides a tensor dim over two mesh dims, or a negative one",
                "shard each tensor dim over one mesh dim",
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the form that `str` writes: the mesh, then per mesh dim "shard(DIM)" or "replicated".

        Raises:
            ProgramError: the text is not a layout.

        Example:
            >>> Layout.parse("[[0, 1], [2, 3]] shard(0), replicated").sharding
            (0, None)
        """
        if not isinstance(text, str):
            raise ProgramError(f"{shorten_repr(text)} is not a layout", HINT)
        return _parsed(text)

    @classmethod
    def replicated(cls, mesh: DeviceMesh) -> Layout:
        """All ranks of the mesh hold the whole."""
        return cls(mesh, (None,) * mesh.ndim)

    @classmethod
    def sharded(cls, mesh: DeviceMesh, dim: int) -> Layout:
        """A tensor dim is divided over a 1-D mesh."""
        return cls(mesh, (dim,))

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different parts: a mesh dim of one rank divides nothing."""
        return any(dim is not None and size > 1 for dim, size in zip(self.sharding, self.mesh.shape, strict=True))

    def parts(self, dim: int) -> int:
        """Into how many parts a tensor dim is divided."""
        return self.mesh.shape[self.sharding.index(dim)] if dim in self.sharding else 1

    def mesh_dim(self, dim: int) -> int | None:
        """The mesh dim over which a tensor dim is divided, or None."""
        return self.sharding.index(dim) if dim in self.sharding else None

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of each rank's part of a tensor of (global) shape `shape`.

        Raises:
            ProgramError: a sharded dim does not exist, or its size is not divisible.
        """
        self.check(shape)
        return tuple(size // self.parts(dim) for dim, size in enumerate(shape))

    def global_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor of which each rank holds a part of shape `local`."""
        return tuple(size * self.parts(dim) for dim, size in enumerate(local))

    def check(self, shape: Sequence[int]) -> None:
        """Raise `ProgramError` unless a tensor of this shape can have this layout."""
        for dim, parts in zip(self.sharding, self.mesh.shape, strict=True):
            if dim is None:
                continue
            if dim >= len(shape):
                raise ProgramError(f"layout '{self}' shards dim {dim} of a tensor of shape {list(shape)}")
            if shape[dim] % parts:
                raise ProgramError(
                    f"layout '{self}' cannot divide size {shape[dim]} of dim {dim} evenly by {parts} ranks",
                    "sizes of sharded dims are multiples of the mesh dim",
                )

    def place(self, rank: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """Which part of a tensor of (global) shape `shape` a rank of the mesh holds."""
        local, at = self.local_shape(shape), self.mesh.coordinates(rank)
        starts = [0] * len(shape)
        for dim, position in zip(self.sharding, at, strict=True):
            if dim is not None:
                starts[dim] = position * local[dim]
        return tuple(slice(start, start + size) for start, size in zip(starts, local, strict=True))

    def holders(self) -> Iterator[int]:
        """One rank for every different part: the first of those with the same part."""
        for rank in self.mesh.ranks:
            at = self.mesh.coordinates(rank)
            if all(position == 0 for dim, position in zip(self.sharding, at, strict=True) if dim is None):
                yield rank

    def relabelled(self, new: Sequence[int]) -> Layout:
        """The layout with rank r called new[r]."""
        return Layout(self.mesh.relabelled(new), self.sharding)

    def __str__(self) -> str:
        placements = ("replicated" if dim is None else f"shard({dim})" for dim in self.sharding)
        return f"{self.mesh} {', '.join(placements)}"


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Layout:
    mesh, bracket, rest = text.rpartition("]")
    placements = [part.strip() for part in rest.split(",")]
    if not bracket or not all(re.fullmatch(r"replicated|shard\([0-9]{1,2}\)", part) for part in placements):
        raise ProgramError(f"{shorten_repr(text)} is not a layout", HINT)
    try:
        rows = json.loads(mesh + bracket)
    except (ValueError, RecursionError):
        raise ProgramError(f"{shorten_repr(text)} is not a layout", HINT) from None
    dims = tuple(None if part == "replicated" else int(part[len("shard(") : -1]) for part in placements)
    return Layout(DeviceMesh.nested(rows), dims)


__all__ = ["DeviceMesh", "Layout"]
