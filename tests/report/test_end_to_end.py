"""What the public API makes of a case is told in every report, kept in its file, and loses no finding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan, FindingFound
from tcverify.campaign.findings import tried_end_to_end
from tcverify.cases.counterexample import (
    FILE_NAME,
    Counterexample,
    decode_counterexample,
    encode_counterexample,
    find_counterexamples,
    read_counterexample,
)
from tcverify.cases.end_to_end import EndToEnd
from tcverify.errors import ProgramError
from tcverify.report.html import to_html
from tcverify.report.markdown import to_markdown
from tcverify.report.ndjson import EVENTS_NAME, EventLog
from tcverify.report.text import to_text
from tests.support.html_cases import case
from tests.support.rewriting_passes import negations, third

SHOWN = EndToEnd("shown", "torch.compile", "wrong value on rank 1", ("rank 1: output 0: expected 1, got 2",))


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (SHOWN, "also in torch.compile: wrong value on rank 1"),
        (replace(SHOWN, with_defaults=True), "also in torch.compile: wrong value on rank 1, with default settings too"),
        (EndToEnd("right", "torch.compile", "the same"), "torch.compile gives the right result under these options"),
        (EndToEnd("unreachable", "DTensor", "no GPU"), "could not be reached in DTensor: no GPU"),
        (EndToEnd("failed", "torch.compile", "no time"), "torch.compile could not be tried: no time"),
    ],
)
def test_every_report_says_it(told: EndToEnd, sentence: str, tmp_path: Path) -> None:
    found = replace(case("wrong-value"), end_to_end=told)
    assert f"end to end: {sentence}" in " ".join(to_text(found, None).split())
    assert f"**End to end:** `{sentence}`" in to_markdown(found, None)
    assert f"<b>End to end:</b> {sentence}" in to_html(found, None)
    EventLog(tmp_path, print)(FindingFound(found))
    data = json.loads((tmp_path / EVENTS_NAME).read_text())["end_to_end"]
    assert (data["sentence"], data["state"], data["lines"]) == (sentence, told.state, list(told.lines))


def test_reports_without_it_say_nothing(tmp_path: Path) -> None:
    found = case("wrong-value")
    assert "end to end" not in to_text(found, None)
    assert "End to end" not in to_markdown(found, None) + to_html(found, None)
    EventLog(tmp_path, print)(FindingFound(found))
    assert json.loads((tmp_path / EVENTS_NAME).read_text())["end_to_end"] is None


def test_files_hold_it() -> None:
    data = json.loads(json.dumps(encode_counterexample(replace(case("wrong-value"), end_to_end=SHOWN))))
    assert decode_counterexample(data, "here").end_to_end == SHOWN
    both = replace(SHOWN, with_defaults=True)
    found = encode_counterexample(replace(case("wrong-value"), end_to_end=both))
    assert decode_counterexample(json.loads(json.dumps(found)), "here").end_to_end == both
    del data["end_to_end"]["with_defaults"]  # as in files written before
    assert decode_counterexample(data, "here").end_to_end == SHOWN
    for wrong in ({"state": "perhaps"}, {"detail": 3}, {"lines": [None]}, {"lines": 7}, {"with_defaults": "no"}):
        with pytest.raises(ProgramError, match="malformed counterexample"):
            decode_counterexample({**data, "end_to_end": {**data["end_to_end"], **wrong}}, "here")
    with pytest.raises(ProgramError, match="lacks 'state'"):
        decode_counterexample({**data, "end_to_end": {}}, "here")


def campaign(directory: Path, end_to_end: object, told: list[object]) -> Campaign:
    plan = CampaignPlan(
        st.just(negations(5)), "2 ranks", directory / "reports", directory / "state", max_examples=1, shrink_time=0.0,
        end_to_end=end_to_end,  # type: ignore[arg-type]
    )  # fmt: skip
    return Campaign(InProcess(prepare_pass(third, "", {})), plan, None, [told.append])


def test_a_campaign_tries_what_it_keeps(tmp_path: Path) -> None:
    tried: list[str] = []
    told: list[object] = []

    def end_to_end(found: Counterexample) -> EndToEnd:
        assert find_counterexamples(str(tmp_path / "reports"), tmp_path)  # the finding is written before it is tried
        tried.append(found.id)
        return SHOWN

    (found,) = campaign(tmp_path, end_to_end, told).run().counterexamples
    assert (found.end_to_end, tried) == (SHOWN, [found.id])
    cases = [event.counterexample for event in told if isinstance(event, FindingFound)]
    assert [case.end_to_end for case in cases if case.finding.severity == "error"] == [SHOWN]
    assert read_counterexample(tmp_path / "reports" / found.id / FILE_NAME).end_to_end == SHOWN


def test_hygiene_is_not_tried(tmp_path: Path) -> None:
    found = case("wrong-value")
    hygiene = replace(found, finding=replace(found.finding, severity="hygiene"))
    plan = campaign(tmp_path, lambda _: SHOWN, []).plan
    assert tried_end_to_end(hygiene, plan) is hygiene
    assert tried_end_to_end(found, plan).end_to_end == SHOWN


def test_an_interrupt_of_the_trial_loses_no_finding(tmp_path: Path) -> None:
    def interrupted(_: Counterexample) -> EndToEnd:
        raise KeyboardInterrupt

    told: list[object] = []
    finished = campaign(tmp_path, interrupted, told).run()
    assert (finished.stop, finished.verdict, len(finished.counterexamples)) == ("interrupted", "refuted", 1)
    assert len(find_counterexamples(str(tmp_path / "reports"), tmp_path)) == 1
    assert len([event for event in told if isinstance(event, FindingFound)]) == 1
