"""The campaign: Hypothesis draws programs, each is verified, and what fails is shrunk, one counterexample per kind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from tcverify.application import Subject
from tcverify.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    Event,
    FindingFound,
    Progress,
    Statistics,
    Subscriber,
)
from tcverify.counterexample import Counterexample, make_counterexample, write_counterexample
from tcverify.execution import Executor
from tcverify.program import Contract, Program, dumps, program_id
from tcverify.verifier import Verdict, verify

#: Share of programs that are applied deeply (see `verify`): those whose id is a multiple of this.
DEEP_EVERY = 16


@dataclass(frozen=True)
class Plan:
    """What a campaign does.

    Attributes:
        programs: draws the programs.
        mesh: names the mesh for reports, e.g. "2 ranks".
        max_examples, max_time: bounds, in programs and seconds; at least one is set.
        report_dir: where counterexamples are written, each as soon as it is found.
        state_dir: where Hypothesis' examples and the program in flight are kept.
        shrink_time: seconds that shrinking one finding may take.
        fail_fast: stop at the first finding.
    """

    programs: SearchStrategy[Program]
    mesh: str
    report_dir: Path
    state_dir: Path
    max_examples: int | None = 200
    max_time: float | None = None
    seed: int = 0
    contract: Contract | None = None
    checks: Sequence[str] | None = None
    shrink_time: float = 30.0
    fail_fast: bool = False


class _Stop(BaseException):
    """Leaves Hypothesis at once. Not an Exception: Hypothesis would take that for a failure to shrink."""


class _Refuted(Exception):
    """Tells Hypothesis that a program fails, so that it shrinks it."""


@dataclass
class _Target:
    """The finding that Hypothesis is shrinking.

    Attributes:
        failing: ids of the programs that show it; after the deadline only these go on failing, which ends the shrinking.
        best: the smallest of them so far.
    """

    kind: str
    deep: bool
    deadline: float
    size_drawn: int
    failing: set[str] = field(default_factory=set)
    best: Verdict | None = None


class Campaign:
    """Verifies one pass on one mesh.

    Args:
        subject: the pass.
        confirm: the executor that confirms, or None to stay in lockstep.
        subscribers: are told what happens.
    """

    def __init__(
        self, subject: Subject, plan: Plan, confirm: Executor | None, subscribers: Iterable[Subscriber] = ()
    ) -> None:
        self.subject = subject
        self.plan = plan
        self.confirm = confirm
        self.subscribers = list(subscribers)
        self.contract = plan.contract or subject.contract
        self.statistics = Statistics()
        self.counterexamples: list[Counterexample] = []
        self._start = time.monotonic()
        self._known: set[str] = set()
        self._target: _Target | None = None
        self._in_flight = plan.state_dir / "in-flight.json"

    def run(self) -> CampaignFinished:
        """Run to the end and return the summary. A KeyboardInterrupt ends the campaign early; what was found is kept."""
        plan = self.plan
        facts = self.subject.facts
        confirm = self.confirm.name if self.confirm is not None else "none"
        guarded = bool(facts.target)
        self._tell(CampaignStarted(facts, plan.mesh, confirm, plan.max_examples, plan.max_time, plan.seed, guarded))
        plan.state_dir.mkdir(parents=True, exist_ok=True)
        try:
            stop = self._rounds()
        except KeyboardInterrupt:
            self._keep_best()
            stop = "interrupted"
        self._in_flight.unlink(missing_ok=True)
        self.statistics.elapsed = time.monotonic() - self._start
        verdict, why = self._judge()
        finished = CampaignFinished(
            facts, plan.mesh, self.statistics, tuple(self.counterexamples), verdict, why, stop, plan.seed
        )
        self._tell(finished)
        return finished

    def _rounds(self) -> str:
        """Draw until the budget is spent; each finding of a new kind ends one round of Hypothesis."""
        drawn = -1
        for number in range(10_000):
            if self._out_of_time():
                return "time"
            if self.plan.max_examples is not None and self.statistics.programs >= self.plan.max_examples:
                return "examples"
            if self.statistics.programs == drawn:
                return "exhausted"
            drawn = self.statistics.programs
            try:
                self._round(number)
            except _Stop:
                return "time" if self._out_of_time() else "examples"
            except (_Refuted, Flaky):
                pass
            if self._target is not None:
                self._keep_best()
                if self.plan.fail_fast:
                    return "first finding"
        return "examples"

    def _round(self, number: int) -> None:
        limit = self.plan.max_examples
        budget = 100_000 if limit is None else max(1, limit - self.statistics.programs)
        # A given seed makes runs repeatable, so earlier failures are tried only in the first round.
        phases = (Phase.reuse, Phase.generate, Phase.shrink) if number == 0 else (Phase.generate, Phase.shrink)

        @hypothesis.seed(self.plan.seed * 10_007 + number)
        @settings(
            max_examples=budget,
            phases=phases,
            database=self._database(),
            deadline=None,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            derandomize=False,
        )
        @given(self.plan.programs)
        def judge(program: Program) -> None:
            if self._fails(program):
                raise _Refuted

        judge()

    def _database(self) -> ExampleDatabase:
        name = "".join(
            c if c.isalnum() else "-"
            for c in f"{self.subject.facts.target or self.subject.facts.name}-{self.plan.mesh}"
        )
        return DirectoryBasedExampleDatabase(self.plan.state_dir / "examples" / name)

    def _fails(self, program: Program) -> bool:
        """Judge one program; whether it shows the finding that is being shrunk."""
        target = self._target
        if target is None:
            return self._explore(program)
        identity = program_id(program)
        if time.monotonic() > target.deadline or identity in target.failing:
            return identity in target.failing
        confirm = self.confirm if target.kind == "executor-divergence" else None
        verdict = self._verify(program, confirm, target.deep)
        self.statistics.shrinking += 1
        self._tell(Progress(self.statistics, f"shrinking {target.kind}"))
        if not any(f.kind == target.kind for f in verdict.findings):
            return False
        target.failing.add(identity)
        if target.best is None or program.size <= target.best.pair.original.size:
            target.best = verdict
        return True

    def _explore(self, program: Program) -> bool:
        if self._out_of_time():
            raise _Stop
        limit = self.plan.max_examples
        if limit is not None and self.statistics.programs >= limit:
            raise _Stop
        identity = program_id(program)
        deep = int(identity, 16) % DEEP_EVERY == 0
        verdict = self._verify(program, self.confirm, deep)
        self._count(program, verdict)
        self._tell(Progress(self.statistics, "verifying"))
        new = next((f.kind for f in verdict.findings if f.kind not in self._known), None)
        if new is None:
            return False
        self._target = _Target(new, deep, time.monotonic() + self.plan.shrink_time, program.size, {identity}, verdict)
        return True

    def _verify(self, program: Program, confirm: Executor | None, deep: bool) -> Verdict:
        # Written down first: whatever happens to this process, the program that did it can be found.
        self._in_flight.write_text(dumps(program))
        return verify(
            self.subject, program, contract=self.contract, confirm=confirm, checks=self.plan.checks, deep=deep
        )

    def _count(self, program: Program, verdict: Verdict) -> None:
        counts = self.statistics
        counts.programs += 1
        counts.changed += verdict.changed
        setattr(counts, verdict.status, getattr(counts, verdict.status) + 1)
        counts.rewrites.update(verdict.pair.rewrites)
        counts.fired.update(pattern for pattern, times in verdict.pair.rewrites.items() if times)
        counts.ran.update(verdict.executors)
        counts.findings.update({f.kind for f in verdict.findings})
        counts.labels.update(program.labels)
        counts.seconds.update(verdict.seconds)
        counts.elapsed = time.monotonic() - self._start
        if verdict.status == "inconclusive":
            for doubt in verdict.doubts[:1]:
                counts.doubts[doubt.reason] += 1
                counts.doubt_details.setdefault(doubt.reason, doubt.detail)

    def _keep_best(self) -> None:
        """Record the counterexample of the current target, confirmed on the process group where that makes sense."""
        target, self._target = self._target, None
        if target is None or target.best is None:
            return
        self._known.add(target.kind)
        verdict = target.best
        if self.confirm is not None and target.kind in ("wrong-value", "wrong-alias", "rewritten-raises"):
            again = verify(
                self.subject,
                verdict.pair.original,
                contract=self.contract,
                confirm=self.confirm,
                checks=self.plan.checks,
                deep=target.deep,
                always_confirm=True,
            )
            if any(f.kind == target.kind for f in again.findings):
                verdict = again
        case = make_counterexample(
            verdict, target.kind, self.subject.facts, self.contract, size_drawn=target.size_drawn, deep=target.deep
        )
        write_counterexample(case, self.plan.report_dir)
        self.counterexamples.append(case)
        self._tell(FindingFound(case))

    def _judge(self) -> tuple[str, str]:
        counts = self.statistics
        if self.counterexamples or counts.refuted:
            return "refuted", ""
        if counts.passed == 0:
            reason = ", ".join(f"{n} {r}" for r, n in counts.doubts.most_common()) or "no program was verified"
            return "nothing tested", f"no program passed ({reason})"
        if counts.changed == 0 and not self.contract.identity:
            return "nothing tested", f"the pass changed none of {counts.programs} programs"
        return "passed", ""

    def _out_of_time(self) -> bool:
        return self.plan.max_time is not None and time.monotonic() - self._start >= self.plan.max_time

    def _tell(self, event: Event) -> None:
        for subscriber in self.subscribers:
            subscriber(event)


__all__ = ["Campaign", "Plan"]
