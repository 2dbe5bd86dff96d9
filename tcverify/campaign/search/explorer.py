"""The search: learns what a pass does from the programs that it was given, and makes the next ones of that."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator

from tcverify.application import CodePoint, Pair, Watch
from tcverify.application.coverage.vocabulary import Vocabulary
from tcverify.campaign.search.agenda import Agenda
from tcverify.campaign.search.calls import CallPattern, Calls, EditDoesNotFit
from tcverify.campaign.search.edits import Edit
from tcverify.campaign.search.kernels import Apply, Edge, Kernel, Rewrite, edges_of, kernel_of, kernels_of, rewrite_of
from tcverify.campaign.search.more_ranks import move_to_more_ranks
from tcverify.campaign.search.synthesis import synthesise_calls
from tcverify.errors import TcverifyError
from tcverify.execution import Lockstep
from tcverify.ops import lookup
from tcverify.program import Program, program_id
from tcverify.shrink.graph.async_groups import count_untidy
from tcverify.shrink.graph.legalize import facts_of, legalize_edit
from tcverify.shrink.graph.sketch import program_of, sketch_of
from tcverify.shrink.graph.step_facts import Facts

#: Nodes of programs that the pass is applied to for reductions: at first, and for each node of the programs that were tried.
AT_FIRST, PER_NODE = 1_500, 1

#: Calls of a program that is not reduced where it was made of a kernel.
SMALL = 7

#: How many of the programs that are made are edits of edits that showed nothing new, while there are any; and of how many such
#: edits, the latest ones, these are made. Two steps may show what none of them shows alone.
FURTHER, LATEST = 0.3, 32

#: Share of drawn programs whose ranks do different things from which on edits let ranks differ, too.
APART = 0.25

#: Where the pass names fewer patterns of calls than this, others are taken as well.
FEW_PATTERNS = 24


class Explorer:
    """Keeps kernels and makes programs of them.

    Args:
        apply: applies the pass alone.
        vocabulary: what the pass names.
        seed: of what is tried first.
    """

    def __init__(self, apply: Apply, vocabulary: Vocabulary, seed: int = 0) -> None:
        self.points: dict[CodePoint, None] = {}
        self._apply = apply
        self._named = vocabulary.ops
        self._agenda = Agenda(vocabulary, self._patterns, seed)
        self._calls = Calls(vocabulary.ops)
        for name in vocabulary.ops:
            self._calls.guess(synthesise_calls(name))
        self._rewrites: set[Rewrite] = {()}
        self._edges: set[Edge] = set()
        self._parents: dict[str, tuple[Kernel, str, Facts]] = {}  # by program that was made: of what, and by which edit
        self._neutral: deque[tuple[Kernel, Facts]] = deque(maxlen=LATEST)  # edits that showed nothing new
        self._random = random.Random(seed)
        self._untried: deque[Program] = deque()
        self._unjudged: dict[str, Kernel] = {}  # kernels that were not verified, by program
        self.further = 0  # programs that are more than one edit away from a kernel
        self._known: set[str] = set()  # programs that were made, or are kernels
        self._small: set[str] = set()  # kernels
        self._waiting: list[Iterator[Kernel]] = []
        self._news: list[Kernel] = []
        self._nodes = self._reduced = 0
        self._drawn = self._differ = 0

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels so far."""
        return self._agenda.kernels

    def learn(self, program: Program, pair: Pair, *, refuted: bool = False) -> None:
        """Take note of what the pass did with a program. What is new of it leads to kernels when `digest` is called.

        A program that was drawn, or is large, is reduced then. A small one that was made is a kernel as it is.
        """
        self._nodes += program.size
        rewrite = rewrite_of(pair)
        new = rewrite not in self._rewrites
        self._rewrites.add(rewrite)
        kernel = self._unjudged.pop(program_id(program), None)
        if kernel is not None:
            kernel.wrong = refuted
            return
        made = self._parents.pop(program_id(program), None)
        if made is None:
            self._see(program)
            self._await(program, pair, rewritten=new)
            return
        parent, family, facts = made
        edges = edges_of(pair, self._named)
        points = [point for point in pair.trace.reached if point not in self.points]
        news = new or bool(points) or not edges <= self._edges
        self._agenda.tell(family, new=news)
        parent.judged += 1
        parent.refuted += refuted
        if program.size > SMALL:
            self._await(program, pair, rewritten=new)
            return
        if news:
            self._edges |= edges
            self.points.update(dict.fromkeys(points))
            self._waiting.insert(0, self._as_it_is(program, points, parent, refuted))
        elif pair.changed and not refuted:
            self._neutral.append((parent, facts))

    def _as_it_is(self, program: Program, points: list[CodePoint], parent: Kernel, refuted: bool) -> Iterator[Kernel]:
        kernel = kernel_of(program, points, self._trial, self.points, self._named, parent)
        kernel.judged, kernel.refuted, kernel.wrong = 1, int(refuted), refuted
        yield kernel

    def _await(self, program: Program, pair: Pair, *, rewritten: bool = False) -> None:
        """Let what a program was the first to show be reduced: the places that are new, and its rewrite if that is."""
        new = [point for point in pair.trace.reached if point not in self.points]
        if new or rewritten:
            self.points.update(dict.fromkeys(new))
            shown = pair if rewritten else None
            self._waiting.append(kernels_of(program, new, shown, self._trial, self.points, self._named))

    def _trial(self, program: Program, watch: Watch) -> Pair:
        """Apply the pass for a reduction. A smaller program may reach what the larger one has not."""
        self._reduced += program.size
        if not _ends(program):
            return Pair(program)
        pair = self._apply(program, watch)
        self._await(program, pair)
        return pair

    def digest(self) -> None:
        """Reduce what is new to kernels, as long as that has not taken too much for the programs there were."""
        while self._waiting and self._reduced < AT_FIRST + PER_NODE * self._nodes:
            kernel = next(self._waiting[0], None)
            if kernel is None:
                self._waiting.pop(0)
                continue
            self._rewrites.add(kernel.rewrite)
            self._edges |= kernel.edges
            self._keep(kernel)

    def _keep(self, kernel: Kernel) -> None:
        identity = program_id(kernel.program)
        if identity not in self._small:
            self._small.add(identity)
            self._known.add(identity)
            self._agenda.add(kernel)
            self._calls.learn(kernel.facts)
            self._news.append(kernel)
            if kernel.wrong is None and kernel.changed:
                self._unjudged[identity] = kernel
                self._untried.append(kernel.program)

    def take(self, program: Program) -> None:
        """Take a kernel of an earlier search, for what it shows here."""
        pair = self._apply(program, Watch(frozenset(self.points)))
        if pair.failure is None:
            new = [point for point in pair.trace.reached if point not in self.points]
            self.points.update(dict.fromkeys(new))
            kernel = kernel_of(program, new, self._apply, self.points, self._named)
            self._rewrites.add(kernel.rewrite)
            self._edges |= kernel.edges
            self._keep(kernel)

    def news(self) -> list[Kernel]:
        """The kernels that have come since this was last asked for."""
        news, self._news = self._news, []
        return news

    def _see(self, program: Program) -> None:
        """Take note of how a program that was drawn calls ops, of options that it gives the pass, and whether ranks differ."""
        for name, value in program.options.items():
            known = self._agenda.options.setdefault(name, [])
            if value not in known:
                known.append(value)
        with contextlib.suppress(TcverifyError):
            facts = facts_of(sketch_of(program))
            self._calls.learn(facts)
            self._differ += not facts.aligned
            self._drawn += 1
            self._agenda.apart = self._differ >= APART * self._drawn

    def _patterns(self) -> list[CallPattern]:
        """How ops are called in edits: those that the pass names; where these are few, also those of kernels, and some others."""
        named = self._calls.named()
        if len(named) >= FEW_PATTERNS:
            return named
        inside = {step.target for kernel in self.kernels for graph in kernel.facts.sketch.graphs for step in graph}
        others = sorted(self._calls.others(), key=lambda pattern: pattern.target not in inside)
        return [*named, *others[: FEW_PATTERNS - len(named)]]

    def move(self, world_size: int) -> list[CodePoint]:
        """Go on with programs of other ranks: with the kernels that do there what they did.

        Returns:
            The places that were reached, and that none of these kernels reaches. They count as never reached now.
        """
        lost = dict.fromkeys(self.points)
        self._waiting.clear()
        self._neutral.clear()
        self._untried.clear()
        self._unjudged.clear()
        for kernel in self._agenda.clear():
            for program in move_to_more_ranks(kernel.program, world_size):
                again = kernel_of(program, kernel.new, self._apply, lost, self._named)
                if again.changed == kernel.changed and again.rewrite == kernel.rewrite:
                    self._keep(again)
                    break
        self._rewrites, self._edges = {()}, set()  # what is lost shows something new again
        for kernel in self.kernels:
            self._rewrites.add(kernel.rewrite)
            self._edges |= kernel.edges
            for point in kernel.reached:
                lost.pop(point, None)
        for point in lost:
            del self.points[point]
        return list(lost)

    def next(self) -> Program | None:
        """The next program to be tried; None where nothing is left. Kernels that were never verified come first."""
        if self._untried:
            return self._untried.popleft()
        if self._neutral and self._random.random() < FURTHER and (program := self._further()) is not None:
            return program
        while (chosen := self._agenda.next(self.points)) is not None:
            kernel, family, edit = chosen
            program = self._made(kernel, family, edit, kernel.facts)
            if program is not None:
                return program
        return None

    def skip(self, program: Program) -> None:
        """Forget what a program was made of that is not tried."""
        self._parents.pop(program_id(program), None)

    def _further(self) -> Program | None:
        """An edit of a program that showed nothing new, near what sets that apart from its kernel."""
        kernel, facts = self._random.choice(self._neutral)
        chosen = self._agenda.further(kernel, facts)
        program = None if chosen is None else self._made(kernel, *chosen, facts)
        self.further += program is not None
        return program

    def _made(self, kernel: Kernel, family: str, edit: Edit, facts: Facts) -> Program | None:
        """The program that an edit of `facts` comes to, if it is a new one."""
        made = _legal(facts, edit)
        if made is None or program_id(made[0]) in self._known:
            return None
        program, facts = made
        identity = program_id(program)
        self._known.add(identity)
        self._parents[identity] = kernel, family, facts
        return program

    @property
    def behaviours(self) -> int:
        """Places that were reached, and rewrites that were seen."""
        return len(self.points) + len(self._rewrites) - 1

    @property
    def exhausted(self) -> int:
        """Kernels of which all edits were tried."""
        return self._agenda.exhausted


def _legal(facts: Facts, edit: Edit) -> tuple[Program, Facts] | None:
    """The program that an edit comes to, if it is a legal one, and what is known of it."""
    try:
        sketch = edit.make()
    except EditDoesNotFit:
        return None
    made = None if sketch is None else legalize_edit(facts, sketch)
    if made is None or count_untidy(made) > count_untidy(facts):
        return None
    try:
        program = program_of(made.sketch)
    except TcverifyError:
        return None
    return (program, made) if _ends(program) else None


def _ends(program: Program) -> bool:
    """Whether a program comes to its end by itself. It is run only where it may not: where ranks differ, or ops have effects."""
    nodes = (node for graph in program.graphs for node in graph.nodes if node.op == "call_function")
    if len(program.graphs) == 1 and not any(lookup(node.target).effect for node in nodes):
        return True
    try:
        return Lockstep().run(program).finished
    except TcverifyError:
        return True  # the verifier says what is missing


__all__ = ["Explorer"]
