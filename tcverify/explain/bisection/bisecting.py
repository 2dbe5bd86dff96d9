"""Names the rewrite to blame for a finding: `--bisect`.

A pass that asks before each rewrite (see `tcverify.rewrite`), or is made of patterns of PyTorch's matchers, is applied again with
some of its rewrites omitted, the same on all ranks. For any other pass the changes of the graph are split. Either way every
selection is a program that is verified like any other: the blamed rewrites are known to show the finding, and each of
them is needed for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from tcverify.application import AppliedPass, Pair, Subject
from tcverify.errors import TcverifyError
from tcverify.execution import Executor
from tcverify.explain.bisection.changes import changes_between
from tcverify.explain.bisection.search import minimise_subset, smallest_showing_prefix
from tcverify.program import Blame, Contract, Program, Rewrite, RewriteRequest
from tcverify.registry.choices import DomainName
from tcverify.verification.verifier import Verdict, verify

#: Seconds after which no new selection is tried.
TIME_S = 60.0


class _OutOfTime(Exception):
    """No more selections can be tried."""


@dataclass(frozen=True)
class FindingTerms:
    """How the finding came about: what it takes to see it again.

    Attributes:
        kind: of the finding.
        checks: those that were chosen.
        deep: whether it takes a deep application (see `verify`).
    """

    kind: str
    contract: Contract
    confirm: Executor | None = None
    checks: Sequence[str] | None = None
    domain: DomainName = "float64"
    deep: bool = False


def bisect(subject: Subject, verdict: Verdict, terms: FindingTerms, seconds: float = TIME_S) -> Blame:
    """Find the rewrites of a pass that show a finding where none of them can be left out.

    Args:
        verdict: that of the program with the finding.
        seconds: after which it ends with what it has.
    """
    if terms.deep:
        return Blame(why="it occurs when the pass is applied again, not in a rewrite")
    search = _Search(subject, verdict, terms, time.monotonic() + seconds)
    try:
        asked = search.by_asking()
        if asked is not None and asked.rewrites:
            return asked
        return search.by_changes() or asked or Blame(why="the pass returned no graph to bisect")
    except TcverifyError as error:
        return Blame(trials=search.trials, why=f"the search ended early: {error.message}")
    except Exception as error:  # noqa: BLE001 - what explains a finding must not keep it from being told
        return Blame(trials=search.trials, why=f"the search failed: {type(error).__name__}: {error}")


class _Search:
    def __init__(self, subject: Subject, verdict: Verdict, terms: FindingTerms, deadline: float) -> None:
        self.subject = subject
        self.terms = terms
        self.deadline = deadline
        self.trials = 0
        self._pair = verdict.pair
        # Most findings show in lockstep; the process group runs only for those that do not.
        self._confirm: Executor | None = None

    @property
    def _program(self) -> Program:
        return self._pair.original

    def by_asking(self) -> Blame | None:
        """Search among the rewrites that the pass asks for; None where it asks for none."""
        whole = self.subject.apply_counted(self._program, None)
        asked = whole.trace.rewrites
        fullest = max(asked, key=len, default=[])
        if not fullest:
            return None
        rewrites = tuple(Rewrite(i, one.pattern, one.node) for i, one in enumerate(fullest, 1))

        def trial(chosen: Set[int]) -> Pair:
            allowed: list[Set[RewriteRequest]] = [
                frozenset(one for i, one in enumerate(row, 1) if i in chosen) for row in asked
            ]  # fmt: skip
            return self.subject.apply_counted(self._program, allowed)

        return self._search(rewrites, trial, asked=True)

    def by_changes(self) -> Blame | None:
        """Search among the changes of the graph; None where the pass left no graph to take apart."""
        rewritten = self._pair.rewritten
        if rewritten is None or self._pair.foreign is not None or any((*self._program.modules, *rewritten.modules)):
            return None
        changes = changes_between(self._program, rewritten)

        def trial(chosen: Set[int]) -> Pair:
            hybrid = changes.hybrid(chosen)
            return Pair(self._program, hybrid, changed=bool(chosen))

        return self._search(changes.rewrites, trial, asked=False)

    def _search(self, rewrites: tuple[Rewrite, ...], trial: Callable[[Set[int]], Pair], *, asked: bool) -> Blame:
        known: dict[Set[int], bool] = {}

        def shows(chosen: Set[int]) -> bool:
            if chosen not in known:
                if known and time.monotonic() >= self.deadline:
                    raise _OutOfTime
                self.trials += 1
                known[chosen] = self._shows(trial, chosen)
            return known[chosen]

        def blame(numbers: list[int], why: str = "", others: bool = False) -> Blame:
            return Blame(tuple(rewrites[n - 1] for n in numbers), len(rewrites), asked, others, self.trials, why)

        everything = frozenset(range(1, len(rewrites) + 1))
        numbers = sorted(everything)
        try:
            if not shows(everything):
                self._confirm, known = self.terms.confirm, {}
                if self._confirm is None or not shows(everything):
                    return blame([], "it does not occur when all rewrites are applied again")
            if shows(frozenset()):
                return blame([], "it occurs without any of them")
            numbers = numbers[: smallest_showing_prefix(len(numbers), shows)]
            if shows(frozenset(numbers[-1:])):
                numbers = numbers[-1:]
            numbers = minimise_subset(numbers, shows)
            rest = everything - set(numbers)
            return blame(numbers, others=bool(rest) and shows(rest))
        except _OutOfTime:
            return blame(numbers if len(numbers) < len(rewrites) else [], "time ran out before all had been tried")

    def _shows(self, trial: Callable[[Set[int]], Pair], chosen: Set[int]) -> bool:
        """Whether the program with these rewrites alone shows the finding."""
        try:
            pair = trial(chosen)
        except TcverifyError:
            return False  # it is not a valid program: it can show nothing
        terms = self.terms
        verdict = verify(
            AppliedPass(self.subject.facts, terms.contract, replace(pair, stages=[])), self._program, contract=terms.contract,
            confirm=self._confirm, checks=terms.checks, domain=terms.domain, always_confirm=self._confirm is not None,
        )  # fmt: skip
        return any(finding.kind == terms.kind for finding in verdict.findings)


__all__ = ["TIME_S", "FindingTerms", "bisect"]
