"""What happens during a campaign, as data. Reports and progress displays subscribe to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeAlias

from tcverify.application import PassFacts
from tcverify.campaign.coverage import FileReach
from tcverify.campaign.search import SearchSummary
from tcverify.cases.baseline import KnownFinding
from tcverify.cases.counterexample import Counterexample
from tcverify.program import Program
from tcverify.registry.choices import DomainName
from tcverify.verification.verifier import Verdict


@dataclass(slots=True)
class Statistics:
    """Counts over the programs of one campaign; programs run only to shrink a finding are counted apart.

    Attributes:
        programs: drawn and judged.
        changed: programs that the pass changed.
        rewrites: how many rewrites of each pattern the pass reports, and `fired`, in how many programs.
        ran: programs that ran by executor.
        passed, refuted, inconclusive: verdicts.
        known: refuted by nothing but known findings; these do not count as refuted.
        findings: programs by kind of finding, without known ones; `hygiene`, by kind of hygiene finding.
        doubts: inconclusive programs by reason.
        notes: programs by what their verdicts say beside, e.g. that the exact domain stepped aside.
        labels: programs by what they contain.
        shrinking: programs judged to shrink findings.
        seconds: time by phase; where workers share the campaign, of one of them on average.
    """

    programs: int = 0
    changed: int = 0
    passed: int = 0
    refuted: int = 0
    inconclusive: int = 0
    known: int = 0
    shrinking: int = 0
    rewrites: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    hygiene: Counter[str] = field(default_factory=Counter)
    doubts: Counter[str] = field(default_factory=Counter)
    doubt_details: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    note_details: dict[str, str] = field(default_factory=dict)
    labels: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    elapsed: float = 0.0

    def add(self, other: Statistics) -> None:
        """Add what was counted elsewhere, but for the time that it took."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, dict):
                mine.update({name: text for name, text in theirs.items() if name not in mine})
            elif one.name != "elapsed":
                setattr(self, one.name, mine + theirs)

    def count(self, program: Program, verdict: Verdict, known: Collection[str] = ()) -> None:
        """Add one program.

        Args:
            known: the kinds of its findings that are known.
        """
        self.programs += 1
        self.changed += verdict.changed
        self.judge(verdict, known)
        self.rewrites.update(verdict.pair.rewrites)
        self.fired.update(pattern for pattern, times in verdict.pair.rewrites.items() if times)
        self.ran.update(verdict.executors)
        self.labels.update(program.labels)
        self.hygiene.update({finding.kind for finding in verdict.hygiene})
        self.seconds.update(verdict.seconds)
        self.notes.update({note.reason for note in verdict.notes})
        for note in verdict.notes:
            self.note_details.setdefault(note.reason, note.detail)
        if verdict.status == "inconclusive":
            for doubt in verdict.doubts[:1]:
                self.doubts[doubt.reason] += 1
                self.doubt_details.setdefault(doubt.reason, doubt.detail)

    def judge(self, verdict: Verdict, known: Collection[str], times: int = 1) -> None:
        """Add what refutes a program, or (-1 `times`) take it back; `known` as in `count`."""
        new = {f.kind for f in verdict.findings} - set(known)
        status = "known" if verdict.status == "refuted" and not new else verdict.status
        setattr(self, status, getattr(self, status) + times)
        for kind in new:
            self.findings[kind] += times
        self.findings += Counter()  # drops what has come to nothing


#: The verdict on a pass on one mesh.
CampaignVerdict: TypeAlias = Literal["passed", "refuted", "inconclusive", "nothing tested"]

#: Why a campaign ended.
Stop: TypeAlias = Literal["examples", "time", "exhausted", "searched", "first finding", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The beginning of a run of campaigns.

    Attributes:
        passes: their references.
        meshes: names of what the programs run on.
    """

    passes: tuple[str, ...]
    meshes: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The end of a run, however it comes about.

    Attributes:
        code: exit code.
        error: what ended it before its time: one line, or "".
    """

    code: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class CampaignStarted:
    """The beginning of one campaign.

    Attributes:
        guarded: whether the pass runs in a process of its own.
        earlier: failures of earlier runs, which are tried first.
        domain: the number domain that values are judged in.
        cases: of a corpus, which are tried next.
        strategy: what programs are drawn from, where that has a name.
    """

    facts: PassFacts
    mesh: str
    confirm: str
    max_examples: int | None
    max_time: float | None
    seed: int
    guarded: bool
    earlier: int = 0
    domain: DomainName = "float64"
    cases: int = 0
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Sent after every program.

    Attributes:
        phase: "verifying", or "shrinking" and a kind of finding.
        causes: counterexamples so far.
        behaviours: that the search has seen so far; 0 without a search.
    """

    statistics: Statistics
    phase: str
    causes: int = 0
    behaviours: int = 0


@dataclass(frozen=True, slots=True)
class FindingFound:
    counterexample: Counterexample


@dataclass(frozen=True, slots=True)
class Crashed:
    """tcverify itself failed on a program, which is kept at `path`; the error follows."""

    path: Path


@dataclass(frozen=True, slots=True)
class CampaignFinished:
    """The end of one campaign: a pass on one mesh.

    Attributes:
        why: for a campaign that is inconclusive or tested nothing, the reason.
        known: findings of the baseline that were seen, and how many programs showed each.
        reached: what this campaign and those before it have reached of the pass's code, where that is recorded.
        searched: what the search came to, where there was one.
        hygiene: cases of hygiene findings, which do not refute the pass.
    """

    facts: PassFacts
    mesh: str
    statistics: Statistics
    counterexamples: tuple[Counterexample, ...]
    verdict: CampaignVerdict
    why: str
    stop: Stop
    seed: int
    known: tuple[tuple[KnownFinding, int], ...] = ()
    reached: tuple[FileReach, ...] = ()
    searched: SearchSummary | None = None
    hygiene: tuple[Counterexample, ...] = ()


Event: TypeAlias = RunStarted | CampaignStarted | Progress | FindingFound | Crashed | CampaignFinished | RunFinished
Subscriber: TypeAlias = Callable[[Event], None]
