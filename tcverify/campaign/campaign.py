"""The campaign: Hypothesis draws programs, each is verified, and what fails is shrunk, one counterexample per kind."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import hypothesis
from hypothesis import given, settings
from hypothesis.errors import Unsatisfiable

from tcverify.application import Subject
from tcverify.campaign.blamed_lines import find_editing_lines
from tcverify.campaign.campaign_verdict import judge_campaign
from tcverify.campaign.corpus import CorpusCase, is_kernel, reasons_of, reasons_of_kernel
from tcverify.campaign.earlier_failures import Failures
from tcverify.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    Crashed,
    Event,
    FindingFound,
    Progress,
    Statistics,
    Stop,
    Subscriber,
)
from tcverify.campaign.hypothesis_settings import SETTINGS, keep_constants_out
from tcverify.campaign.in_flight import InFlight, keep_crashed
from tcverify.campaign.interrupts import Interrupts
from tcverify.campaign.ledger import NOTED, Ledger
from tcverify.campaign.pipeline import InFlightProgram, Pipeline
from tcverify.campaign.plan import CampaignPlan
from tcverify.campaign.shrinking import Target
from tcverify.cases.baseline import KnownFinding, known_of, pass_reference
from tcverify.cases.counterexample import Counterexample, make_counterexample, write_counterexample
from tcverify.cases.fingerprint import fingerprint_of
from tcverify.errors import PassLoadError, UsageError
from tcverify.execution import Executor
from tcverify.program import Program, program_id
from tcverify.shrink import reduce, suspects_of
from tcverify.verification.verifier import Phase, Verdict, chosen_checks, verify, verify_in_steps

#: Share of programs that are applied deeply (see `verify`): those whose id is a multiple of this.
DEEP_EVERY = 16

#: Checks with findings that only a deep application may show.
DEEP_CHECKS = ("purity", "structure")


#: Programs that one round draws at most: Hypothesis remembers all that it has drawn, to draw nothing twice.
BATCH = 10_000


class _Stop(BaseException):
    """Leaves Hypothesis at once. Not an Exception: Hypothesis would take that for a failure and repeat it."""


class _Broken(BaseException):
    """Carries an error of ours, or a test runner's time-out, out of Hypothesis, which would repeat that too."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@contextlib.contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Spare the garbage collector what is there already (torch, above all), which it would look through again and again."""
    if gc.get_freeze_count():  # somebody does that already
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True, eq=False)
class _Failed:
    """A program whose findings are to be looked at.

    Attributes:
        known: those of its findings that it is counted as known by, by kind.
        shrunk: whether it was shrunk in an earlier run.
    """

    program: Program
    deep: bool
    verdict: Verdict
    known: Mapping[str, KnownFinding]
    shrunk: bool = False


