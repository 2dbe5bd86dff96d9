"""Search: whose turn it is, that of programs that are drawn or of those that are made from what was learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tcverify.application import Pair, Point, Subject, Watch
from tcverify.campaign.search.explorer import Explorer
from tcverify.campaign.search.kernels import MASKED, Kernel
from tcverify.campaign.search.summary import KernelFound, Searched
from tcverify.program import NotSerialisable, Program, program_id

#: Programs that are drawn before any is made of what they show.
FIRST = 30

#: Programs that are made for each one that is drawn after that.
SHARE = 15

#: Programs that are watched for a place that was reached by one of which there is nothing to learn.
PATIENCE = 300


class Search:
    """Learns what a pass does from the programs of a campaign, and makes programs of that.

    Args:
        subject: the pass; it is applied when something is learnt, so it must have answered all that it was asked by then.
        programs: how many there are to be in all, where that is known: at most a quarter of them is drawn at first.
    """

    def __init__(self, subject: Subject, seed: int, programs: int | None = None) -> None:
        self._first = FIRST if programs is None else min(FIRST, max(1, programs // 4))
        self._subject = subject
        self._seed = seed
        self._explorer: Explorer | None = None
        self._shown: list[tuple[Program, Pair]] = []
        self._missed: dict[Point, int] = {}
        self._drawn = 0
        self._made: set[str] = set()

    @property
    def kernels(self) -> list[Kernel]:
        return [] if self._explorer is None else self._explorer.kernels

    def made(self, program: Program) -> bool:
        """Whether a program comes from here."""
        return program_id(program) in self._made

    def note(self, program: Program, pair: Pair) -> None:
        """Take note of what the pass did with a program, to learn from it later."""
        self._missed = {point: left - 1 for point, left in self._missed.items() if left > 1}
        if any(program.modules) or _has_layouts(program) or pair.failure is not None:
            self._missed.update(dict.fromkeys(pair.reached, PATIENCE))
        else:
            for point in pair.reached:
                self._missed.pop(point, None)
            self._shown.append((program, pair))

    @property
    def watch(self) -> Watch:
        """What the next program is watched for: places that only programs have reached of which there is nothing to learn."""
        return Watch(frozenset(self._missed))

    def learn(self) -> None:
        """Learn from what was noted."""
        while self._shown:
            self._explore().learn(*self._shown.pop(0))
        if self._explorer is not None:
            self._explorer.digest()

    def turn(self, masked: Callable[[Program], bool]) -> Iterator[Program]:
        """The programs that are to be tried before the next one is drawn.

        Args:
            masked: whether a program contains a cause that is known; of these one in `MASKED` is tried.
        """
        self._drawn += 1
        if self._explorer is None:  # it is made when something is learnt: now the pass may be at work
            return
        self._explorer.mask(masked)
        tried = 0
        while tried < (SHARE if self._drawn >= self._first else 0):
            program = self._explorer.next()
            if program is None:
                return
            if masked(program) and int(program_id(program), 16) % MASKED:
                continue
            tried += 1
            self._made.add(program_id(program))
            yield program

    def summary(self) -> Searched:
        """What it came to so far."""
        explorer = self._explore()
        kernels = (
            KernelFound(one.program, tuple(sorted(one.new)), one.rewrite, one.changed) for one in explorer.kernels
        )
        return Searched(tuple(kernels), explorer.behaviours, *explorer.edits_around())

    def _explore(self) -> Explorer:
        if self._explorer is None:
            self._explorer = Explorer(self._apply, self._subject.vocabulary(), self._seed)
        return self._explorer

    def _apply(self, program: Program, points: Iterable[Point], look: bool) -> Pair:
        try:
            return self._subject.start(program, watch=Watch(frozenset(points), look))()
        except NotSerialisable:
            return Pair(program)


def _has_layouts(program: Program) -> bool:
    """Whether its tensors carry layouts: such programs are made of plans, which edits of graphs would contradict."""
    return any("layout" in node.meta for graph in program.graphs for node in graph.nodes)


__all__ = ["FIRST", "SHARE", "Search"]
