"""A verdict for people: as text, and as the page of its first finding for notebooks."""

from __future__ import annotations

import html

from tcverify.cases.counterexample import Counterexample, make_counterexample
from tcverify.report.html.document import to_html
from tcverify.report.sanitize import sanitize
from tcverify.report.text import to_text
from tcverify.verification.verifier import Verdict

#: Pixels of the page in a notebook.
HEIGHT = 900


def verdict_text(verdict: Verdict) -> str:
    """Return the verdict, then the first finding as shown on the terminal, and further remarks, one line each."""
    lines = [repr(verdict).strip("<>").partition(" ")[2]]
    case = _case(verdict)
    if case is not None:
        lines = [to_text(case, None), ""]
    lines += [f"also: {finding.kind}: {sanitize(finding.title)}" for finding in verdict.findings[1:]]
    lines += [f"hygiene, {finding.kind}: {sanitize(finding.title)}" for finding in verdict.hygiene]
    lines += [f"inconclusive, {doubt.reason}: {sanitize(doubt.detail)}" for doubt in verdict.doubts]
    lines += [f"{note.reason}: {sanitize(note.detail)}" for note in verdict.notes]
    return "\n".join(lines).rstrip()


def verdict_html(verdict: Verdict) -> str:
    """Return the page of the first finding in a frame; for a verdict without findings, its text."""
    case = _case(verdict)
    if case is None:
        return f"<pre>{html.escape(verdict_text(verdict))}</pre>"
    return frame(case)


def frame(case: Counterexample) -> str:
    """Return the page of a counterexample as a frame for a notebook, which needs no file."""
    page = html.escape(to_html(case, None), quote=True)
    return f'<iframe srcdoc="{page}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'


def _case(verdict: Verdict) -> Counterexample | None:
    if not verdict.findings:
        return None
    return make_counterexample(verdict, verdict.findings[0].kind, verdict.facts, verdict.contract)


__all__ = ["frame", "verdict_html", "verdict_text"]
