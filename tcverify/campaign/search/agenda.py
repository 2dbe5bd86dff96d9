"""Agenda: which edit of which kernel is tried next."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tcverify.application import CodePoint
from tcverify.application.coverage.vocabulary import Vocabulary
from tcverify.campaign.search.calls import CallPattern
from tcverify.campaign.search.edits import FAMILIES, Edit, Site
from tcverify.campaign.search.kernels import Kernel, outlines
from tcverify.shrink.graph.step_facts import Facts

#: How many of the edits that are tried are such as may turn a condition of which one outcome was never seen, while there are any.
GOALS = 0.5

#: Once all is tried around a kernel that its parent does not have, what is left is tried so much less often.
WORN = 10

#: Other kernels that one is joined with.
PARTNERS = 40

#: Patterns of calls, and other kernels, of which an edit of an edit is made; and families that are tried for one.
FEW, TRIES = 4, 3

#: Edits of a family that are listed at a time.
CHUNK = 64

#: Edits of a family of which as many as of all others are taken to have led to something new, before it is known how many do.
PRIOR = 30

#: How much less often than the mean a family is tried that never leads to anything new.
LEAST = 0.25


class _Yields:
    """How often edits of each family led to something new; the more, the more of them are tried."""

    def __init__(self) -> None:
        self._tried: Counter[str] = Counter()
        self._new: Counter[str] = Counter()

    def count(self, family: str, new: bool) -> None:
        """Count an edit that was tried."""
        self._tried[family] += 1
        self._new[family] += new

    def weight(self, family: str) -> float:
        """How many edits of a family are tried, where 1 is the mean."""
        mean = (self._new.total() + 1) / (self._tried.total() + PRIOR)
        return max(LEAST, (self._new[family] + PRIOR * mean) / (self._tried[family] + PRIOR) / mean)


class _Queue:
    """The edits of one family, those near what the kernel does not share with its parent first.

    Args:
        edits: lists them.
        own: the steps that are not shared.
    """

    def __init__(self, edits: Iterator[Edit], own: frozenset[str], order: random.Random) -> None:
        self._edits, self._own, self._random = edits, own, order
        self._fresh: list[Edit] = []
        self._rest: list[Edit] = []

    def pop(self, *, fresh: bool) -> Edit | None:
        """The next edit; None where none is left, or none that is `fresh`."""
        while not self._fresh:
            chunk = list(itertools.islice(self._edits, CHUNK))
            if not chunk:
                return self._rest.pop() if self._rest and not fresh else None
            self._random.shuffle(chunk)
            self._fresh = [edit for edit in chunk if not self._own.isdisjoint(edit.at)]
            self._rest += (edit for edit in chunk if self._own.isdisjoint(edit.at))
        return self._fresh.pop()


class _Around:
    """What is left to try around a kernel: of each family as much as its weight says.

    Attributes:
        worn: nothing is left that is not left around the kernel's parent as well.
        over: nothing is left.
        wanted: conditions that it was the first to reach, and of which one outcome was never seen, by file and line.
        goals: edits that may turn one of these; None while they are not listed.
        aimed: how many of them were tried.
    """

    def __init__(self, kernel: Kernel, site: Site, order: random.Random) -> None:
        self.worn = self.over = False
        self.wanted: frozenset[tuple[str, int]] = frozenset()
        self.goals: list[tuple[str, Edit]] | None = []
        self.aimed = 0
        self._queues = {name: _Queue(family(site), kernel.own, order) for name, family in FAMILIES.items()}
        self._taken: Counter[str] = Counter()

    def pop(self, weight: Callable[[str], float]) -> tuple[str, Edit] | None:
        """The next edit, and its family; None where none is left."""
        while not self.over:
            for name in sorted(self._queues, key=lambda name: (self._taken[name] + 1) / weight(name)):
                edit = self._queues[name].pop(fresh=not self.worn)
                if edit is not None:
                    self._taken[name] += 1
                    return name, edit
            self.over, self.worn = self.worn, True
        return None


class Agenda:
    """Lists the edits of kernels, and chooses among them.

    Args:
        patterns: how ops are called in edits, as far as is known by now.
        seed: of what is tried first.

    Attributes:
        options: values of options of the pass that drawn programs have had.
        apart: whether ranks may do different things, as drawn programs have it.
    """

    def __init__(self, vocabulary: Vocabulary, patterns: Callable[[], Sequence[CallPattern]], seed: int = 0) -> None:
        self.kernels: list[Kernel] = []
        self.options: dict[str, list[Any]] = {}
        self.apart = False
        self._vocabulary = vocabulary
        self._patterns = patterns
        self._random = random.Random(seed)
        self._around: dict[Kernel, _Around] = {}
        self._kinds: dict[Kernel, int] = {}
        self._behaviours: dict[object, int] = {}
        self._alike: Counter[int] = Counter()
        self._yields = _Yields()
        self._seen = (0, 0)  # kernels and places that there were when it was last found out what is wanted

    def add(self, kernel: Kernel) -> None:
        """Take a kernel in."""
        self.kernels.append(kernel)
        kind = self._kinds[kernel] = self._behaviours.setdefault(kernel.behaviour, len(self._behaviours))
        self._alike[kind] += 1

    def clear(self) -> list[Kernel]:
        """Give all kernels back."""
        before, self.kernels = self.kernels, []
        self._alike.clear()
        self._around.clear()
        return before

    @property
    def exhausted(self) -> int:
        """Kernels of which all edits were tried."""
        return sum(around.over for around in self._around.values())

    def tell(self, family: str, *, new: bool) -> None:
        """Say whether an edit of a family has led to something new."""
        self._yields.count(family, new)

    def next(self, points: Collection[CodePoint]) -> tuple[Kernel, str, Edit] | None:
        """The edit that is tried next, with its kernel and family; None where none is left.

        Args:
            points: that were reached so far.
        """
        chosen = self._aimed(points) if self._random.random() < GOALS else None
        while chosen is None:
            left = (one for one in self.kernels if one not in self._around or not self._around[one].over)
            kernel = min(left, key=self._turn, default=None)
            if kernel is None:
                return self._aimed(points)
            found = self._near(kernel).pop(self._yields.weight)
            chosen = None if found is None else (kernel, *found)
        chosen[0].trials += 1
        return chosen

    def _near(self, kernel: Kernel) -> _Around:
        if kernel not in self._around:
            self._around[kernel] = _Around(kernel, self._site(kernel, self._patterns()), self._random)
        return self._around[kernel]

    def further(self, kernel: Kernel, facts: Facts) -> tuple[str, Edit] | None:
        """An edit of a program that was made of a kernel, near what sets it apart from that, with its family."""
        new = {outline[0] for outline in outlines(facts) - outlines(kernel.facts)}
        patterns = self._patterns()
        site = self._site(kernel, self._random.sample(patterns, min(FEW, len(patterns))), facts, FEW)
        weights = [self._yields.weight(name) for name in FAMILIES]
        for name in self._random.choices([*FAMILIES], weights, k=TRIES):
            edits = [edit for edit in FAMILIES[name](site) if not new.isdisjoint(edit.at)]
            if edits:
                return name, self._random.choice(edits)
        return None

    def _turn(self, kernel: Kernel) -> float:
        """How much was tried around a kernel for its weight; the one with the least is the next. Those that show the same share
        what one of them would have."""
        around = self._around.get(kernel)
        worn = around is not None and around.worn and kernel.parent is not None
        return kernel.trials / kernel.weight * self._alike[self._kinds[kernel]] * (WORN if worn else 1)

    def _site(
        self, kernel: Kernel, patterns: Sequence[CallPattern], facts: Facts | None = None, partners: int = PARTNERS
    ) -> Site:
        others = [one.facts for one in self.kernels if one.changed and one.joins(kernel)]
        shuffled = self._random.sample(patterns, len(patterns))
        return Site(
            facts or kernel.facts,
            shuffled,
            self._vocabulary.integers,
            self._vocabulary.floats,
            self._random.sample(others, min(partners, len(others))),
            self.options,
            self.apart,
        )

    def _aimed(self, points: Collection[CodePoint]) -> tuple[Kernel, str, Edit] | None:
        """An edit that may turn a condition of which one outcome was never seen, with its kernel and family."""
        if self._seen != (now := (len(self.kernels), len(points))):
            self._seen = now
            for kernel in self.kernels:
                wanted = _wanted(kernel, points)
                if wanted or kernel in self._around:
                    around = self._near(kernel)
                    around.goals = around.goals if wanted == around.wanted else None
                    around.wanted = wanted
        left = [one for one, around in self._around.items() if around.wanted and around.goals != []]
        for kernel in sorted(left, key=lambda one: self._around[one].aimed / one.weight):
            around = self._around[kernel]
            if around.goals is None:
                around.goals = self._goals(kernel, around.wanted)
            if around.goals:
                around.aimed += 1
                return kernel, *around.goals.pop()
        return None

    def _goals(self, kernel: Kernel, wanted: frozenset[tuple[str, int]]) -> list[tuple[str, Edit]]:
        """The edits that bring in what one of several conditions depends on, near the nodes that it is about; where it names
        nothing, all near these. The last ones are at the nodes themselves, those before at what they read and at their readers.
        """
        goals = [
            (frozenset(kernel.looked.get(one, ())), self._vocabulary.conditions.get(one, ())) for one in sorted(wanted)
        ]
        named = {name for _, names in goals for name in names}
        site = self._site(kernel, [pattern for pattern in self._patterns() if pattern.name in named])
        around = [(nodes | site.beside(nodes), names) for nodes, names in goals]
        found = [(name, edit) for name, family in FAMILIES.items() for edit in family(site) if _serves(edit, around)]
        self._random.shuffle(found)
        return sorted(found, key=lambda one: _serves(one[1], goals))


def _wanted(kernel: Kernel, points: Collection[CodePoint]) -> frozenset[tuple[str, int]]:
    return frozenset(
        (p.file, p.line) for p in kernel.new if p.outcome >= 0 and p._replace(outcome=1 - p.outcome) not in points
    )


def _serves(edit: Edit, goals: Sequence[tuple[frozenset[str], Collection[object]]]) -> bool:
    """Whether an edit may turn one of several conditions, of which the nodes and what they depend on are known."""
    return any(
        (edit.about in named if named else True) and (not nodes or not nodes.isdisjoint(edit.at))
        for nodes, named in goals
        if nodes or named
    )


__all__ = ["Agenda"]
