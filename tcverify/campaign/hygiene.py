"""Hygiene findings of a campaign: one small program per cause, made when the programs are done."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from tcverify.application import Subject
from tcverify.campaign.blamed_lines import find_editing_lines
from tcverify.campaign.interrupts import Interrupts
from tcverify.campaign.plan import CampaignPlan
from tcverify.campaign.program_verifier import ProgramVerifier
from tcverify.campaign.record import CampaignRecord
from tcverify.campaign.shrinking import Target
from tcverify.cases.counterexample import Counterexample, write_counterexample
from tcverify.cases.fingerprint import fingerprint, fingerprint_of
from tcverify.program import Program
from tcverify.verification.verifier import Verdict

#: Seconds after which no further cause of a kind is tried, and no further trial of shrinking one begins.
SHRINK_TIME = 5.0

#: Causes of one kind that are kept.
MOST_CAUSES = 4


class HygieneFindings:
    """Notes the smallest program of each cause of a hygiene finding. Its case promises strictness, so that a replay refutes it.

    Findings of a kind have one cause if their fingerprints are equal, or if the same line of the pass made them.
    """

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
        self._smallest: dict[tuple[str, str], tuple[Program, bool]] = {}
        self._known = {(entry.kind, entry.fingerprint) for entry in plan.told}
        self._lines: set[tuple[str, tuple[str, int, str]]] = set()

    def note(self, program: Program, deep: bool, verdict: Verdict) -> None:
        """Take note of what a program shows."""
        for finding in verdict.hygiene:
            cause = finding.kind, fingerprint(verdict.pair.original, None, finding)
            known = self._smallest.get(cause)
            if known is None or program.size < known[0].size:
                self._smallest[cause] = program, deep

    def keep(self) -> None:
        """Shrink the program of each cause and keep it as a case.

        Raises:
            UsageError: a case cannot be written.
        """
        by_size = sorted(self._smallest, key=lambda cause: self._smallest[cause][0].size)
        for kind in dict.fromkeys(kind for kind, _ in self._smallest):
            end = time.monotonic() + min(SHRINK_TIME, self._plan.shrink_time)
            kept = tried = 0
            for cause in by_size:
                if cause[0] != kind or cause in self._known:
                    continue
                if kept == MOST_CAUSES or (tried and time.monotonic() > end):
                    break
                kept += self._keep(kind, *self._smallest[cause], end)
                tried += 1

    def _keep(self, kind: str, program: Program, deep: bool, end: float) -> bool:
        """Shrink a program and keep it, unless its cause is known; whether it was kept."""
        verify = partial(self._verify, deep=deep)
        verdict = verify(program)
        if not any(finding.kind == kind for finding in verdict.findings):
            return False  # the pass does not repeat it
        target = Target(kind, deep, program.size, verdict)
        if self._lines and self._is_known(self._case(target)):
            return False  # without shrinking it first
        target.shrink(verify, self._record, max(0.0, end - time.monotonic()))
        case = self._case(target)
        if self._is_known(case):
            return False
        self._known.add((kind, fingerprint_of(case)))
        self._lines.update((kind, line.place) for line in case.made_by[:1])
        write_counterexample(case, self._plan.report_dir)
        self._record.find(case)
        return True

    def _case(self, target: Target) -> Counterexample:
        """The case of the smallest program of a target, with the lines of the pass that made it."""
        case = target.case(target.best, self._subject, self._strict)
        with self._interrupts.open():
            lines = find_editing_lines(self._subject, case)
        return replace(case, finding=replace(case.finding, severity="hygiene"), made_by=lines)

    def _is_known(self, case: Counterexample) -> bool:
        kind = case.finding.kind
        lines = {(kind, line.place) for line in case.made_by[:1]}
        return bool(lines & self._lines) or (kind, fingerprint_of(case)) in self._known

    def _verify(self, program: Program, *, deep: bool) -> Verdict:
        return self._verifier.verify(program, deep=deep, confirm=False, contract=self._strict, brief=True)


__all__ = ["HygieneFindings"]
