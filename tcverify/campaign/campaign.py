"""The campaign: programs are drawn, each is verified, and what fails is shrunk, one counterexample per kind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator

from tcverify.application import Subject
from tcverify.campaign.corpus import is_kernel, reasons_of_kernel
from tcverify.campaign.drawing import draw
from tcverify.campaign.events import CampaignFinished, Crashed, Stop, Subscriber
from tcverify.campaign.findings import FailedProgram, Findings
from tcverify.campaign.hygiene import HygieneFindings
from tcverify.campaign.in_flight import keep_crashed
from tcverify.campaign.interrupts import Interrupts
from tcverify.campaign.ledger import goes_wrong
from tcverify.campaign.pipeline import InFlightProgram, Pipeline
from tcverify.campaign.plan import CampaignPlan
from tcverify.campaign.program_verifier import ProgramVerifier
from tcverify.campaign.record import CampaignRecord
from tcverify.cases.baseline import pass_reference
from tcverify.errors import PassLoadError, UsageError
from tcverify.execution import Executor
from tcverify.program import Program

#: Programs that one round draws at most: Hypothesis remembers all that it has drawn, to draw nothing twice.
BATCH = 10_000


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


class Campaign:
    """Verifies one pass on one mesh, in this process.

    Args:
        subject: the pass.
        confirm: the executor that confirms, or None to stay in lockstep.
        subscribers: are told what happens.

    Attributes:
        record: what it has counted and found.
    """

    def __init__(
        self, subject: Subject, plan: CampaignPlan, confirm: Executor | None, subscribers: Iterable[Subscriber] = ()
    ) -> None:
        self.subject = subject
        self.plan = plan
        self.confirm = confirm
        self.record = CampaignRecord(subject, plan, confirm.name if confirm is not None else "none", subscribers)
        self._interrupts = Interrupts()
        self._verifier = ProgramVerifier(subject, plan, confirm, self.record.contract, self._interrupts)
        self._findings = Findings(subject, plan, confirm, self.record, self._verifier, self._interrupts)
        self._hygiene = HygieneFindings(subject, plan, self.record, self._verifier, self._interrupts)
        self._pipeline = Pipeline(self._verifier.advance, self._verifier.note)
        self._search = plan.search
        self._tried = 0  # of the plan's first cases

    def run(self) -> CampaignFinished:
        """Run to the end and return the summary. A KeyboardInterrupt ends the campaign early; what was found is kept.

        Raises:
            TcverifyError, or whatever else goes wrong in tcverify itself; the program that it happened on is kept.
        """
        in_flight = self._verifier.in_flight
        if self._search is not None:
            self._search.until = self.record.end
        try:
            self.record.start()
            with self._interrupts, _older_objects_frozen():
                stop = self._until_interrupted()
        except BaseException as error:
            ours = isinstance(error, Exception) and not isinstance(error, (UsageError, PassLoadError, BrokenPipeError))
            if ours and in_flight.path.is_file():
                self.record.tell(Crashed(keep_crashed(in_flight.path, self.plan.report_dir)))
            raise
        finally:
            in_flight.clear()
        searched = self._search.summary() if self._search is not None and stop != "interrupted" else None
        return self.record.finish(stop, searched)

    def _until_interrupted(self) -> Stop:
        """Run the rounds, and keep what they have found however they end."""
        try:
            stop = self._rounds()
            if stop != "first finding":
                self._hygiene.keep()
            return stop
        except KeyboardInterrupt:
            self._interrupts.hold()
            unwritten = self._findings.keep_all(self._pipeline.under_way)
            if unwritten is not None:
                raise unwritten from None
            return "interrupted"
        except BaseException:
            self._interrupts.hold()
            self._findings.keep_all(self._pipeline.under_way)
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
            while self._findings.waiting:
                if self._findings.pursue(self._findings.waiting[0]) and self.plan.fail_fast:
                    return "first finding"
            if exhausted:
                return "exhausted"
            number += 1

    def _retry_failures(self) -> bool:
        """Verify what failed in earlier campaigns, and forget what no longer does; whether a new finding ends this campaign."""
        for case in self.record.failures if self.plan.earlier else ():
            if self._spent() is not None:
                break
            shrunk = not case.shrink_cut or case.program.size < case.size_drawn
            failed = self._verified(case.program, case.deep, shrunk)
            verdict = failed.verdict
            if self._findings.pursue(failed):
                if self.plan.fail_fast:
                    return True
            elif case.domain not in ("float64", self.plan.domain):
                pass  # another domain than the one that showed it says nothing about it
            elif verdict.status != "refuted" and not any(d.reason == "executor-failed" for d in verdict.doubts):
                self.record.failures.discard(case)
        return False

    def _try_known(self) -> bool:
        """Verify the programs that the plan puts first; whether a new finding ends the campaign."""
        for known in self.plan.first:
            if self._spent() == "time":
                break
            self._tried += 1
            failed = self._verified(known.program, known.deep, bool(known.kind))
            if self._findings.pursue(failed) and self.plan.fail_fast:
                return True
        return False

    def _verified(self, program: Program, deep: bool, shrunk: bool) -> FailedProgram:
        """Verify and count a program that may fail, since it did before."""
        verdict = self._verifier.verify(program, deep=deep)
        return FailedProgram(program, deep, verdict, self._findings.count(program, verdict), shrunk)

    def _run_round(self, number: int) -> bool:
        """Run one round, until nothing is under way any more; whether the strategy has no more programs."""
        budget = BATCH if self.plan.max_examples is None else min(BATCH, self.plan.max_examples - self._drawn)
        pipeline = self._pipeline = Pipeline(self._verifier.advance, self._verifier.note)
        exhausted = draw(self.plan.programs, self.plan.seed * 10_007 + number, budget, self._take_drawn)
        while len(pipeline):
            self._take(pipeline.answer())
            self._take(pipeline.feed(None))
        return exhausted

    def _take_drawn(self, program: Program) -> bool:
        """Verify a program that was drawn, and what the search makes of it; whether the round goes on."""
        if not self._send(program):
            return False
        made = self._search.turn(self._findings.ledger.masked) if self._search is not None else ()
        return all(map(self._send, made))

    def _send(self, program: Program) -> bool:
        """Send a program on its way; whether the round is to go on with others."""
        self._interrupts.check()
        if self._spent(len(self._pipeline)) is not None:
            return False
        self._take(self._pipeline.answer())
        if self._search is not None:  # the pass's process has nothing else to do now
            with self._interrupts.open():
                self._search.learn()
            self._keep_kernels()
        if not self._findings.waiting:
            self._take(self._pipeline.feed(self._verifier.begin(program)))
        return not self._findings.waiting

    def _take(self, flights: Iterable[InFlightProgram]) -> None:
        """Take in programs that have come through."""
        for flight in flights:
            verdict = flight.verdict
            if verdict is None:
                continue
            self._verifier.cover(verdict)
            if self._search is not None:
                self._search.note(flight.program, verdict.pair, refuted=goes_wrong(verdict))
            self._findings.take(flight, verdict)
            self._hygiene.note(flight.program, flight.deep, verdict)

    def _take_kernels(self) -> None:
        """Begin the search with what earlier campaigns have learnt."""
        if self.plan.corpus is not None and self._search is not None:
            for case in self.plan.corpus.cases(pass_reference(self.subject.facts), self.plan.mesh):
                if is_kernel(case):
                    self._interrupts.check()
                    self._verifier.in_flight.note(case.program, False)
                    with self._interrupts.open():
                        self._search.take(case.program)
            self._keep_kernels()

    def _keep_kernels(self) -> None:
        """Keep what the search has learnt: places that it has reached, kernels in the corpus."""
        if self._search is not None:
            if self.plan.coverage is not None:
                self.plan.coverage.add(self._search.reached())
            for kernel in self._search.news():
                self.record.remember(kernel.program, reasons_of_kernel(kernel.rewrite, kernel.new))

    def _spent(self, under_way: int = 0) -> Stop | None:
        """Why it ends, counting programs under way, or None."""
        if self.record.remaining == 0:
            return "time"
        if self.plan.max_examples is not None and self._drawn + under_way >= self.plan.max_examples:
            return "examples"
        if self._search is not None and self._search.over:
            return "searched"
        return None

    @property
    def _drawn(self) -> int:
        """Programs that the bound on programs counts."""
        return self.record.statistics.programs - self._tried


__all__ = ["Campaign"]
