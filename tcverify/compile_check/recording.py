"""Makes the counterexample of a compile small, and writes it."""

from __future__ import annotations

import time
from dataclasses import replace

from tcverify.campaign import FindingFound
from tcverify.cases.counterexample import make_counterexample, write_counterexample
from tcverify.compile_check.judgement import Judgement, JudgingTerms
from tcverify.errors import TcverifyError
from tcverify.program import Program
from tcverify.report.html import HtmlReport
from tcverify.report.sanitize import plural, sanitize
from tcverify.report.script import ScriptReport
from tcverify.report.text import to_text
from tcverify.shrink import reduce, suspects_of
from tcverify.verification.verifier import Verdict, verify


def record_finding(verdict: Verdict, kind: str, found: Judgement, terms: JudgingTerms) -> Judgement:
    """Make the program of a finding small, write it down, and say so."""
    drawn = verdict.pair.original.size
    small, cut, notes = _smallest(verdict, kind, terms)
    case = make_counterexample(
        small, kind, terms.facts, terms.contract, size_drawn=drawn, shrink_cut=cut, deep=False
    )  # fmt: skip
    notes = (*found.notes, *notes)
    path = None
    if terms.report_dir is not None:
        said: list[str] = []
        try:
            path = write_counterexample(case, terms.report_dir)
            for report in (ScriptReport(terms.report_dir, said.append), HtmlReport(terms.report_dir, said.append)):
                report(FindingFound(case))
        except TcverifyError as error:
            said.append(error.message)
        notes = (*notes, *(line for line in said))
    if not case.replayable:
        notes = (*notes, f"the pass {terms.facts.name} cannot be imported by name, so this cannot be replayed: give checked "
                         "a module:attribute")  # fmt: skip
    text = "\n".join([to_text(case, path), *(sanitize(note) for note in notes)])
    finding = case.finding
    return replace(
        found,
        headline=f"{kind}: {sanitize(finding.title)}",
        text=text,
        notes=notes,
        path="" if path is None else str(path),
    )


def _smallest(verdict: Verdict, kind: str, terms: JudgingTerms) -> tuple[Verdict, bool, tuple[str, ...]]:
    """The smallest program that was found to show this kind of finding when the pass is applied to it.

    Returns:
        The verdict on it, whether time ran out, and what is to be said about it.
    """
    if terms.subject is None or terms.minimise <= 0:
        return verdict, False, ()
    try:
        subject = terms.subject()
    except TcverifyError as error:
        return verdict, False, (f"not reduced: {error.message}",)
    deadline = time.monotonic() + terms.minimise
    best = [verdict]

    def shows(program: Program) -> bool:
        judged = verify(subject, program, contract=terms.contract, checks=terms.checks, domain=terms.domain)
        if any(finding.kind == kind for finding in judged.findings):
            best[0] = judged
            return True
        return False

    try:
        if not shows(verdict.pair.original):
            why = "the finding does not occur when the pass is applied again, to the saved program"
            return verdict, False, (f"{why}: the program is not reduced, and a replay may not show it",)
        cut = reduce(verdict.pair.original, shows, deadline, suspects_of(best[0], kind)).cut
    except TcverifyError as error:
        return best[0], True, (f"reduced to {plural(best[0].pair.original.size, 'node')}: {error.message}",)
    finally:
        subject.close()
    return best[0], cut, ()


__all__ = ["record_finding"]
