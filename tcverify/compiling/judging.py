"""Judges what a pass did in a compile: verifies the pair, makes the counterexample small, writes it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tcverify.application import Applied, Pair, PassFacts, Subject
from tcverify.campaign import FindingFound
from tcverify.campaign.reduction import reduce
from tcverify.counterexample import make_counterexample, write_counterexample
from tcverify.errors import TcverifyError
from tcverify.execution import Executor
from tcverify.program import Contract, NotSerialisable, Program, dumps
from tcverify.report.html import HtmlReport
from tcverify.report.plain import count, plain
from tcverify.report.script import ScriptReport
from tcverify.report.text import to_text
from tcverify.verifier import Verdict, verify


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
        return _with(found, notes=(*notes, f"no counterexample is written: {error.message}"))
    return _recorded(verdict, first.kind, found, terms)


def _with(judgement: Judgement, **changes: Any) -> Judgement:
    return Judgement(**{**asdict(judgement), "doubts": judgement.doubts, "notes": judgement.notes, **changes})


def _recorded(verdict: Verdict, kind: str, found: Judgement, terms: Terms) -> Judgement:
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
        notes = (*notes, f"the pass {terms.facts.name} cannot be imported by name, so that nobody can replay this: give checked "
                         "a module:attribute")  # fmt: skip
    text = "\n".join([to_text(case, path), *(plain(note) for note in notes)])
    finding = case.finding
    return _with(
        found,
        headline=f"{kind}: {plain(finding.title)}",
        text=text,
        notes=notes,
        path="" if path is None else str(path),
    )


def _smallest(verdict: Verdict, kind: str, terms: Terms) -> tuple[Verdict, bool, tuple[str, ...]]:
    """The smallest program that was found to show this kind of finding when the pass is applied to it.

    Returns:
        The verdict on it, whether time ran out, and what is to be said about it.
    """
    if terms.subject is None or terms.minimise <= 0:
        return verdict, False, ()
    deadline = time.monotonic() + terms.minimise
    try:
        subject = terms.subject()
    except TcverifyError as error:
        return verdict, False, (f"not made smaller: {error.message}",)
    best = [verdict]

    def shows(program: Program) -> bool:
        judged = verify(subject, program, contract=terms.contract, checks=terms.checks, domain=terms.domain)
        if any(finding.kind == kind for finding in judged.findings):
            best[0] = judged
            return True
        return False

    try:
        if not shows(verdict.pair.original):
            why = "applied once more, to the program as it is written down, the pass does not show this"
            return verdict, False, (f"{why}: it is not made smaller, and a replay may show nothing",)
        cut = reduce(verdict.pair.original, shows, deadline).cut
    except TcverifyError as error:
        return best[0], True, (f"made smaller up to {count(best[0].pair.original.size, 'node')}: {error.message}",)
    finally:
        subject.close()
    return best[0], cut, ()


__all__ = ["Judgement", "Terms", "decode_judgement", "encode_judgement", "judge", "pair_key"]
