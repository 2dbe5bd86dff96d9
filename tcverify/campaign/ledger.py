"""Which findings of a campaign are known already, be it from a baseline or from the campaign itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tcverify.campaign.patterns import ProgramPattern
from tcverify.cases.baseline import KnownFinding
from tcverify.cases.fingerprint import fingerprint
from tcverify.program import Finding, Program, program_id
from tcverify.verification.verifier import Verdict

#: Programs with the same fingerprint that are shrunk and turn out to be known, before the next one is taken to be known as well.
#: A program as drawn may show two defects of one kind, and another fingerprint than when it is shrunk: one trial says little.
TRIALS = 2

#: Counterexamples with one fingerprint that are kept where their programs have nothing in common.
MOST_ALIKE = 4

#: Kinds that say that something is noted wrongly, not that anything goes wrong.
NOTED = frozenset({"stale-metadata"})

#: Kinds of which causes may share a fingerprint, for it says little more than that values differ.
OF_VALUES = frozenset({"wrong-value", "rewritten-raises"})


def goes_wrong(verdict: Verdict) -> bool:
    """Whether a program shows more than that something is noted wrongly."""
    return any(finding.kind not in NOTED for finding in verdict.findings)


@dataclass(slots=True)
class _Cause:
    """A cause that is known by a counterexample.

    Attributes:
        holds: whether no program that passed contains the pattern: else the pattern does not tell the cause.
    """

    pattern: ProgramPattern
    entry: KnownFinding
    holds: bool = True


class Ledger:
    """The findings of one pass on one mesh.

    Where all are to be collected, a program shows a known cause if it contains the program of a counterexample of that kind,
    unless programs that pass contain that, too; or if its finding has a fingerprint that shrinks to known ones. Where not, one
    counterexample closes the kind, unless findings of the kind stand in the baseline: then they are told apart by fingerprints.

    Args:
        accepted: the baseline's entries for the pass.
        collect: whether a counterexample makes only its cause known, not its kind.
    """

    def __init__(self, accepted: Iterable[KnownFinding] = (), *, collect: bool = False) -> None:
        self.collect = collect
        self._accepted = frozenset(accepted)
        self._known = {(entry.kind, entry.fingerprint): entry for entry in self._accepted}
        self._closed: set[str] = set()
        self._settled: dict[tuple[str, str], list[KnownFinding]] = {}
        self._causes: dict[str, list[_Cause]] = {}
        self._alike: Counter[tuple[str, str]] = Counter()
        self._kept: dict[tuple[str, str], KnownFinding] = {}  # by kind and program
        self._pattern: tuple[Program, ProgramPattern] | None = None
        self._last: tuple[Verdict, dict[str, str]] | None = None

    def news(self, verdict: Verdict, tried: Collection[str] = ()) -> Finding | None:
        """The finding that is news, if there is one; what goes wrong says more than what is noted wrongly.

        Args:
            tried: kinds that have turned out to be known.
        """
        news = [f for f in verdict.findings if f.kind not in self._closed and f.kind not in tried]
        news = [f for f in news if self.cause(verdict.pair.original, f.kind) is None]
        news = [f for f in news if self._settled_as(verdict, f) is None]
        return min(news, key=lambda f: f.kind in NOTED, default=None)

    def cause(self, program: Program, kind: str) -> KnownFinding | None:
        """The known cause of a finding of a kind that a program contains."""
        causes = [cause for cause in self._causes.get(kind, ()) if cause.holds]
        if not causes:
            return None
        pattern = self._pattern_of(program)
        return next((cause.entry for cause in causes if cause.pattern.within(pattern)), None)

    def masked(self, program: Program) -> bool:
        """Whether a program contains the cause of something that goes wrong."""
        return any(self.cause(program, kind) is not None for kind in self._causes if kind not in NOTED)

    def passed(self, program: Program, noted: Collection[str] = ()) -> None:
        """Take note of a program that the pass changed and that goes right: what it contains is the cause of nothing.

        Args:
            noted: kinds of findings about what is noted wrongly.
        """
        for kind, causes in self._causes.items():
            for cause in causes:
                if kind not in noted and cause.holds and cause.pattern.within(self._pattern_of(program)):
                    cause.holds = False

    def _pattern_of(self, program: Program) -> ProgramPattern:
        if self._pattern is None or self._pattern[0] is not program:
            self._pattern = program, ProgramPattern(program)
        return self._pattern[1]

    def accepted(self, verdict: Verdict) -> dict[str, KnownFinding]:
        """The entries of the baseline that the findings of a program as drawn are, by kind, as far as that is made sure of."""
        entries = {f.kind: self._settled_as(verdict, f) for f in verdict.findings}
        return self.of_baseline({kind: entry for kind, entry in entries.items() if entry is not None})

    def of_baseline(self, known: Mapping[str, KnownFinding]) -> dict[str, KnownFinding]:
        """Of known findings by kind, those that stand in the baseline."""
        return {kind: entry for kind, entry in known.items() if entry in self._accepted}

    def shrunk(self, verdict: Verdict, kind: str) -> KnownFinding | None:
        """The known finding that a finding on a shrunk program is."""
        finding = next(f for f in verdict.findings if f.kind == kind)
        if not self.by_fingerprint(kind):
            return None
        key = self._key(verdict, finding)
        known = self._kept.get((kind, program_id(verdict.pair.original)))
        if known is not None:
            return known
        known = self._known.get(key)
        if known is None or known in self._accepted or kind not in OF_VALUES or self._alike[key] >= MOST_ALIKE:
            return known
        return self.cause(verdict.pair.original, kind)

    def settle(self, drawn: Verdict, kind: str, entry: KnownFinding) -> None:
        """Remember that a program as drawn showed a known finding of this kind when it was shrunk."""
        finding = next(f for f in drawn.findings if f.kind == kind)
        self._settled.setdefault(self._key(drawn, finding), []).append(entry)

    def add(self, entry: KnownFinding, program: Program | None = None) -> None:
        """A counterexample of this finding is kept: the next one like it is not news."""
        if self.collect:
            self._known[entry.kind, entry.fingerprint] = entry
            self._alike[entry.kind, entry.fingerprint] += 1 if program is not None else MOST_ALIKE
            if program is not None:
                self._kept[entry.kind, program_id(program)] = entry
                self._causes.setdefault(entry.kind, []).append(_Cause(ProgramPattern(program), entry))
        else:
            self._closed.add(entry.kind)

    def by_fingerprint(self, kind: str) -> bool:
        """Whether findings of a kind are told apart by their fingerprints."""
        return self.collect or any(kind == known for known, _ in self._known)

    def _settled_as(self, verdict: Verdict, finding: Finding) -> KnownFinding | None:
        if not self.by_fingerprint(finding.kind):
            return None
        settled = self._settled.get(self._key(verdict, finding), [])
        return settled[0] if len(settled) >= TRIALS else None

    def _key(self, verdict: Verdict, finding: Finding) -> tuple[str, str]:
        if self._last is None or self._last[0] is not verdict:
            self._last = verdict, {}
        prints = self._last[1]
        if finding.kind not in prints:
            pair = verdict.pair
            rewritten = pair.rewritten if pair.foreign is None else None
            prints[finding.kind] = fingerprint(pair.original, rewritten, finding)
        return finding.kind, prints[finding.kind]


__all__ = ["TRIALS", "Ledger"]
