"""What is to blame is told in every report, and searching for it loses no finding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tcverify.application import InProcess, Subject
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan, FindingFound
from tcverify.cases.counterexample import (
    FILE_NAME,
    decode_counterexample,
    encode_counterexample,
    find_counterexamples,
    read_counterexample,
)
from tcverify.errors import ProgramError
from tcverify.execution import Executor
from tcverify.explain.bisection import FindingTerms, bisect
from tcverify.program import Blame, Program, Rewrite
from tcverify.report.html import to_html
from tcverify.report.markdown import to_markdown
from tcverify.report.ndjson import EVENTS_NAME, EventLog
from tcverify.report.text import to_text
from tcverify.verification.verifier import Verdict
from tests.support.html_cases import case
from tests.support.rewriting_passes import negations, third

BLAME = Blame((Rewrite(3, "fuse <b>", "add_2", ("add_2", "relu")),), 7, trials=9)
SENTENCE = "rewrite 3 of 7, fuse <b> at node 'add_2'"


def test_every_report_says_it(tmp_path: Path) -> None:
    found = replace(case("wrong-value"), blame=BLAME)
    assert f"root cause: {SENTENCE}" in to_text(found, None)
    assert f"**Root cause:** `{SENTENCE}`" in to_markdown(found, None)
    page = to_html(found, None)
    assert "rewrite 3 of 7, fuse &lt;b&gt; at node" in page
    assert "fuse <b>" not in page
    EventLog(tmp_path, print)(FindingFound(found))
    told = json.loads((tmp_path / EVENTS_NAME).read_text())["blame"]
    assert (told["sentence"], told["rewrites"][0]["node"]) == (SENTENCE, "add_2")


def test_reports_without_it_say_nothing(tmp_path: Path) -> None:
    found = case("wrong-value")
    assert "root cause:" not in to_text(found, None)
    assert "Blame" not in to_markdown(found, None)
    EventLog(tmp_path, print)(FindingFound(found))
    assert json.loads((tmp_path / EVENTS_NAME).read_text())["blame"] is None


def test_files_hold_it() -> None:
    found = replace(case("wrong-value"), blame=BLAME)
    data = json.loads(json.dumps(encode_counterexample(found)))
    assert decode_counterexample(data, "here").blame == BLAME
    data["blame"]["rewrites"][0]["number"] = "3"
    with pytest.raises(ProgramError, match="is not of type int"):
        decode_counterexample(data, "here")
    data["blame"] = ["rewrites"]
    with pytest.raises(ProgramError, match="malformed counterexample"):
        decode_counterexample(data, "here")


def plan(directory: Path, **more: object) -> CampaignPlan:
    programs: st.SearchStrategy[Program] = st.just(negations(5))
    state = directory / "state"
    return CampaignPlan(programs, "2 ranks", directory / "reports", state, max_examples=1, shrink_time=0.0, **more)  # type: ignore[arg-type]


def blame(subject: Subject, verdict: Verdict, kind: str, deep: bool, confirm: Executor | None) -> Blame:
    return bisect(subject, verdict, FindingTerms(kind, subject.contract, confirm, deep=deep))


def test_a_campaign_keeps_it(tmp_path: Path) -> None:
    finished = Campaign(InProcess(prepare_pass(third, "", {})), plan(tmp_path, blame=blame), None).run()
    (found,) = finished.counterexamples
    assert str(found.blame).startswith("rewrite 3 of 5, product")
    assert read_counterexample(tmp_path / "reports" / found.id / FILE_NAME).blame == found.blame


def test_an_interrupt_of_the_search_loses_no_finding(tmp_path: Path) -> None:
    def interrupted(*_: object) -> Blame:
        raise KeyboardInterrupt

    told: list[object] = []
    finished = Campaign(
        InProcess(prepare_pass(third, "", {})), plan(tmp_path, blame=interrupted), None, [told.append]
    ).run()  # fmt: skip
    assert (finished.stop, finished.verdict, len(finished.counterexamples)) == ("interrupted", "refuted", 1)
    assert len(find_counterexamples(str(tmp_path / "reports"), tmp_path)) == 1
    assert len([event for event in told if isinstance(event, FindingFound)]) == 1
