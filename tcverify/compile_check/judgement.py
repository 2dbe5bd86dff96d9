"""What verification says about one call of a pass, and the terms on which it is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tcverify.application import PassFacts, Subject
from tcverify.execution import Executor
from tcverify.program import Contract
from tcverify.registry.choices import DomainName
from tcverify.verification.verifier import Status


@dataclass(frozen=True, slots=True)
class Judgement:
    """What verification says about one call of a pass. JSON-able by `asdict`.

    Attributes:
        status: of the verdict.
        changed: whether the pass changed the graph of any rank.
        kind: of the first finding.
        headline: the finding in one line.
        text: the counterexample as text.
        doubts: (reason, sentence), why it is inconclusive.
        notes: sentences, what else there is to say.
        path: of the counterexample, or "".
        cached: whether the same pair had been judged before.
    """

    status: Status
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
class JudgingTerms:
    """How calls of a pass are judged.

    Attributes:
        facts: about the pass.
        contract: what it promises.
        subject: makes the pass ready to be applied again, to smaller programs; None where that makes no sense.
        minimise: time limit for reducing a counterexample, in seconds; 0 turns reduction off.
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
    domain: DomainName = "float64"


__all__ = ["Judgement", "JudgingTerms", "decode_judgement", "encode_judgement"]
