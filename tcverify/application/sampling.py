"""On which ranks a pass is applied: on all of a few; of many that run the same, on some that stand for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from tcverify.program import Program
from tcverify.program.graph import same_structure

#: What ranks run, by rank.
Modules: TypeAlias = Mapping[int, fx.GraphModule]

#: Ranks that run the same up to which a pass is applied on each.
EACH = 16

#: On how many it is applied of more, the first and the last among them. Where it does the same on these, it is taken to do so on
#: the others.
SAMPLED = 4


@dataclass(frozen=True, slots=True)
class AppliedRanks:
    """The ranks on which a pass is applied.

    Attributes:
        chosen: in order.
        like: for every rank the one whose result is taken.
        samples: of ranks that run the same and are not all chosen, those that are.
    """

    chosen: tuple[int, ...]
    like: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def all_of(cls, program: Program) -> AppliedRanks:
        everybody = tuple(range(program.world_size))
        return cls(everybody, everybody)

    @classmethod
    def some_of(cls, program: Program) -> AppliedRanks:
        """All ranks of a program of few; of one of many, some of those that run the same."""
        if program.world_size <= EACH or any(program.modules):
            return cls.all_of(program)
        like = list(range(program.world_size))
        chosen: list[int] = []
        samples = []
        for ranks in program.copies:
            if len(ranks) <= EACH:
                chosen += ranks
                continue
            some = [ranks[i * (len(ranks) - 1) // (SAMPLED - 1)] for i in range(SAMPLED)]
            for rank in set(ranks).difference(some):
                like[rank] = ranks[0]
            chosen += some
            samples.append(tuple(some))
        return cls(tuple(sorted(chosen)), tuple(like), tuple(samples))

    def modules(self, program: Program) -> dict[int, fx.GraphModule]:
        """A new module of the program for each of the chosen ranks."""
        return dict(zip(self.chosen, program.graph_modules(self.chosen), strict=True))

    def graphs(self, modules: Modules) -> list[fx.Graph]:
        """The graphs of all ranks, by the modules of the chosen ones."""
        return [modules[rank].graph for rank in self.like]

    def agree(self, modules: Modules) -> bool:
        """Whether the samples are what their kind is: equal."""
        return all(
            same_structure(modules[first].graph, modules[other].graph)
            for first, *others in self.samples
            for other in others
        )


__all__ = ["AppliedRanks", "Modules"]
