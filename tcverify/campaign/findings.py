"""The findings of a campaign: programs that show some wait, are shrunk one after the other, and become counterexamples."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from tcverify.application import Subject
from tcverify.campaign.blamed_lines import find_editing_lines
from tcverify.campaign.corpus import reasons_of
from tcverify.campaign.events import FindingFound
from tcverify.campaign.interrupts import Interrupts
from tcverify.campaign.ledger import Ledger, goes_wrong
from tcverify.campaign.pipeline import InFlightProgram
from tcverify.campaign.plan import CampaignPlan
from tcverify.campaign.program_verifier import ProgramVerifier
from tcverify.campaign.record import CampaignRecord
from tcverify.campaign.shrinking import Target
from tcverify.cases.baseline import KnownFinding, known_of
from tcverify.cases.counterexample import Counterexample, write_counterexample
from tcverify.cases.fingerprint import fingerprint_of
from tcverify.errors import UsageError
from tcverify.execution import Executor
from tcverify.program import Program
from tcverify.verification.verifier import Verdict

#: Checks with findings that only a deep application may show.
DEEP_CHECKS = ("purity", "structure")

#: Kinds of findings that a process group can confirm.
CONFIRMED = ("wrong-value", "wrong-alias", "rewritten-raises")


@dataclass(frozen=True, slots=True, eq=False)
class FailedProgram:
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


def tried_end_to_end(case: Counterexample, plan: CampaignPlan) -> Counterexample:
    """The case with what the public API makes of it, written again; as it is where nobody asks for that, and of hygiene.

    Raises:
        UsageError: it cannot be written.
    """
    if plan.end_to_end is None or case.finding.severity != "error":
        return case
    told = plan.end_to_end(case)
    if told is None:
        return case
    case = replace(case, end_to_end=told)
    write_counterexample(case, plan.report_dir)
    return case


class Findings:
    """Counts what programs show, and makes a counterexample of each finding that is news.

    Args:
        confirm: the executor that confirms, or None.

    Attributes:
        ledger: which findings are known.
        waiting: programs that show something new, to be shrunk.
    """

    def __init__(
        self, subject: Subject, plan: CampaignPlan, confirm: Executor | None, record: CampaignRecord, verifier: ProgramVerifier,
        interrupts: Interrupts,
    ) -> None:  # fmt: skip
        self.ledger = Ledger(plan.baseline.of(subject.facts) if plan.baseline is not None else (), collect=plan.collect)
        for entry in plan.told:
            self.ledger.add(entry)
        self.waiting: list[FailedProgram] = []
        self._subject = subject
        self._plan = plan
        self._confirm = confirm
        self._record = record
        self._verifier = verifier
        self._interrupts = interrupts
        self._target: Target | None = None
        self._draft: Counterexample | None = None  # of the target, as it was before it was shrunk

    def take(self, flight: InFlightProgram, verdict: Verdict) -> None:
        """Count a program that has come through; keep it if it shows a new kind of finding."""
        if verdict.changed and verdict.status != "inconclusive" and not goes_wrong(verdict):
            self.ledger.passed(flight.program, {finding.kind for finding in verdict.findings})
        known = self.count(flight.program, verdict)
        if self.ledger.news(verdict) is not None:
            self.waiting.append(FailedProgram(flight.program, flight.deep, verdict, known))

    def count(self, program: Program, verdict: Verdict) -> dict[str, KnownFinding]:
        """Count a program; return those of its findings that are known, by kind."""
        known = self._count(program, verdict)
        self._record.progress()
        if verdict.changed and verdict.status != "inconclusive":
            fired = [pattern for pattern, times in verdict.pair.rewrites.items() if times]
            self._record.remember(program, reasons_of(fired or ["changed"], program.labels))
        return known

    def pursue(self, failed: FailedProgram) -> bool:
        """Shrink the first finding that is news, and the next one while they turn out to be known; whether one was new."""
        known = dict(failed.known)
        new = False
        while not new:
            target = self._aim(failed, known)
            if failed in self.waiting:  # until now: an interrupt keeps what stands there, or else the target
                self.waiting.remove(failed)
            if target is None:
                break
            if not failed.shrunk or self.ledger.by_fingerprint(target.kind):
                self._keep_draft(target)
                self._shrink(target)
            entry = self.ledger.shrunk(target.best, target.kind)
            if entry is None:
                self._keep(target)
                new = True
            else:
                self._target = None
                self._forget_draft()
                known[target.kind] = entry
                self.ledger.settle(failed.verdict, target.kind, entry)
        accepted = self.ledger.of_baseline({**self.ledger.accepted(failed.verdict), **known})
        if accepted != failed.known:
            self._recount(failed.verdict, failed.known, -1)
            self._recount(failed.verdict, accepted, 1)
        return new

    def keep_all(self, under_way: Iterable[InFlightProgram]) -> UsageError | None:
        """Record what is found so far as it is, now that the run ends. Returns why some of it could not be written, if so.

        Unconfirmed: the executor and the pass's process may be in the middle of a conversation.

        Args:
            under_way: programs that may be judged, but are not counted yet.
        """
        unwritten: list[UsageError] = []

        def keep(target: Target) -> None:
            try:
                self._keep(target, unfinished=True)
            except UsageError as error:  # it has been told, and so are the others
                unwritten.append(error)

        if self._target is not None:
            keep(self._target)
        for flight in under_way:
            if flight.verdict is not None:  # judged, but not yet taken out
                self._verifier.cover(flight.verdict)
                known = self._count(flight.program, flight.verdict)
                self.waiting.append(FailedProgram(flight.program, flight.deep, flight.verdict, known))
        for failed in self.waiting:
            new = self.ledger.news(failed.verdict)
            if new is not None:
                keep(Target(new.kind, failed.deep, failed.program.size, failed.verdict, cut=True))
        return unwritten[0] if unwritten else None

    def _count(self, program: Program, verdict: Verdict) -> dict[str, KnownFinding]:
        known = self.ledger.accepted(verdict)
        self._record.statistics.count(program, verdict, known)
        self._record.seen.update(known.values())
        return known

    def _recount(self, verdict: Verdict, known: Mapping[str, KnownFinding], times: int) -> None:
        """Count what is found on a program that is counted already, or (-1 `times`) take it back."""
        self._record.statistics.judge(verdict, known, times)
        for entry in known.values():
            self._record.seen[entry] += times

    def _aim(self, failed: FailedProgram, tried: Collection[str]) -> Target | None:
        """Make the finding of a program that is news the target; `tried` are kinds that turned out to be known."""
        program, deep, verdict = failed.program, failed.deep, failed.verdict
        new = self.ledger.news(verdict, tried)
        if new is None:
            return None
        if deep and new.check not in DEEP_CHECKS:
            shallow = self._verifier.verify(program, deep=False)
            if any(f.kind == new.kind for f in shallow.findings):
                verdict, deep = shallow, False
        self._target = Target(new.kind, deep, program.size, verdict)
        return self._target

    def _shrink(self, target: Target) -> None:
        confirm = target.kind == "executor-divergence"

        def verify(program: Program) -> Verdict:
            return self._verifier.verify(program, deep=target.deep, confirm=confirm, brief=True)

        target.shrink(verify, self._record, self._plan.shrink_time)

    def _keep(self, target: Target, *, unfinished: bool = False) -> None:
        """Record the counterexample of a target, confirmed on the process group where that makes sense.

        Args:
            unfinished: the run ends here: what takes the pass or the executor is left out.
        """
        verdict = target.best
        if target.cut and self.ledger.shrunk(verdict, target.kind) is not None:
            self._target = None  # the run ends here, and what is found so far looks like something known
            self._forget_draft()
            return
        if not unfinished and self._confirm is not None and target.kind in CONFIRMED:
            again = self._verifier.confirm(verdict.pair.original, deep=target.deep)
            if any(f.kind == target.kind for f in again.findings):
                verdict = again
        case = target.case(verdict, self._subject, self._record.contract)
        if not unfinished:
            with self._interrupts.open():
                case = replace(case, made_by=find_editing_lines(self._subject, case))
        try:
            write_counterexample(case, self._plan.report_dir)  # what follows may take long
            if not unfinished and self._plan.blame is not None:
                self._verifier.in_flight.note(case.program, target.deep)
                with self._interrupts.open():
                    blame = self._plan.blame(self._subject, verdict, target.kind, target.deep, self._confirm)
                case = replace(case, blame=blame)
                write_counterexample(case, self._plan.report_dir)
            if not unfinished and self._plan.end_to_end is not None:
                start = time.monotonic()
                with self._interrupts.open():
                    case = tried_end_to_end(case, self._plan)
                self._record.statistics.seconds.update({"end to end": time.monotonic() - start})
            self._target = None
        except UsageError:
            self._target = None
            self._record.tell(FindingFound(case))  # shown it is, before the run ends for want of a place to keep it
            raise
        self.ledger.add(known_of(case), case.program)
        if self._plan.earlier:
            self._record.failures.add(case)
            self._forget_draft(case)
        self._record.remember(case.program, [f"{target.kind}: {fingerprint_of(case)}"], target.kind, deep=case.deep)
        self._record.find(case)

    def _keep_draft(self, target: Target) -> None:
        """Note a finding before it is shrunk, which takes its time: if this process is killed, the next run begins with it."""
        if self._plan.earlier:
            case = target.case(target.best, self._subject, self._record.contract)
            self._draft = replace(case, shrink_cut=True)
            self._record.failures.add(self._draft)

    def _forget_draft(self, kept: Counterexample | None = None) -> None:
        """Remove the note: the finding is kept, or is a known one."""
        if self._draft is not None and (kept is None or kept.id != self._draft.id):
            self._record.failures.discard(self._draft)
        self._draft = None


__all__ = ["FailedProgram", "Findings", "tried_end_to_end"]
