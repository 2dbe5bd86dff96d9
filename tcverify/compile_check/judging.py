"""Judges what a pass did in a compile."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from tcverify.application import AppliedPass, Pair
from tcverify.compile_check.judgement import Judgement, JudgingTerms
from tcverify.program import NotSerialisable, dumps
from tcverify.report.sanitize import sanitize
from tcverify.verification.verifier import verify


def pair_key(pair: Pair, terms: JudgingTerms) -> str | None:
    """Tells a pair from others: a hash of the programs and of what they are judged by; None where they cannot be written down."""
    try:
        texts = [dumps(pair.original), "" if pair.rewritten is None else dumps(pair.rewritten)]
    except NotSerialisable:
        return None
    texts += [repr(pair.defects), repr(terms.contract), repr(terms.checks), terms.domain, terms.facts.name]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def judge_pair(pair: Pair, terms: JudgingTerms, doubt: str | None = None) -> Judgement:
    """Verify what a pass has made of a program.

    Args:
        doubt: why the graphs of some ranks may not be those that the pass makes there; what refutes them is then inconclusive.
    """
    if pair.rewritten is pair.original and not pair.defects:
        return Judgement("passed")
    verdict = verify(
        AppliedPass(terms.facts, terms.contract, pair), pair.original, contract=terms.contract, confirm=terms.confirm,
        checks=terms.checks, domain=terms.domain,
    )  # fmt: skip
    notes = (*(note.detail for note in verdict.notes), *(f"{f.kind}: {sanitize(f.title)}" for f in verdict.hygiene))
    doubts = tuple((known.reason, known.detail) for known in verdict.doubts)
    if verdict.status != "refuted":
        return Judgement(verdict.status, pair.changed, doubts=doubts, notes=notes)
    first = verdict.findings[0]
    if doubt is not None:
        return Judgement.inconclusive("one-rank", f"{doubt}; judged as it is: {first.title}", changed=pair.changed)
    headline = f"{first.kind}: {sanitize(first.title)}"
    found = Judgement("refuted", pair.changed, first.kind, headline, headline, notes=notes)
    try:
        dumps(pair.original)
    except NotSerialisable as error:
        return replace(found, notes=(*notes, f"no counterexample is written: {error.message}"))
    # Late: reports and reduction take long to import, and few compiles need them.
    from tcverify.compile_check.recording import record_finding

    return record_finding(verdict, first.kind, found, terms)


__all__ = ["judge_pair", "pair_key"]
