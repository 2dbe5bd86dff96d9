"""The counterexamples in reports/gallery are read, keep their ids and are refuted again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcverify.counterexample import case_id, read_counterexample
from tcverify.replay import replay

ROOT = Path(__file__).parents[2]
GALLERY = sorted((ROOT / "reports" / "gallery").glob("*/counterexample.json"))


#: Kinds of finding that a lowering to streams can show.
STREAMS = {"race", "unordered-collectives", "anchor-mismatch", "stream-conflict", "wrong-schedule", "no-gain"}


def test_there_is_a_gallery() -> None:
    cases = [read_counterexample(path) for path in GALLERY]
    assert {case.finding.check for case in cases} >= {"equivalence", "collectives", "metadata"}
    assert {case.finding.kind for case in cases} >= STREAMS
    assert {case.finding.data.get("kind") for case in cases if case.finding.kind == "race"} == {"RAW", "output"}
    assert any("+" in case.facts.name for case in cases)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.parent.name)
def test_a_known_counterexample_fails_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the passes are found from here
    case = read_counterexample(path)
    assert case.id == path.parent.name == case_id(case.program, case.facts, case.finding.kind)
    found = replay(case, None)
    assert found.state == "failed"
    assert found.case is not None
    assert (found.case.id, found.case.finding.title) == (case.id, case.finding.title)
