"""The groups of ranks over which values may be divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tcverify.execution import Run
from tcverify.program import Program

#: Largest group whose members' chunks are distinguished.
MAX_MEMBERS = 16


@dataclass(frozen=True, slots=True)
class Grouping:
    """Disjoint groups of ranks, in order; other ranks are alone.

    Attributes:
        where: in words: "over tp [0, 1]".
        groups: by rank.
    """

    where: str
    groups: Mapping[int, tuple[int, ...]]

    def example(self, ranks: Iterable[int]) -> int:
        """One of these ranks, of those that do not stand alone if there are any."""
        return max(ranks, key=lambda rank: len(self.groups[rank]) > 1)

    def position(self, rank: int) -> int:
        return self.groups[rank].index(rank)


def groupings(program: Program, *runs: Run) -> list[Grouping]:
    """The groups of the mesh dims, then others that the collectives of runs name."""
    found: list[Grouping] = []
    known: set[tuple[int, ...]] = set()
    alone = {rank: (rank,) for rank in range(program.mesh.world_size)}
    for dim in program.mesh.dims:
        groups = {rank: group for group in dim.groups if len(group) <= MAX_MEMBERS for rank in group}
        if any(len(group) > 1 for group in groups.values()):
            found.append(Grouping(f"over {dim.name} {_listed(groups)}".rstrip(), groups))
            known.update(groups.values())
    named = {call.collective.communicator for run in runs for result in run.ranks for call in result.calls}
    layers: list[dict[int, tuple[int, ...]]] = []
    for group in sorted(named - known):
        if 1 < len(group) <= MAX_MEMBERS:
            layer = next((one for one in layers if not set(group) & one.keys()), None)
            if layer is None:
                layers.append(layer := {})
            layer.update(dict.fromkeys(group, group))
    return found + [
        Grouping(f"over {_listed(layer) or 'groups of the graph'}", {**alone, **layer}) for layer in layers[:MAX_LAYERS]
    ]


#: Number of partitions of the ranks that are examined besides those of the mesh.
MAX_LAYERS = 4


def _listed(groups: Mapping[int, tuple[int, ...]]) -> str:
    """The groups as text, where they are few."""
    if len(groups) > MAX_MEMBERS:
        return ""
    return " ".join(str(list(group)) for group in dict.fromkeys(groups.values()) if len(group) > 1)
