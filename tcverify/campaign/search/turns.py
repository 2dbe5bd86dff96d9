"""Search: whose turn it is, that of programs that are drawn or of those that are made from what was learnt."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tcverify.application import CodePoint, Pair, Subject, Watch
from tcverify.campaign.search.explorer import Explorer
from tcverify.campaign.search.kernels import Kernel
from tcverify.campaign.search.localisation import suspects_of
from tcverify.campaign.search.summary import KernelFound, SearchSummary
from tcverify.program import NotSerialisable, Program, program_id
from tcverify.shrink.greedy import OutOfTime

#: Programs that are drawn before any is made of what they show; and the fewest programs of which it pays to learn.
FIRST, FEWEST = 30, 90

#: Programs that are made for each one that is drawn after that: at first, and at most; one more for each `GROWS` programs. What a
#: search finds takes longer; programs that are drawn are larger and show other defects.
LEAST, MOST, GROWS = 2, 30, 30

#: Of the programs that contain a cause which is known, one in so many is tried.
MASKED = 10

#: Programs that are watched for a place that was reached by one of which there is nothing to learn.
PATIENCE = 300

#: Programs that showed nothing new, and share of all programs that they have to be, for a search to be over where nothing is left
#: to be made.
QUIET, QUIET_SHARE = 1_000, 0.5

#: Times that the pass may hang or die while programs are reduced; after that none are.
MOST_FATAL = 3


def search_of(subject: Subject, seed: int, programs: int | None) -> ProgramSearch | None:
    """Return the search of a campaign of so many programs (None: of a time); None where these are so few that all are drawn."""
    return ProgramSearch(subject, seed) if programs is None or programs >= FEWEST else None


class ProgramSearch:
    """Learns what a pass does from the programs of a campaign, and makes programs of that.

    Args:
        subject: the pass; it is applied when something is learnt, so it must have answered all that it was asked by then.

    Attributes:
        until: when the time of the campaign is over, by `time.monotonic`: then nothing more is learnt. None where it has none.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        self.until: float | None = None
        self._subject = subject
        self._seed = seed
        self._explorer: Explorer | None = None
        self._shown: list[tuple[Program, Pair, bool]] = []
        self._missed: dict[CodePoint, int] = {}
        self._drawn = 0
        self._made: set[str] = set()
        self._skipped = self._seen = self._quiet = 0
        self._taken = False
        self._reached: set[CodePoint] = set()
        self._left = True  # whether there was a program to make when that was last asked for
        self._fatal = 0
        self._ranks = 0

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels so far."""
        return [] if self._explorer is None else self._explorer.kernels

    @property
    def behaviours(self) -> int:
        """Behaviours that were seen so far."""
        return 0 if self._explorer is None else self._explorer.behaviours

    @property
    def watch(self) -> Watch:
        """What the next program is watched for: places that only programs have reached of which there is nothing to learn."""
        return Watch(frozenset(self._missed))

    def made(self, program: Program) -> bool:
        """Whether a program comes from here."""
        return program_id(program) in self._made

    def note(self, program: Program, pair: Pair, *, refuted: bool) -> None:
        """Take note of what the pass did with a program, and whether something went wrong, to learn from it later."""
        self._missed = {point: left - 1 for point, left in self._missed.items() if left > 1}
        if any(program.modules) or _has_layouts(program) or pair.failure is not None:
            self._missed.update(dict.fromkeys(pair.trace.reached, PATIENCE))
            return
        for point in pair.trace.reached:
            self._missed.pop(point, None)
        self._shown.append((program, pair, refuted))

    def learn(self) -> None:
        """Learn from what was noted. The pass must have answered all that it was asked by then."""
        with contextlib.suppress(OutOfTime):
            self._learn()

    def _learn(self) -> None:
        while self._shown:
            program, pair, refuted = self._shown.pop(0)
            explorer = self._exploring(program.world_size)
            before = explorer.behaviours
            explorer.learn(program, pair, refuted=refuted)
            self._seen += 1
            self._quiet = self._quiet + 1 if explorer.behaviours == before else 0
        if self._explorer is not None and self._begun and self._fatal < MOST_FATAL:
            self._explorer.digest()

    def take(self, program: Program) -> None:
        """Take a kernel of an earlier search: what it makes need not wait for programs that are drawn."""
        with contextlib.suppress(OutOfTime):
            self._exploring(program.world_size).take(program)
            self._taken = True

    def news(self) -> list[Kernel]:
        """The kernels that have come since this was last asked for."""
        return [] if self._explorer is None else self._explorer.news()

    def reached(self) -> set[CodePoint]:
        """The places of the pass that it has reached since this was last asked for, other than by programs of the campaign."""
        reached, self._reached = self._reached, set()
        return reached

    @property
    def _begun(self) -> bool:
        return self._taken or self._drawn >= FIRST

    def _exploring(self, ranks: int) -> Explorer:
        """What learns of programs of so many ranks."""
        if self._explorer is None:
            self._explorer = Explorer(self._apply, self._subject.vocabulary(), self._seed)
        if ranks != self._ranks:
            self._move(ranks)
        return self._explorer

    def _move(self, ranks: int) -> None:
        """Go on with programs of so many ranks. What their first program has reached is not lost."""
        if self._ranks and self._explorer is not None:
            self._missed.update(dict.fromkeys(self._explorer.move(ranks), PATIENCE))
        self._ranks = ranks
        self._seen = self._quiet = 0
        self._left = True

    def turn(self, masked: Callable[[Program], bool]) -> Iterator[Program]:
        """The programs that are to be tried before the next one is drawn.

        Args:
            masked: whether a program contains a cause that is known; of these one in `MASKED` is tried.
        """
        self._drawn += 1
        if self._explorer is None or not self._begun:
            return
        self._left = False
        tried = 0
        share = MOST if self._taken else min(MOST, LEAST + (self._drawn + len(self._made)) // GROWS)
        while tried < share and (program := self._explorer.next()) is not None:
            self._left = True
            if masked(program) and int(program_id(program), 16) % MASKED:
                self._skipped += 1
                self._explorer.skip(program)
                continue
            tried += 1
            self._made.add(program_id(program))
            yield program

    @property
    def over(self) -> bool:
        """Whether all that can be made was tried, and nothing new came up for long."""
        return not self._left and self._quiet >= max(QUIET, QUIET_SHARE * self._seen)

    def summary(self) -> SearchSummary:
        """What it came to so far."""
        if self._explorer is None:
            return SearchSummary()
        kernels = (
            KernelFound(one.program, tuple(sorted(one.new)), one.rewrite, one.changed, one.rewritten)
            for one in self.kernels
        )
        explorer = self._explorer
        return SearchSummary(
            tuple(kernels), explorer.behaviours, len(self._made), explorer.further, self._skipped, explorer.exhausted,
            suspects_of(self.kernels),
        )  # fmt: skip

    def _apply(self, program: Program, watch: Watch) -> Pair:
        if self.until is not None and time.monotonic() >= self.until:
            raise OutOfTime
        try:
            pair = self._subject.start(program, watch=watch)()
        except NotSerialisable:
            return Pair(program)
        if pair.failure is not None and pair.failure.kind != "pass-raised":
            self._fatal += 1  # each takes the pass's time-out, or a new process
        self._reached.update(pair.trace.reached)
        return pair


def _has_layouts(program: Program) -> bool:
    """Whether its tensors carry layouts: such programs are made of plans, which edits of graphs would contradict."""
    return any("layout" in node.meta for graph in program.graphs for node in graph.nodes)


__all__ = ["FIRST", "MOST", "ProgramSearch", "search_of"]
