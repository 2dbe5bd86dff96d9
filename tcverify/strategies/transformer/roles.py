"""The roles of mesh dims in a transformer program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tcverify.errors import ProgramError
from tcverify.program import VARYING, Mesh, Placement


@dataclass(frozen=True, slots=True)
class Roles:
    """The role of each dim of a mesh in a program.

    Attributes:
        main: the dim of tensor parallelism: "tp" if there is one, else the last; but one with groups of several ranks, if
            there is any.
        other: a second dim, for data and for some blocks; None when there is none.
        members: per dim, the sizes of its groups.
        astray: per dim, the dims over whose groups its positions differ: what is sharded over the one varies over the other.
        even: whether the groups of `other` have one size.
    """

    main: str
    other: str | None
    members: dict[str, tuple[int, ...]]
    astray: dict[str, tuple[str, ...]]
    even: bool

    @property
    def largest(self) -> int:
        """Ranks of the largest group of the main dim."""
        return max(self.members[self.main])

    def sizes(self, dim: str) -> tuple[int, ...]:
        """Sizes of the dim's groups."""
        return self.members[dim]

    def size(self, dim: str) -> int:
        """Ranks of the dim's largest group."""
        return max(self.members[dim])

    def multiple(self, dim: str) -> int:
        """The least extent that every group of the dim divides."""
        return math.lcm(*self.members[dim])

    def declared(self, placements: Sequence[tuple[str, Placement]]) -> tuple[tuple[str, Placement], ...]:
        """Complete the placements so that they are correct: varying over dims that are not aligned with theirs."""
        named = [dim for dim, _ in placements]
        extra = {other for dim in named for other in self.astray[dim] if other not in named}
        return (*placements, *((dim, VARYING) for dim in sorted(extra)))


@lru_cache(maxsize=256)
def roles_of(mesh: Mesh) -> Roles:
    """Find the roles of a mesh's dims.

    Raises:
        ProgramError: the mesh has no dims.
    """
    names = [dim.name for dim in mesh.dims]
    if not names:
        raise ProgramError("a transformer program needs a mesh with at least one dim", "use a mesh such as tp=2")
    wanted = "tp" if "tp" in names else names[-1]
    crowded = [dim.name for dim in mesh.dims if any(len(group) > 1 for group in dim.groups)]
    main = wanted if wanted in crowded or not crowded else crowded[0]
    other = next((name for name in names if name != main), None)
    members = {dim.name: tuple(dict.fromkeys(len(group) for group in dim.groups)) for dim in mesh.dims}
    astray: dict[str, tuple[str, ...]] = {}
    for dim in mesh.dims:
        place = {rank: (position, len(group)) for group in dim.groups for position, rank in enumerate(group)}
        astray[dim.name] = tuple(
            second.name
            for second in mesh.dims
            if second is not dim and any(len({place[rank] for rank in group}) > 1 for group in second.groups)
        )
    return Roles(main, other, members, astray, other is None or len(members[other]) == 1)
