"""The ranks on which a pass is applied: all of a few; of many with equal graphs, a sample that determines the result on
the rest.

What a pass writes into the graph of a rank may depend on the rank's position in the mesh: offsets, sizes, members of
groups. Either it is linear in the position, or it counts as unknown and the pass is applied on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import fx

from tcverify.program import Program, RankBinding

#: The graphs of ranks, by rank.
Modules: TypeAlias = Mapping[int, fx.GraphModule]

#: Up to this many ranks with equal graphs, a pass is applied on each.
EACH = 16


class RanksDiffer(Exception):
    """The result of a pass on some ranks does not determine its result on the others."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Ranks with equal graphs, of which some represent all.

    Attributes:
        origin: one of them.
        steps: by mesh dim, the rank one position after the origin in that dim, and at the same position in all others.
        checks: additional ranks, used to validate the extrapolation.
        others: the rest.
    """

    origin: int
    steps: Mapping[str, int]
    checks: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def chosen(self) -> list[int]:
        return [self.origin, *self.steps.values(), *self.checks]


@dataclass(frozen=True, slots=True)
class AppliedRanks:
    """The ranks on which a pass is applied.

    Attributes:
        chosen: in order.
        samples: sets of ranks of which only some are chosen.
    """

    chosen: tuple[int, ...]
    samples: tuple[Sample, ...] = ()

    @classmethod
    def all_of(cls, program: Program) -> AppliedRanks:
        return cls(tuple(range(program.world_size)))

    @classmethod
    def some_of(cls, program: Program) -> AppliedRanks:
        """All ranks of a small program; for a large one, a sample of the ranks with equal graphs."""
        if program.world_size <= EACH or any(program.modules):
            return cls.all_of(program)
        chosen: list[int] = []
        samples = []
        for ranks in program.copies:
            sample = _sample(program, ranks) if len(ranks) > EACH else None
            if sample is None or not _linear(program, sample):
                chosen += ranks
            else:
                samples.append(sample)
                chosen += sample.chosen
        return cls(tuple(sorted(chosen)), tuple(samples))

    def modules(self, program: Program) -> dict[int, fx.GraphModule]:
        """A new module of the program for each of the chosen ranks."""
        return dict(zip(self.chosen, program.graph_modules(self.chosen), strict=True))

    def program_of(self, program: Program, modules: Modules) -> Program:
        """The program in which the chosen ranks run these modules, and the others run extrapolated graphs.

        Raises:
            Unlike: nothing follows.
            TcverifyError: see `Program.with_graphs`.
        """
        if not self.samples:
            return program.with_graphs([modules[rank].graph for rank in self.chosen])
        graphs, bindings = program.shared({rank: modules[rank].graph for rank in self.chosen})
        for sample in self.samples:
            bindings.update(_followed(program, sample, bindings))
        return replace(
            program, graphs=graphs, ranks=tuple(bindings[rank] for rank in range(program.world_size)), modules=()
        )


def _sample(program: Program, ranks: list[int]) -> Sample:
    places = {rank: tuple(dim.position(rank) for dim in program.mesh.dims) for rank in ranks}
    at = {place: rank for rank, place in places.items()}
    origin = ranks[0]
    steps = {}
    for number, dim in enumerate(program.mesh.dims):
        place = places[origin]
        further = at.get((*place[:number], place[number] + 1, *place[number + 1 :]))
        if further is not None:
            steps[dim.name] = further
    taken = {origin, *steps.values()}
    checks = tuple(rank for rank in dict.fromkeys((ranks[len(ranks) // 2 + 1], ranks[-1])) if rank not in taken)
    others = tuple(rank for rank in ranks if rank not in taken and rank not in checks)
    return Sample(origin, steps, checks, others)


def _linear(program: Program, sample: Sample) -> bool:
    """Whether the existing constants of the ranks are linear in their positions."""
    known = {rank: program.ranks[rank] for rank in sample.chosen}
    try:
        found = _followed(program, sample, known)
    except RanksDiffer:
        return False
    return all(_same(found[rank], program.ranks[rank]) for rank in sample.others)


def _followed(program: Program, sample: Sample, known: Mapping[int, RankBinding]) -> dict[int, RankBinding]:
    """The graphs of the other ranks of a sample. Raises `RanksDiffer`."""
    first = known[sample.origin]
    if any(known[rank].graph != first.graph for rank in sample.chosen):
        raise RanksDiffer

    def place(name: str, rank: int) -> int:
        dim = program.mesh.dim(name)
        return dim.position(rank) - dim.position(sample.origin)

    def value(name: str, rank: int) -> Any:
        origin = _numbers(first.constants[name])
        total = list(origin)
        for dim, step in sample.steps.items():
            moved = _numbers(known[step].constants[name])
            if len(moved) != len(total):
                raise RanksDiffer
            total = [t + place(dim, rank) * (b - a) for t, a, b in zip(total, origin, moved, strict=True)]
        return total if isinstance(first.constants[name], (list, tuple)) else total[0]

    def binding(rank: int) -> RankBinding:
        return RankBinding(first.graph, {name: value(name, rank) for name in first.constants})

    if not all(_same(binding(rank), known[rank]) for rank in sample.checks):
        raise RanksDiffer
    return {rank: binding(rank) for rank in sample.others}


def _numbers(value: Any) -> list[int]:
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if any(type(number) is not int for number in found):
        raise RanksDiffer
    return found


def _same(first: RankBinding, second: RankBinding) -> bool:
    return {n: _plain(v) for n, v in first.constants.items()} == {n: _plain(v) for n, v in second.constants.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


__all__ = ["AppliedRanks", "Modules", "RanksDiffer"]
