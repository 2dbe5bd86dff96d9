"""The search: learns what a pass does from the programs that it was given, and makes the next ones of that."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tcverify.application import Pair, Point
from tcverify.application.vocabulary import Vocabulary
from tcverify.campaign.reduction.facts import Facts
from tcverify.campaign.reduction.fit import facts_of, fit
from tcverify.campaign.reduction.flights import untidy
from tcverify.campaign.reduction.sketch import program_of, sketch_of
from tcverify.campaign.search.calls import CallPattern, Calls, Misfit
from tcverify.campaign.search.edits import FAMILIES, Edit, Site
from tcverify.campaign.search.kernels import Apply, Kernel, Rewrite, kernels_of, rewrite_of
from tcverify.campaign.search.synthesis import synthesised
from tcverify.errors import TcverifyError
from tcverify.program import Program, program_id

#: How many of the edits that are tried are such as may turn a condition of which one outcome was never seen, while there are any.
GOALS = 0.5

#: Applications that may be spent on reductions: at first, and for each program that was tried.
TRIALS, TRIALS_PER_PROGRAM = 300, 2

#: Where the pass names fewer patterns of calls than this, others are taken as well.
FEW_PATTERNS = 24


@dataclass
class _Edits:
    """What is left to try around a kernel."""

    families: dict[str, list[Edit]]
    goals: list[tuple[str, Edit]] = field(default_factory=list)
    near: list[tuple[str, Edit]] = field(default_factory=list)
    wanted: frozenset[object] = frozenset()


class Explorer:
    """Keeps kernels and makes programs of them.

    Args:
        apply: applies the pass alone.
        vocabulary: what the pass names.
        seed: of what is tried first.
    """

    def __init__(self, apply: Apply, vocabulary: Vocabulary, seed: int = 0) -> None:
        self.kernels: list[Kernel] = []
        self.points: dict[Point, None] = {}
        self._apply = apply
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._calls = Calls(vocabulary.ops)
        for name in vocabulary.ops:
            self._calls.guess(synthesised(name))
        self._rewrites: set[Rewrite] = {()}
        self._known: set[str] = set()  # programs that were made, or are kernels
        self._small: set[str] = set()  # kernels
        self._edits: dict[Kernel, _Edits] = {}
        self._waiting: list[Iterator[Kernel]] = []
        self._programs = self._trials = 0

    def learn(self, program: Program, pair: Pair, *, drawn: bool) -> None:
        """Take note of what the pass did with a program. What is new of it is reduced when `digest` is called.

        Args:
            drawn: whether it shows how ops may be called.
        """
        self._programs += 1
        rewrite = rewrite_of(pair)
        if drawn:
            self._see(program)
        self._await(program, pair, rewrite if rewrite not in self._rewrites else None)
        self._rewrites.add(rewrite)

    def _await(self, program: Program, pair: Pair, rewrite: Rewrite | None) -> None:
        """Let what a program was the first to show be reduced."""
        new = [point for point in pair.reached if point not in self.points]
        if new or rewrite is not None:
            self.points.update(dict.fromkeys(new))
            self._waiting.append(kernels_of(program, new, rewrite, self._trial, self.points))

    def _trial(self, program: Program, points: Iterable[Point], look: bool) -> Pair:
        """Apply the pass for a reduction. A smaller program may reach what the larger one has not."""
        self._trials += 1
        pair = self._apply(program, frozenset(points), look)
        self._await(program, pair, None)
        return pair

    def digest(self) -> None:
        """Reduce what is new to kernels, as long as that has not taken too many applications for the programs there were."""
        while self._waiting and self._trials < TRIALS + TRIALS_PER_PROGRAM * self._programs:
            kernel = next(self._waiting[0], None)
            if kernel is None:
                self._waiting.pop(0)
                continue
            self._rewrites.add(kernel.rewrite)
            identity = program_id(kernel.program)
            if identity not in self._small:
                self._small.add(identity)
                self._known.add(identity)
                self.kernels.append(kernel)
                self._calls.learn(kernel.facts)

    def _see(self, program: Program) -> None:
        """Take note of how a program that was drawn calls ops."""
        with contextlib.suppress(TcverifyError):
            self._calls.learn(facts_of(sketch_of(program)))

    def mask(self, masked: Callable[[Program], bool]) -> None:
        """Try few programs around kernels that contain a cause which is known."""
        for kernel in self.kernels:
            kernel.masked = masked(kernel.program)

    def next(self) -> Program | None:
        """The next program to be tried; None where nothing is left."""
        while True:
            kernel = self._next_kernel()
            if kernel is None:
                return None
            kernel.trials += 1
            chosen = self._next_edit(kernel)
            program = self._made(kernel.facts, chosen)
            identity = "" if program is None else program_id(program)
            if program is not None and identity not in self._known:
                self._known.add(identity)
                return program

    @property
    def behaviours(self) -> int:
        """Places that were reached, and rewrites that were seen."""
        return len(self.points) + len(self._rewrites) - 1

    def edits_around(self) -> tuple[int, int]:
        """How many edits of kernels were tried, and how many there are of these kernels."""
        left = sum(len(some) for edits in self._edits.values() for some in edits.families.values())
        tried = sum(kernel.trials for kernel in self.kernels)
        return tried, tried + left

    def _next_kernel(self) -> Kernel | None:
        """The kernel around which least was tried for its weight, of those that have edits left."""
        while True:
            left = [one for one in self.kernels if one not in self._edits or any(self._edits[one].families.values())]
            kernel = min(left, key=lambda one: one.trials / one.weight, default=None)
            if kernel is None or kernel in self._edits:
                return kernel
            self._edits[kernel] = self._listed(kernel)

    def _next_edit(self, kernel: Kernel) -> Edit:
        """The next edit of a kernel that has some left."""
        edits = self._edits[kernel]
        self._aim(kernel, edits)
        for goals in (edits.goals, edits.near):
            while goals and self._random.random() < GOALS:
                family, edit = goals.pop()
                if edit in edits.families[family]:
                    edits.families[family].remove(edit)
                    return edit
        names = [family for family, left in edits.families.items() if left]
        return edits.families[names[kernel.trials % len(names)]].pop()

    def _listed(self, kernel: Kernel) -> _Edits:
        vocabulary = self._vocabulary
        site = Site(kernel.facts, self._patterns(), vocabulary.integers, vocabulary.floats)
        families = {name: list(family(site)) for name, family in FAMILIES.items()}
        for left in families.values():
            self._random.shuffle(left)
        return _Edits(families)

    def _patterns(self) -> list[CallPattern]:
        """How ops are called in edits: those that the pass names; where these are few, also those of kernels, and some others."""
        named = self._calls.named()
        if len(named) >= FEW_PATTERNS:
            return named
        inside = {step.target for kernel in self.kernels for graph in kernel.facts.sketch.graphs for step in graph}
        others = self._calls.others()
        self._random.shuffle(others)
        others.sort(key=lambda pattern: pattern.target not in inside)
        return [*named, *others[: FEW_PATTERNS - len(named)]]

    def _aim(self, kernel: Kernel, edits: _Edits) -> None:
        """Let edits come first that may turn a condition of which one outcome was never seen: near the nodes that it is about,
        and of those first the ones that bring in an op that it names."""
        goals = frozenset(
            (p.file, p.line)
            for p in kernel.new
            if p.outcome >= 0 and p._replace(outcome=1 - p.outcome) not in self.points
        )
        if goals == edits.wanted:
            return
        edits.wanted = goals
        edits.goals, edits.near = [], []
        about = [
            (set(kernel.looked.get(goal, ())), self._vocabulary.conditions.get(goal, ())) for goal in sorted(goals)
        ]
        for family, left in edits.families.items():
            for edit in left:
                if any(edit.about in ops and (not names or names.intersection(edit.at)) for names, ops in about):
                    edits.goals.append((family, edit))
                elif any(names.intersection(edit.at) for names, ops in about if not ops):
                    edits.near.append((family, edit))
        self._random.shuffle(edits.goals)
        self._random.shuffle(edits.near)

    def _made(self, facts: Facts, edit: Edit) -> Program | None:
        """The program that an edit comes to, if it is a legal one."""
        try:
            sketch = edit.make()
        except Misfit:
            return None
        made = None if sketch is None else fit(facts, sketch)
        if made is None or untidy(made) > untidy(facts):
            return None
        try:
            return program_of(made.sketch)
        except TcverifyError:
            return None


__all__ = ["Explorer"]
