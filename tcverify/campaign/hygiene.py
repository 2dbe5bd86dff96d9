"""Hygiene findings of a campaign: one small program per kind, made when the programs are done."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tcverify.application import Subject
from tcverify.campaign.blamed_lines import find_editing_lines
from tcverify.campaign.interrupts import Interrupts
from tcverify.campaign.plan import CampaignPlan
from tcverify.campaign.program_verifier import ProgramVerifier
from tcverify.campaign.record import CampaignRecord
from tcverify.campaign.shrinking import Target
from tcverify.cases.counterexample import write_counterexample
from tcverify.program import Program
from tcverify.verification.verifier import Verdict

#: Seconds after which no new trial of shrinking a hygiene finding begins.
SHRINK_TIME = 5.0


class HygieneFindings:
    """Notes the smallest program of each kind of hygiene finding. Its case promises strictness, so that a replay refutes it."""

    def __init__(
        self,
        subject: Subject,
        plan: CampaignPlan,
        record: CampaignRecord,
        verifier: ProgramVerifier,
        interrupts: Interrupts,
    ) -> None:
        self._subject = subject
        self._plan = plan
        self._record = record
        self._verifier = verifier
        self._interrupts = interrupts
        self._strict = replace(record.contract, strict=True)
        self._smallest: dict[str, tuple[Program, bool]] = {}

    def note(self, program: Program, deep: bool, verdict: Verdict) -> None:
        """Take note of what a program shows."""
        for finding in verdict.hygiene:
            known = self._smallest.get(finding.kind)
            if known is None or program.size < known[0].size:
                self._smallest[finding.kind] = program, deep

    def keep(self) -> None:
        """Shrink the program of each kind and keep it as a case.

        Raises:
            UsageError: a case cannot be written.
        """
        for kind, (program, deep) in self._smallest.items():
            verify = partial(self._verify, deep=deep)
            verdict = verify(program)
            if not any(finding.kind == kind for finding in verdict.findings):
                continue  # the pass does not repeat it
            target = Target(kind, deep, program.size, verdict)
            target.shrink(verify, self._record, min(SHRINK_TIME, self._plan.shrink_time))
            case = target.case(target.best, self._subject, self._strict)
            with self._interrupts.open():
                lines = find_editing_lines(self._subject, case)
            case = replace(case, finding=replace(case.finding, severity="hygiene"), made_by=lines)
            write_counterexample(case, self._plan.report_dir)
            self._record.find(case)

    def _verify(self, program: Program, *, deep: bool) -> Verdict:
        return self._verifier.verify(program, deep=deep, confirm=False, contract=self._strict, brief=True)


__all__ = ["HygieneFindings"]
