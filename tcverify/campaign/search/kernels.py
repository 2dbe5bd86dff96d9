"""Kernels: small programs that show what a pass does, found by applying it; nothing is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from torch import fx

from tcverify.application import CodePoint, Pair, Watch
from tcverify.ops import qualified_name
from tcverify.program import Program, program_id
from tcverify.shrink import COARSE, reduce
from tcverify.shrink.graph.legalize import facts_of
from tcverify.shrink.graph.sketch import sketch_of
from tcverify.shrink.graph.step_facts import Facts
from tcverify.shrink.graph.windows import keep_around
from tcverify.shrink.greedy import OutOfTime

#: Applies the pass to a program.
Apply: TypeAlias = Callable[[Program, Watch], Pair]

#: A rewrite, as it is told from others: ops that went (negative) and that came, with how many, `MANY` at most.
Rewrite: TypeAlias = tuple[tuple[str, int], ...]

#: An edge that a rewrite takes away ("-") or brings in ("+"): the op that reads, the op whose result it reads, and how many such
#: edges there are, `MANY` at most.
Edge: TypeAlias = tuple[str, str, str, int]

MANY = 2

#: Programs around a kernel that the pass changes are tried this many times as often.
CHANGED = 4

#: Nodes of all programs that are tried to make a program smaller; then it stays as it is by then.
MOST_NODES = 3_000

#: Where all programs around a kernel are refuted, they are tried one in so many more.
REFUTED = 9


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


def edges_of(pair: Pair, named: Collection[str]) -> frozenset[Edge]:
    """The edges by which the first graph that a pass has changed differs from what it was, by ops.

    Args:
        named: the ops that the pass names; all others count as one.
    """
    if not pair.changed or pair.rewritten is None:
        return frozenset()
    before, after = _edges(pair.original.graphs[0], named), _edges(pair.rewritten.graphs[0], named)
    counts = Counter(("-", *before[edge]) for edge in before.keys() - after.keys())
    counts.update(("+", *after[edge]) for edge in after.keys() - before.keys())
    return frozenset((*edge, min(MANY, number)) for edge, number in counts.items())


def _touched(pair: Pair) -> list[str]:
    """The nodes of the first graph that a pass has changed of which an edge went, and those that read otherwise now."""
    if pair.rewritten is None:
        return []
    before, after = (_edges(program.graphs[0], ()) for program in (pair.original, pair.rewritten))
    return list(dict.fromkeys(name for edge in before if edge not in after for name in edge))


def _edges(graph: fx.Graph, named: Collection[str]) -> dict[tuple[str, str], tuple[str, str]]:
    """The edges of a graph by names of nodes, and what ops they connect."""

    def op(node: fx.Node) -> str:
        if node.op != "call_function":
            return node.op
        name = qualified_name(node.target)
        return name if not named or name in named else "other"

    return {(node.name, read.name): (op(node), op(read)) for node in graph.nodes for read in node.all_input_nodes}


@dataclass(eq=False)
class Kernel:
    """A small program, and what a pass does with it.

    Attributes:
        new: places of the pass that it was the first to reach.
        reached: all places of the pass that it reaches.
        rewrite, edges: what the pass does with it.
        changed: whether the pass changes it.
        looked: the nodes that each condition of the pass was about, by file and line.
        rewritten: what the pass makes of it; None where it leaves it alone, or what it makes is no program.
        parent: the kernel that it is an edit of; None for one that was reduced from a larger program.
        own: the names of the steps that edits are tried near to first: those that conditions were about which it was the first to
            reach; where there are none, those that it does not share with its parent.
        trials: edits of it that were tried.
        judged, refuted: programs around it that were verified, and that were refuted.
        wrong: whether it was itself refuted; None before it was verified.
    """

    program: Program
    new: frozenset[CodePoint]
    reached: frozenset[CodePoint]
    rewrite: Rewrite
    edges: frozenset[Edge]
    changed: bool
    looked: Mapping[tuple[str, int], tuple[str, ...]]
    rewritten: Program | None = None
    parent: Kernel | None = None
    facts: Facts = field(init=False)
    own: frozenset[str] = field(init=False)
    trials: int = 0
    judged: int = 0
    refuted: int = 0
    wrong: bool | None = None

    def __post_init__(self) -> None:
        self.facts = facts_of(sketch_of(self.program))
        self._size = max(1, self.program.size)
        shared = set() if self.parent is None else outlines(self.parent.facts)
        looked = {name for point in self.new for name in self.looked.get((point.file, point.line), ())}
        near = looked.intersection(self.facts.names)
        self.own = frozenset(near or (outline[0] for outline in outlines(self.facts) - shared))

    @property
    def weight(self) -> float:
        """How many programs around it are tried, in proportion.

        The more of the pass it reaches and the smaller it is, the more; the more of them are refuted, the fewer: that says little
        after the first.
        """
        refuted = self.refuted / max(1, self.judged)
        reached = max(1, len(self.reached)) * (CHANGED if self.changed else 1)
        return reached / self._size / (1 + REFUTED * refuted)

    @property
    def behaviour(self) -> object:
        """What it shows: kernels for which that is the same differ in edges alone."""
        return self.reached, self.rewrite

    def joins(self, other: Kernel) -> bool:
        """Whether it can be put into another one: it is one graph, and the ranks are the same."""
        return len(self.program.graphs) == 1 and self.program.mesh == other.program.mesh


def outlines(facts: Facts) -> set[tuple[str, ...]]:
    """Each step by its name, its op and what it reads."""
    return {
        (step.name, str(step.target), *step.reads)
        for graph in facts.sketch.graphs
        for step in graph
        if step.op != "output"
    }


def kernel_of(
    program: Program,
    new: Iterable[CodePoint],
    apply: Apply,
    known: Iterable[CodePoint],
    named: Collection[str],
    parent: Kernel | None = None,
) -> Kernel:
    """Make a kernel of a program.

    Args:
        new: places that it, or the program that it was reduced from, was the first to reach.
        known: all places that any program has reached.
        named: the ops that the pass names.
        parent: the kernel that it is an edit of.
    """
    pair = apply(program, Watch(frozenset(known), look=True))
    reached = frozenset(pair.trace.reached)
    return Kernel(
        program,
        reached.intersection(new),
        reached,
        rewrite_of(pair),
        edges_of(pair, named),
        pair.changed,
        pair.trace.looked,
        pair.rewritten if pair.changed and pair.foreign is None else None,
        parent,
    )


def kernels_of(
    program: Program,
    new: Iterable[CodePoint],
    rewritten: Pair | None,
    apply: Apply,
    known: Iterable[CodePoint],
    named: Collection[str],
) -> Iterator[Kernel]:
    """The kernels of what a program has shown: its rewrite, where that is new, and the places that are new, the last first.

    Args:
        rewritten: what the pass has made of it, where that is a new rewrite.
        known: all places that any program has reached, these included.
    """
    left = list(new)
    known = [*known]
    smallest = dict.fromkeys(left, program)
    tried: dict[str, Pair] = {}  # what is left gets less: what was said of a program says enough later

    def kernel(small: Program) -> Kernel:
        one = kernel_of(small, left, apply, known, named)
        left[:] = [point for point in left if point not in one.new]
        return one

    def reduced(start: Program, shows: Callable[[Pair], bool], near: Sequence[str], *, judge: bool = False) -> Program:
        nodes = MOST_NODES

        def applied(p: Program) -> bool:
            nonlocal nodes
            identity = program_id(p)
            if identity not in tried:
                nodes -= p.size
                if nodes < 0:
                    raise OutOfTime
                pair = tried[identity] = apply(p, Watch(frozenset(left), judge=judge))
                smallest.update(
                    (one, p) for one in pair.trace.reached if one in smallest and p.size < smallest[one].size
                )
            return shows(tried[identity])

        return reduce(start, applied, moves=(partial(keep_around, names=near), *COARSE)).program

    if rewritten is not None and (rewrite := rewrite_of(rewritten)):
        yield kernel(reduced(program, lambda pair: rewrite_of(pair) == rewrite, _touched(rewritten), judge=True))
    while left:
        goal, before = left[-1], len(left)
        looked = apply(smallest[goal], Watch(look=True, judge=False)).trace.looked.get((goal.file, goal.line), ())
        found = kernel(reduced(smallest[goal], lambda pair: goal in pair.trace.reached, looked))  # noqa: B023
        if len(left) == before:
            left.remove(goal)  # it takes more than the program to reach it
        else:
            yield found


__all__ = ["Apply", "Edge", "Kernel", "Rewrite", "edges_of", "kernel_of", "kernels_of", "outlines", "rewrite_of"]