class Campaign:
    """Verifies one pass on one mesh.

    Args:
        subject: the pass.
        confirm: the executor that confirms, or None to stay in lockstep.
        subscribers: are told what happens.
    """

    def __init__(
        self, subject: Subject, plan: CampaignPlan, confirm: Executor | None, subscribers: Iterable[Subscriber] = ()
    ) -> None:
        self.subject = subject
        self.plan = plan
        self.confirm = confirm
        self.subscribers = list(subscribers)
        self.contract = plan.contract or subject.contract
        self.statistics = Statistics()
        self.counterexamples: list[Counterexample] = []
        self._start = time.monotonic()
        self._tried = 0  # of the plan's first cases
        entries = plan.baseline.of(subject.facts) if plan.baseline is not None else ()
        self._ledger = Ledger(entries, collect=plan.collect)
        for entry in plan.told:
            self._ledger.add(entry)
        self._failed: list[_Failed] = []  # waiting to be shrunk
        self._target: Target | None = None
        self._draft: Counterexample | None = None  # of the target, as it was before it was shrunk
        self._pipeline = Pipeline(self._advance, self._note)
        self._interrupts = Interrupts()
        self._in_flight = InFlight(plan.state_dir, subject, self.contract)
        self._checks = chosen_checks(plan.checks)
        self._failures = Failures(plan.state_dir, subject.facts, plan.mesh)
        self._search = plan.search

    def run(self) -> CampaignFinished:
        """Run to the end and return the summary. A KeyboardInterrupt ends the campaign early; what was found is kept.

        Raises:
            TcverifyError, or whatever else goes wrong in tcverify itself; the program that it happened on is kept.
        """
        plan = self.plan
        facts = self.subject.facts
        if self._search is not None:
            self._search.until = None if plan.max_time is None else self._start + plan.max_time
        confirm = self.confirm.name if self.confirm is not None else "none"
        bounds = plan.max_examples, plan.max_time
        earlier = len(self._failures) if plan.earlier else 0
        try:
            guarded = bool(facts.target)
            cases = len(plan.first)
            self._tell(
                CampaignStarted(
                    facts, plan.mesh, confirm, *bounds, plan.seed, guarded, earlier, plan.domain, cases, plan.strategy
                )
            )
            with self._interrupts, _older_objects_frozen():
                stop = self._until_interrupted()
        except BaseException as error:
            ours = isinstance(error, Exception) and not isinstance(error, (UsageError, PassLoadError, BrokenPipeError))
            if ours and self._in_flight.path.is_file():
                self._tell(Crashed(keep_crashed(self._in_flight.path, plan.report_dir)))
            raise
        finally:
            self._in_flight.clear()
        self.statistics.elapsed = time.monotonic() - self._start
        verdict, why = judge_campaign(self.statistics, len(self.counterexamples), self.contract)
        known = tuple(sorted(((e, n) for e, n in self._ledger.seen.items() if n), key=lambda one: one[0].key))
        finished = CampaignFinished(
            facts, plan.mesh, self.statistics, tuple(self.counterexamples), verdict, why, stop, plan.seed, known,
            plan.coverage.report() if plan.coverage is not None else (),
            self._search.summary() if self._search is not None and stop != "interrupted" else None,
        )  # fmt: skip
        self._tell(finished)
        return finished

    def _until_interrupted(self) -> Stop:
        """Run the rounds, and keep what they have found however they end."""
        try:
            return self._rounds()
        except KeyboardInterrupt:
            self._interrupts.hold()
            unwritten = self._keep_found()
            if unwritten is not None:
                raise unwritten from None
            return "interrupted"
        except BaseException:
            self._interrupts.hold()
            self._keep_found()
            raise

    def _rounds(self) -> Stop:
        """Try earlier failures and known cases, then draw until the budget is spent; a finding of a new kind ends a round."""
        self._take_kernels()
        if self._retry_failures() or self._try_known():
            return "first finding"
        number = 0
        while True:
            self._interrupts.check()
            spent = self._spent()
            if spent is not None:
                return spent
            exhausted = self._run_round(number)
            while self._failed:
                if self._pursue(self._failed[0]) and self.plan.fail_fast:
                    return "first finding"
            if exhausted:
                return "exhausted"
            number += 1

    def _retry_failures(self) -> bool:
        """Verify what failed in earlier campaigns, and forget what no longer does; whether a new finding ends this campaign."""
        for case in self._failures if self.plan.earlier else ():
            if self._spent() is not None:
                break
            verdict = self._verify(case.program, self.confirm, case.deep)
            shrunk = not case.shrink_cut or case.program.size < case.size_drawn
            failed = _Failed(case.program, case.deep, verdict, self._count(case.program, verdict), shrunk)
            if self._pursue(failed):
                if self.plan.fail_fast:
                    return True
            elif case.domain not in ("float64", self.plan.domain):
                pass  # another domain than the one that showed it says nothing about it
            elif verdict.status != "refuted" and not any(d.reason == "executor-failed" for d in verdict.doubts):
                self._failures.discard(case)
        return False

    def _try_known(self) -> bool:
        """Verify the programs that the plan puts first; whether a new finding ends the campaign."""
        for known in self.plan.first:
            if self._spent() == "time":
                break
            verdict = self._verify(known.program, self.confirm, known.deep)
            self._tried += 1
            counted = self._count(known.program, verdict)
            failed = _Failed(known.program, known.deep, verdict, counted, shrunk=bool(known.kind))
            if self._pursue(failed) and self.plan.fail_fast:
                return True
        return False

    def _run_round(self, number: int) -> bool:
        """Run one round, until nothing is under way any more; whether the strategy has no more programs."""
        budget = BATCH if self.plan.max_examples is None else min(BATCH, self.plan.max_examples - self._drawn)
        exhausted = False
        pipeline = self._pipeline = Pipeline(self._advance, self._note)
        try:
            exhausted = self._draw(number, budget, pipeline) < budget
        except _Stop:
            pass
        except _Broken as broken:
            raise broken.error from None
        except Unsatisfiable:  # the strategy rejects all that it draws
            exhausted = True
        while len(pipeline):
            self._take(pipeline.answer())
            self._take(pipeline.feed(None))
        return exhausted

    def _draw(self, number: int, budget: int, pipeline: Pipeline) -> int:
        """Draw programs and verify them, and what the search makes of them, until one fails in a new way.

        Returns:
            How many were drawn.
        """
        drawn = 0

        @hypothesis.seed(self.plan.seed * 10_007 + number)
        @settings(SETTINGS, max_examples=budget)
        @given(self.plan.programs)
        def take(program: Program) -> None:
            nonlocal drawn
            try:
                done = not self._try(program, pipeline)
                drawn += not done
                for made in self._search.turn(self._ledger.masked) if self._search is not None and not done else ():
                    done = not self._try(made, pipeline)
                    if done:
                        break
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise _Broken(error) from error
            if done or self._failed:
                raise _Stop

        keep_constants_out()
        take()
        return drawn

    def _try(self, program: Program, pipeline: Pipeline) -> bool:
        """Send a program on its way; whether the campaign is to go on with others."""
        self._interrupts.check()
        if self._spent(len(pipeline)) is not None:
            return False
        self._take(pipeline.answer())
        if self._search is not None:  # the pass's process has nothing else to do now
            with self._interrupts.open():
                self._search.learn()
            self._keep_kernels()
        if not self._failed:
            self._take(pipeline.feed(self._flight(program)))
        return not self._failed

    def _pursue(self, failed: _Failed) -> bool:
        """Shrink the first finding that is news, and the next one while they turn out to be known; whether one was new."""
        known = dict(failed.known)
        new = False
        while not new:
            target = self._aim(failed, known)
            if failed in self._failed:  # until now: an interrupt keeps what stands there, or else the target
                self._failed.remove(failed)
            if target is None:
                break
            if not failed.shrunk or self._ledger.by_fingerprint(target.kind):
                self._keep_draft(target)
                self._shrink(target)
            entry = self._ledger.shrunk(target.best, target.kind)
            if entry is None:
                self._keep_best()
                new = True
            else:
                self._target = None
                self._forget_draft()
                known[target.kind] = entry
                self._ledger.settle(failed.verdict, target.kind, entry)
        accepted = self._ledger.of_baseline({**self._ledger.accepted(failed.verdict), **known})
        if accepted != failed.known:
            self._count_findings(failed.verdict, failed.known, -1)
            self._count_findings(failed.verdict, accepted, 1)
        return new

    def _shrink(self, target: Target) -> None:
        """Reduce the program of a finding to the smallest that shows this kind of finding."""

        def shows(program: Program) -> bool:
            confirm = self.confirm if target.kind == "executor-divergence" else None
            verdict = self._verify(program, confirm, target.deep, brief=True)
            self.statistics.shrinking += 1
            self._tell(Progress(self.statistics, f"shrinking {target.kind}"))
            return target.record(verdict)

        start = time.monotonic()
        target.cut = True  # until it has come to its end
        suspects = suspects_of(target.best, target.kind)
        try:
            target.cut = reduce(target.best.pair.original, shows, start + self.plan.shrink_time, suspects).cut
        finally:
            self.statistics.seconds.update({"shrinking": time.monotonic() - start})

    def _flight(self, program: Program) -> InFlightProgram:
        some = int(program_id(program), 16) % DEEP_EVERY == 0
        deep = self.plan.deep or some
        made = self._search is not None and self._search.made(program)
        steps = verify_in_steps(
            self.subject, program, contract=self.contract, confirm=self.confirm if some or not made else None,
            checks=self._checks, domain=self.plan.domain, deep=deep, lean=made,
            watch=self._search.watch if self._search is not None else None,
        )  # fmt: skip
        return InFlightProgram(program, deep, steps)

    def _advance(self, flight: InFlightProgram, until: Phase | None) -> None:
        try:
            with self._interrupts.open():
                flight.advance(until)
        except Exception:
            self._note(flight)
            raise

    def _note(self, flight: InFlightProgram) -> None:
        self._in_flight.note(flight.program, flight.deep)

    def _take(self, flights: list[InFlightProgram]) -> None:
        """Count programs that have come through; keep those that show a new kind of finding."""
        for flight in flights:
            if flight.verdict is None:
                continue
            self._cover(flight.verdict)
            wrong = any(finding.kind not in NOTED for finding in flight.verdict.findings)
            if self._search is not None:
                self._search.note(flight.program, flight.verdict.pair, refuted=wrong)
            if flight.verdict.changed and flight.verdict.status != "inconclusive" and not wrong:
                self._ledger.passed(flight.program, {finding.kind for finding in flight.verdict.findings})
            known = self._count(flight.program, flight.verdict)
            if self._ledger.news(flight.verdict) is not None:
                self._failed.append(_Failed(flight.program, flight.deep, flight.verdict, known))

    def _aim(self, failed: _Failed, tried: Collection[str]) -> Target | None:
        """Make the finding of a program that is news the target; `tried` are kinds that turned out to be known."""
        program, deep, verdict = failed.program, failed.deep, failed.verdict
        new = self._ledger.news(verdict, tried)
        if new is None:
            return None
        if deep and new.check not in DEEP_CHECKS:
            shallow = self._verify(program, self.confirm, False)
            if any(f.kind == new.kind for f in shallow.findings):
                verdict, deep = shallow, False
        self._target = Target(new.kind, deep, program.size, verdict)
        return self._target

    def _verify(self, program: Program, confirm: Executor | None, deep: bool, *, brief: bool = False) -> Verdict:
        self._in_flight.note(program, deep)
        with self._interrupts.open():
            verdict = verify(
                self.subject, program, contract=self.contract, confirm=confirm, checks=self.plan.checks,
                domain=self.plan.domain, deep=deep, brief=brief,
            )  # fmt: skip
        self._cover(verdict)
        return verdict

    def _cover(self, verdict: Verdict) -> None:
        """Note what a program has reached: a place is told once, also where that is while a finding is shrunk."""
        if self.plan.coverage is not None:
            self.plan.coverage.add(verdict.pair.reached)

    def _count(self, program: Program, verdict: Verdict) -> dict[str, KnownFinding]:
        """Count a program; return those of its findings that are known, by kind."""
        known = self._ledger.accepted(verdict)
        self.statistics.count(program, verdict, known)
        self._ledger.seen.update(known.values())
        self.statistics.elapsed = time.monotonic() - self._start
        self._tell(Progress(self.statistics, "verifying"))
        fired = [pattern for pattern, times in verdict.pair.rewrites.items() if times]
        if verdict.changed and verdict.status != "inconclusive":
            self._remember(program, reasons_of(fired or ["changed"], program.labels))
        return known

    def _remember(self, program: Program, reasons: Iterable[str], kind: str = "", *, deep: bool = False) -> None:
        """Keep a program in the corpus if it shows something new."""
        if self.plan.corpus is not None:
            target = pass_reference(self.subject.facts)
            self.plan.corpus.add(CorpusCase(target, self.plan.mesh, program, tuple(reasons), kind, deep))

    def _keep_kernels(self) -> None:
        """Keep what the search has learnt: places that it has reached, kernels in the corpus."""
        if self._search is not None:
            if self.plan.coverage is not None:
                self.plan.coverage.add(self._search.reached())
            for kernel in self._search.news():
                self._remember(kernel.program, reasons_of_kernel(kernel.rewrite, kernel.new))

    def _take_kernels(self) -> None:
        """Begin the search with what earlier campaigns have learnt."""
        if self.plan.corpus is not None and self._search is not None:
            for case in self.plan.corpus.cases(pass_reference(self.subject.facts), self.plan.mesh):
                if is_kernel(case):
                    self._interrupts.check()
                    self._in_flight.note(case.program, False)
                    with self._interrupts.open():
                        self._search.take(case.program)
            self._keep_kernels()

    def _count_findings(self, verdict: Verdict, known: Mapping[str, KnownFinding], times: int) -> None:
        """Count what is found on a program that is counted already, or (-1 `times`) take it back."""
        self.statistics.judge(verdict, known, times)
        for entry in known.values():
            self._ledger.seen[entry] += times

    def _keep_found(self) -> UsageError | None:
        """Record what is found so far as it is, now that the run ends. Returns why some of it could not be written, if so.

        Unconfirmed: the executor and the pass's process may be in the middle of a conversation.
        """
        unwritten: list[UsageError] = []

        def keep_best() -> None:
            try:
                self._keep_best(confirm=False)
            except UsageError as error:  # it has been told, and so are the others
                unwritten.append(error)

        keep_best()
        for flight in self._pipeline.under_way:
            if flight.verdict is not None:  # judged, but not yet taken out
                self._cover(flight.verdict)
                known = self._ledger.accepted(flight.verdict)
                self.statistics.count(flight.program, flight.verdict, known)
                self._ledger.seen.update(known.values())
                self._failed.append(_Failed(flight.program, flight.deep, flight.verdict, known))
        for failed in self._failed:
            new = self._ledger.news(failed.verdict)
            if new is not None:
                self._target = Target(new.kind, failed.deep, failed.program.size, failed.verdict, cut=True)
                keep_best()
        return unwritten[0] if unwritten else None

    def _keep_best(self, *, confirm: bool = True) -> None:
        """Record the counterexample of the current target, confirmed on the process group where that makes sense."""
        target = self._target
        if target is None:
            return
        verdict = target.best
        if target.cut and self._ledger.shrunk(verdict, target.kind) is not None:
            self._target = None  # the run ends here, and what is found so far looks like something known
            self._forget_draft()
            return
        if confirm and self.confirm is not None and target.kind in ("wrong-value", "wrong-alias", "rewritten-raises"):
            self._in_flight.note(verdict.pair.original, target.deep)
            again = verify(
                self.subject,
                verdict.pair.original,
                contract=self.contract,
                confirm=self.confirm,
                checks=self.plan.checks,
                domain=self.plan.domain,
                deep=target.deep,
                always_confirm=True,
            )
            self._cover(again)
            if any(f.kind == target.kind for f in again.findings):
                verdict = again
        case = self._case(target, verdict)
        if confirm:
            with self._interrupts.open():
                case = replace(case, made_by=find_editing_lines(self.subject, case))
        try:
            write_counterexample(case, self.plan.report_dir)  # what follows may take long
            if confirm and self.plan.blame is not None:
                self._in_flight.note(case.program, target.deep)
                with self._interrupts.open():
                    blame = self.plan.blame(self.subject, verdict, target.kind, target.deep, self.confirm)
                case = replace(case, blame=blame)
                write_counterexample(case, self.plan.report_dir)
            self._target = None
        except UsageError:
            self._target = None
            self._tell(FindingFound(case))  # shown it is, before the run ends for want of a place to keep it
            raise
        self._ledger.add(known_of(case), case.program)
        if self.plan.earlier:
            self._failures.add(case)
            self._forget_draft(case)
        self._remember(case.program, [f"{target.kind}: {fingerprint_of(case)}"], target.kind, deep=case.deep)
        self.counterexamples.append(case)
        self._tell(FindingFound(case))

    def _case(self, target: Target, verdict: Verdict) -> Counterexample:
        return make_counterexample(
            verdict,
            target.kind,
            self.subject.facts,
            self.contract,
            size_drawn=target.size_drawn,
            shrink_cut=target.cut,
            deep=target.deep,
            pass_timeout=self.subject.timeout,
            real_shapes=target.real_shapes,
        )

    def _keep_draft(self, target: Target) -> None:
        """Note a finding before it is shrunk, which takes its time: if this process is killed, the next run begins with it."""
        if self.plan.earlier:
            self._draft = replace(self._case(target, target.best), shrink_cut=True)
            self._failures.add(self._draft)

    def _forget_draft(self, kept: Counterexample | None = None) -> None:
        """Remove the note: the finding is kept, or is a known one."""
        if self._draft is not None and (kept is None or kept.id != self._draft.id):
            self._failures.discard(self._draft)
        self._draft = None

    def _spent(self, under_way: int = 0) -> Stop | None:
        """Why it ends, counting programs under way, or None."""
        if self.plan.max_time is not None and time.monotonic() - self._start >= self.plan.max_time:
            return "time"
        if self.plan.max_examples is not None and self._drawn + under_way >= self.plan.max_examples:
            return "examples"
        if self._search is not None and self._search.over:
            return "searched"
        return None

    @property
    def _drawn(self) -> int:
        """Programs that the bound on programs counts."""
        return self.statistics.programs - self._tried

    def _tell(self, event: Event) -> None:
        for subscriber in self.subscribers:
            subscriber(event)


__all__ = ["Campaign"]
