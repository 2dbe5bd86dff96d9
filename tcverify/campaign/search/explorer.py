"""The search: learns what a pass does from the programs that it was given, and makes the next ones of that."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Iterator
from dataclasses import dataclass, field

from tcverify.application import Pair, Point
from tcverify.application.vocabulary import Vocabulary
from tcverify.campaign.reduction.facts import Facts
from tcverify.campaign.reduction.fit import facts_of, fit
from tcverify.campaign.reduction.flights import untidy
from tcverify.campaign.reduction.sketch import Sketch, program_of, sketch_of
from tcverify.campaign.search.calls import Calls, Misfit
from tcverify.campaign.search.edits import FAMILIES, Edit, Site
from tcverify.campaign.search.kernels import Apply, Kernel, Rewrite, kernels_of, rewrite_of
from tcverify.errors import TcverifyError
from tcverify.program import Program, program_id

#: Of the edits of a kernel, how many of those come first that bring in what a condition names of which one outcome was never seen.
GOALS = 0.5


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
        self.trials: Counter[str] = Counter()
        self.gains: Counter[str] = Counter()
        self.points: dict[Point, None] = {}
        self._apply = apply
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._calls = Calls(vocabulary.ops)
        self._rewrites: set[Rewrite] = {()}
        self._known: set[str] = set()
        self._edits: dict[Kernel, _Edits] = {}
        self._families: dict[str, str] = {}  # of programs that were made and not yet learnt from

    def learn(self, program: Program, pair: Pair) -> list[Kernel]:
        """Take note of what the pass did with a program; returns the kernels that are new."""
        identity = program_id(program)
        family = self._families.pop(identity, None)
        new = [point for point in pair.reached if point not in self.points]
        rewrite = rewrite_of(pair)
        if family is None:
            self._see(program)
        if pair.failure is not None or (not new and rewrite in self._rewrites):
            return []
        self.points.update(dict.fromkeys(new))
        pending = [(program, new, rewrite if rewrite not in self._rewrites else None)]
        self._rewrites.add(rewrite)
        found: list[Kernel] = []

        def trial(program: Program, points: Iterable[Point], look: bool) -> Pair:
            asked = frozenset(points)
            pair = self._apply(program, asked, look)
            more = [point for point in pair.reached if point not in self.points]
            if more:  # a smaller program may reach what the larger one has not
                self.points.update(dict.fromkeys(more))
                pending.append((program, more, None))
            return pair

        while pending:
            for kernel in kernels_of(*pending.pop(0), trial, self.points):
                self._rewrites.add(kernel.rewrite)
                known = program_id(kernel.program)
                if known not in self._known:
                    self._known.add(known)
                    self.kernels.append(kernel)
                    found.append(kernel)
                    self._calls.learn(kernel.facts)
        if found and family is not None:
            self.gains[family] += 1
        return found

    def _see(self, program: Program) -> None:
        """Take note of how a program that was drawn calls ops."""
        try:
            self._calls.learn(facts_of(sketch_of(program)))
        except TcverifyError:
            pass

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
            if chosen is None:
                continue
            family, edit = chosen
            try:
                sketch = edit.make()
            except Misfit:
                continue
            program = None if sketch is None else self._made(kernel.facts, sketch)
            if program is None:
                continue
            identity = program_id(program)
            if identity not in self._known:
                self._known.add(identity)
                self.trials[family] += 1
                self._families[identity] = family
                return program

    @property
    def behaviours(self) -> int:
        """Places that were reached, and rewrites that were seen."""
        return len(self.points) + len(self._rewrites) - 1

    def edits_around(self) -> tuple[int, int]:
        """How many edits of kernels were tried, and how many there are."""
        for kernel in self.kernels:
            if kernel not in self._edits:
                self._edits[kernel] = self._listed(kernel)
        left = sum(len(edits) for kernel in self.kernels for edits in self._edits[kernel].families.values())
        tried = sum(kernel.trials for kernel in self.kernels)
        return tried, tried + left

    def _next_kernel(self) -> Kernel | None:
        left = [kernel for kernel in self.kernels if kernel not in self._edits or any(self._edits[kernel].families.values())]
        return min(left, key=lambda k: k.trials / k.weight, default=None)

    def _next_edit(self, kernel: Kernel) -> tuple[str, Edit] | None:
        edits = self._edits.get(kernel)
        if edits is None:
            edits = self._edits[kernel] = self._listed(kernel)
        self._aim(kernel, edits)
        for goals in (edits.goals, edits.near):
            while goals and self._random.random() < GOALS:
                family, edit = goals.pop()
                if edit in edits.families[family]:
                    edits.families[family].remove(edit)
                    return family, edit
        names = [family for family, left in edits.families.items() if left]
        if not names:
            return None
        family = names[kernel.trials % len(names)]
        return family, edits.families[family].pop()

    def _listed(self, kernel: Kernel) -> _Edits:
        vocabulary = self._vocabulary
        site = Site(kernel.facts, self._calls.named(), vocabulary.integers, vocabulary.floats)
        families = {name: list(family(site)) for name, family in FAMILIES.items()}
        for left in families.values():
            self._random.shuffle(left)
        return _Edits(families)

    def _aim(self, kernel: Kernel, edits: _Edits) -> None:
        """Let edits come first that may turn a condition of which one outcome was never seen: near the nodes that it is about,
        and of those first the ones that bring in an op that it names."""
        goals = frozenset(
            (p.file, p.line) for p in kernel.new if p.outcome >= 0 and p._replace(outcome=1 - p.outcome) not in self.points
        )
        if goals == edits.wanted:
            return
        edits.wanted = goals
        edits.goals, edits.near = [], []
        about = [(set(kernel.looked.get(goal, ())), self._vocabulary.conditions.get(goal, ())) for goal in sorted(goals)]
        for family, left in edits.families.items():
            for edit in left:
                if any(edit.about in ops and (not names or names.intersection(edit.at)) for names, ops in about):
                    edits.goals.append((family, edit))
                elif any(names.intersection(edit.at) for names, ops in about if not ops):
                    edits.near.append((family, edit))
        self._random.shuffle(edits.goals)
        self._random.shuffle(edits.near)

    def _made(self, facts: Facts, sketch: Sketch) -> Program | None:
        """The program that an edit comes to, if it is a legal one."""
        made = fit(facts, sketch)
        if made is None or untidy(made) > untidy(facts):
            return None
        try:
            return program_of(made.sketch)
        except TcverifyError:
            return None


__all__ = ["Explorer"]
