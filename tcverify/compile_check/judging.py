"""Judges what a pass did in a compile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tcverify.application import Applied, Pair, PassFacts, Subject
from tcverify.execution import Executor
from tcverify.program import Contract, NotSerialisable, dumps
from tcverify.report.sanitize import plain
from tcverify.verification.verifier import verify


@dataclass(frozen=True, slots=True)
class Judgement:
    """What verification says about one call of a pass. JSON-able by `asdict`.

    Attributes:
        status: "passed", "refuted" or "inconclusive".
        changed: whether the pass changed the graph of any rank.
        kind: of the first finding.
        headline: the finding in one line.
        text: the counterexample as text.
        doubts: (reason, sentence), why it is inconclusive.
        notes: sentences, what else there is to say.
        path: of the counterexample, or "".
        cached: whether the same pair had been judged before.
    """

    status: str
    changed: bool = False
    kind: str = ""
    headline: str = ""
    text: str = ""
    doubts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    path: str = ""
    cached: bool = False

    @classmethod
    def inconclusive(cls, reason: str, detail: str, *, changed: bool = False) -> Judgement:
        return cls("inconclusive", changed, doubts=((reason, detail),))


def encode_judgement(judgement: Judgement) -> dict[str, Any]:
    return asdict(judgement)


def decode_judgement(data: dict[str, Any]) -> Judgement:
    doubts = tuple((reason, detail) for reason, detail in data["doubts"])
    return Judgement(**{**data, "doubts": doubts, "notes": tuple(data["notes"])})


@dataclass(frozen=True, slots=True)
class Terms:
    """How calls of a pass are judged.

    Attributes:
        facts: about the pass.
        contract: what it promises.
        subject: makes the pass ready to be applied again, to smaller programs; None where that makes no sense.
        minimise: seconds for making a counterexample smaller; 0 leaves it as it is.
        report_dir: where counterexamples are written, or None.
        checks, confirm, domain: as `verify` takes them.
    """

    facts: PassFacts
    contract: Contract
    subject: Callable[[], Subject] | None = None
    minimise: float = 20.0
    report_dir: Path | None = field(default_factory=lambda: Path("reports"))
    checks: Sequence[str] | None = None
    confirm: Executor | None = None
    domain: str = "float64"


def pair_key(pair: Pair, terms: Terms) -> str | None:
    """Tells a pair from others: a hash of the programs and of what they are judged by; None where they cannot be written down."""
    try:
        texts = [dumps(pair.original), "" if pair.rewritten is None else dumps(pair.rewritten)]
    except NotSerialisable:
        return None
    texts += [repr(pair.defects), repr(terms.contract), repr(terms.checks), terms.domain, terms.facts.name]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def judge(pair: Pair, terms: Terms, doubt: str | None = None) -> Judgement:
    """Verify what a pass has made of a program.

    Args:
        doubt: why the graphs of some ranks may not be those that the pass makes there; what refutes them is then inconclusive.
    """
    if pair.rewritten is pair.original and not pair.defects:
        return Judgement("passed")
    verdict = verify(
        Applied(terms.facts, terms.contract, pair), pair.original, contract=terms.contract, confirm=terms.confirm,
        checks=terms.checks, domain=terms.domain,
    )  # fmt: skip
    notes = tuple(note.detail for note in verdict.notes)
    doubts = tuple((known.reason, known.detail) for known in verdict.doubts)
    if verdict.status != "refuted":
        return Judgement(verdict.status, pair.changed, doubts=doubts, notes=notes)
    first = verdict.findings[0]
    if doubt is not None:
        return Judgement.inconclusive("one-rank", f"{doubt}; judged as it is: {first.title}", changed=pair.changed)
    headline = f"{first.kind}: {plain(first.title)}"
    found = Judgement("refuted", pair.changed, first.kind, headline, headline, notes=notes)
    try:
        dumps(pair.original)
    except NotSerialisable as error:
        return altered(found, notes=(*notes, f"no counterexample is written: {error.message}"))
    from tcverify.compile_check.recording import (
        recorded,
    )  # reports and reduction take long to import, and few compiles need them

    return recorded(verdict, first.kind, found, terms)


def altered(judgement: Judgement, **changes: Any) -> Judgement:
    """The judgement with other values of some fields."""
    return Judgement(**{**asdict(judgement), "doubts": judgement.doubts, "notes": judgement.notes, **changes})


__all__ = ["Judgement", "Terms", "altered", "decode_judgement", "encode_judgement", "judge", "pair_key"]
