"""Purity: the pass is a pure function of its graph, and its result survives a second application."""

from __future__ import annotations

from tcverify.application import Defect
from tcverify.checks.evidence import Evidence
from tcverify.checks.values.equivalence import differences
from tcverify.program.finding import Doubt, Finding, Severity

_TITLES = {
    "input-mutated": "the pass changes its input although it returns a new graph",
    "unrepeatable": "the pass gives another result when it runs again",
    "hash-order": "the pass depends on the order of string hashes",
    "not-idempotent": "the pass is not idempotent, although it promises to be",
    "second-application": "the pass cannot be applied to its own result",
    "surroundings": "the pass leaves torch's global state changed",
}


def _data(defect: Defect) -> dict[str, str]:
    return {"aspect": defect.aspect} | ({"stage": defect.stage} if defect.stage is not None else {})


def _severity(defect: Defect) -> Severity:
    """A changed input harms only callers that keep it; a compiler continues with the result of the pass."""
    return "hygiene" if defect.aspect == "input-mutated" else "error"


def check_purity(evidence: Evidence) -> list[Finding | Doubt]:
    """Report impure behaviour seen while the pass was applied, and a second application that breaks the program."""
    findings: list[Finding | Doubt] = [
        Finding("impure-pass", "purity", _TITLES[d.aspect], d.message, d.node, d.rank, _data(d), _severity(d))
        for d in evidence.pair.defects
        if d.aspect in _TITLES
    ]
    again = evidence.again
    if again is None:
        return findings
    title = "a second application of the pass breaks the program"
    problem: str | None = None
    if again.rewritten.hang is not None:
        problem = f"it deadlocks: {again.rewritten.hang}"
    elif again.rewritten.mismatch is not None:
        problem = again.rewritten.mismatch[0]
    elif (failed := again.rewritten.error) is not None:
        problem = f"on rank {failed.rank}, {failed.error}"
    else:
        wrong = [f for f in differences(again, evidence.probe) if isinstance(f, Finding)]
        needed = evidence.law(evidence.pair.again) if wrong and evidence.pair.again is not None else None
        if needed is not None:
            return [*findings, needed]
        problem = wrong[0].title if wrong else None
    if problem is not None:
        findings.append(Finding("impure-pass", "purity", title, problem, data={"aspect": "second-application"}))
    return findings
