"""Kernels: the smallest programs that show what a pass does, found by applying it; nothing is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tcverify.application import Pair, Point
from tcverify.campaign.reduction import STRUCTURE, reduce
from tcverify.campaign.reduction.facts import Facts
from tcverify.campaign.reduction.fit import facts_of
from tcverify.campaign.reduction.sketch import sketch_of
from tcverify.ops import qualified_name
from tcverify.program import Program

#: Applies the pass to a program, and says which of some places it has reached besides those that are new; and, where the last
#: argument is true, which nodes its conditions were about.
Apply: TypeAlias = Callable[[Program, Iterable[Point], bool], Pair]

#: A rewrite, as it is told from others: ops that went (negative) and that came, with how many, `MANY` at most.
Rewrite: TypeAlias = tuple[tuple[str, int], ...]

MANY = 2

#: Programs around a kernel that the pass changes are tried this many times as often; and one in so many of those that contain a
#: cause which is known.
CHANGED, MASKED = 4, 10


def rewrite_of(pair: Pair) -> Rewrite:
    """Which ops a pass has removed and added on the first rank that it has changed; empty where it has added and removed none."""
    if not pair.changed or pair.rewritten is None:
        return ()
    counts: Counter[str] = Counter()
    for program, sign in ((pair.original, -1), (pair.rewritten, 1)):
        for node in program.graphs[0].nodes:
            if node.op == "call_function":
                counts[qualified_name(node.target)] += sign
    return tuple(sorted((op, max(-MANY, min(MANY, n))) for op, n in counts.items() if n))


@dataclass(eq=False)
class Kernel:
    """A small program, and what a pass does with it.

    Attributes:
        new: places of the pass that it was the first to reach.
        reached: all places of the pass that it reaches.
        rewrite: what the pass does with it.
        changed: whether the pass changes it.
        looked: the nodes that each condition of the pass was about, by file and line.
        trials: programs that were tried around it.
        masked: whether it contains a cause that is known.
    """

    program: Program
    new: frozenset[Point]
    reached: frozenset[Point]
    rewrite: Rewrite
    changed: bool
    looked: Mapping[tuple[str, int], tuple[str, ...]]
    facts: Facts = field(init=False)
    trials: int = 0
    masked: bool = False

    @property
    def weight(self) -> float:
        """How many programs around it are tried, in proportion: the more of the pass it reaches the more."""
        return max(1, len(self.reached)) * (CHANGED if self.changed else 1) / (MASKED if self.masked else 1)

    def __post_init__(self) -> None:
        self.facts = facts_of(sketch_of(self.program))


def kernels_of(
    program: Program, new: Iterable[Point], rewrite: Rewrite | None, apply: Apply, known: Iterable[Point]
) -> Iterator[Kernel]:
    """The kernels of what a program has shown: its rewrite, where that is new, and the places that are new, the last first.

    Args:
        known: all places that any program has reached, these included.
    """
    left = list(new)
    known = [*known]

    def kernel(small: Program) -> Kernel:
        pair = apply(small, known, True)
        reached = frozenset(pair.reached)
        first = reached.intersection(left)
        left[:] = [point for point in left if point not in first]
        return Kernel(small, first, reached, rewrite_of(pair), pair.changed, pair.looked)

    if rewrite:
        yield kernel(reduce(program, lambda p: rewrite_of(apply(p, (), False)) == rewrite, moves=STRUCTURE).program)
    while left:
        goal, before = left[-1], len(left)

        def reaches(p: Program, goal: Point = goal) -> bool:
            return goal in apply(p, (goal,), False).reached

        found = kernel(reduce(program, reaches, moves=STRUCTURE).program)
        if len(left) == before:
            left.remove(goal)  # it takes more than the program to reach it
        else:
            yield found


__all__ = ["MASKED", "Apply", "Kernel", "Rewrite", "kernels_of", "rewrite_of"]
