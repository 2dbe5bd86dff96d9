"""What a campaign counts, finds and tells from its start to its end, whether this process or workers verify the programs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from tcverify.application import Subject
from tcverify.campaign.campaign_verdict import judge_campaign
from tcverify.campaign.corpus import CorpusCase
from tcverify.campaign.earlier_failures import Failures
from tcverify.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    Event,
    FindingFound,
    Progress,
    Statistics,
    Stop,
    Subscriber,
)
from tcverify.campaign.plan import CampaignPlan
from tcverify.campaign.search import SearchSummary
from tcverify.cases.baseline import KnownFinding, pass_reference
from tcverify.cases.counterexample import Counterexample
from tcverify.program import Program


class CampaignRecord:
    """The record of one campaign. Its time runs from when it is made.

    Args:
        confirm: name of the executor that confirms, or "none".
        subscribers: are told what happens.

    Attributes:
        contract: what the pass promises.
        seen: findings of the baseline, and how many programs showed each.
        failures: of this and earlier campaigns of the pass on the mesh.
    """

    def __init__(self, subject: Subject, plan: CampaignPlan, confirm: str, subscribers: Iterable[Subscriber]) -> None:
        self.contract = plan.contract or subject.contract
        self.statistics = Statistics()
        self.counterexamples: list[Counterexample] = []
        self.hygiene: list[Counterexample] = []
        self.seen: Counter[KnownFinding] = Counter()
        self.failures = Failures(plan.state_dir, subject.facts, plan.mesh)
        self._facts = subject.facts
        self._plan = plan
        self._confirm = confirm
        self._subscribers = list(subscribers)
        self._start = time.monotonic()

    @property
    def end(self) -> float | None:
        """When the time is over, on the monotonic clock; None: there is no bound."""
        return None if self._plan.max_time is None else self._start + self._plan.max_time

    @property
    def remaining(self) -> float | None:
        """Seconds left, of those that there are."""
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    def tell(self, event: Event) -> None:
        """Tell the subscribers."""
        for subscriber in self._subscribers:
            subscriber(event)

    def start(self) -> None:
        """Tell that the campaign begins."""
        plan, facts = self._plan, self._facts
        earlier = len(self.failures) if plan.earlier else 0
        self.tell(
            CampaignStarted(
                facts, plan.mesh, self._confirm, plan.max_examples, plan.max_time, plan.seed, bool(facts.target), earlier,
                plan.domain, len(plan.first), plan.strategy,
            )
        )  # fmt: skip

    def progress(self, phase: str = "verifying") -> None:
        """Tell how far the campaign is."""
        self._take_time()
        behaviours = self._plan.search.behaviours if self._plan.search is not None else 0
        self.tell(Progress(self.statistics, phase, len(self.counterexamples), behaviours))

    def find(self, case: Counterexample) -> None:
        """Take in a counterexample, and tell it."""
        (self.counterexamples if case.finding.severity == "error" else self.hygiene).append(case)
        self.tell(FindingFound(case))

    def remember(self, program: Program, reasons: Iterable[str], kind: str = "", *, deep: bool = False) -> None:
        """Keep a program in the corpus if it shows something new."""
        if self._plan.corpus is not None:
            target = pass_reference(self._facts)
            self._plan.corpus.add(CorpusCase(target, self._plan.mesh, program, tuple(reasons), kind, deep))

    def finish(self, stop: Stop, searched: SearchSummary | None = None) -> CampaignFinished:
        """Judge the campaign, and tell that it has ended."""
        plan = self._plan
        self._take_time()
        decided = plan.coverage.decided() if plan.coverage is not None else ""
        verdict, why = judge_campaign(self.statistics, len(self.counterexamples), self.contract, decided)
        known = tuple(sorted(((e, n) for e, n in self.seen.items() if n), key=lambda one: one[0].key))
        finished = CampaignFinished(
            self._facts, plan.mesh, self.statistics, tuple(self.counterexamples), verdict, why, stop, plan.seed, known,
            plan.coverage.report() if plan.coverage is not None else (), searched, tuple(self.hygiene),
        )  # fmt: skip
        self.tell(finished)
        return finished

    def _take_time(self) -> None:
        self.statistics.elapsed = time.monotonic() - self._start


__all__ = ["CampaignRecord"]
