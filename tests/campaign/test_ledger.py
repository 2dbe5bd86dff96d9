"""What is news in a campaign."""

from __future__ import annotations

import pytest

from tcverify.application import Pair
from tcverify.campaign.ledger import Ledger
from tcverify.cases.baseline import KnownFinding
from tcverify.program.finding import Finding
from tcverify.verification.verifier import Verdict
from tests.support.programs import reduce_then_norm

WRONG = Finding("wrong-value", "equivalence", "output 0 is wrong on rank 0")
STALE = Finding("stale-metadata", "metadata", "meta['val'] of 'mm' is missing")


@pytest.mark.parametrize("findings", [[WRONG, STALE], [STALE, WRONG]])
def test_what_goes_wrong_is_news_before_what_is_noted_wrongly(findings: list[Finding]) -> None:
    verdict = Verdict("refuted", findings, [], Pair(reduce_then_norm()))
    assert Ledger().news(verdict) is WRONG
    assert Ledger().news(verdict, tried=["wrong-value"]) is STALE
    assert Ledger().news(verdict, tried=["wrong-value", "stale-metadata"]) is None


def test_what_goes_right_contains_no_cause() -> None:
    """Even where something is noted wrongly: else a pass that keeps no metadata hides all that contains its first cause."""
    ledger, program = Ledger(collect=True), reduce_then_norm()
    for kind in ("wrong-value", "stale-metadata"):
        ledger.add(KnownFinding("pass", kind, "one"), program)
    assert ledger.masked(program)
    ledger.passed(program, ["stale-metadata"])
    assert not ledger.masked(program)
    assert ledger.cause(program, "wrong-value") is None
    assert ledger.cause(program, "stale-metadata") is not None


def test_the_program_of_a_counterexample_shows_it_whatever_else_goes_right() -> None:
    ledger, program, entry = Ledger(collect=True), reduce_then_norm(), KnownFinding("pass", "wrong-value", "one")
    ledger.add(entry, program)
    ledger.passed(program)
    assert ledger.shrunk(Verdict("refuted", [WRONG], [], Pair(program)), "wrong-value") is entry
