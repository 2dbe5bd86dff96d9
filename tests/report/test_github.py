"""What GitHub Actions shows of a run: annotations, and a summary of the job."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcverify.application import PassFacts
from tcverify.campaign import CampaignFinished, CampaignStarted, Event, FindingFound, RunFinished, Statistics
from tcverify.cases.counterexample import Counterexample, EditingLine
from tcverify.program import Finding
from tcverify.report import github
from tcverify.report.annotation import annotate
from tcverify.report.github import SUMMARY, GithubReport, workflow_command
from tests.cases.test_counterexample import some_case
from tests.report.test_report import nasty_case

FACTS = PassFacts("Pass", "mine.py:Pass")
STARTED = CampaignStarted(FACTS, "2 ranks", "gloo", 20, None, 1, True)
CASE = some_case(facts=FACTS, made_by=(EditingLine("rms_norm", "creates", "mine.py", 7, "rewrite"),))
HYGIENE = Finding("stale-metadata", "metadata", "wrong shape", severity="hygiene")


@pytest.fixture(autouse=True)
def summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.setenv(SUMMARY, str(tmp_path / "summary.md"))
    return tmp_path / "summary.md"


def finished(verdict: str = "passed", *cases: Counterexample, **changes: Any) -> CampaignFinished:
    counts = Statistics(programs=20, changed=9)
    return replace(CampaignFinished(FACTS, "2 ranks", counts, cases, verdict, "", "examples", 1), **changes)


def run(*events: Event) -> None:
    report = GithubReport(Path("reports"), pytest.fail)
    for event in events:
        report(event)


def test_a_finding_is_an_annotation_and_a_case_of_the_summary(
    summary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # commands are never broken into lines
    summary.write_text("before\n")
    hygienic = replace(CASE, id="0123abcd", finding=HYGIENE)
    run(STARTED, FindingFound(CASE), FindingFound(hygienic), finished("refuted", CASE), RunFinished(1))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("::error file=mine.py,line=7,title=wrong-value in Pass::output 0 is wrong%0A")
    assert first.endswith(f"%0AReplay: tcverify replay {CASE.id}")
    assert second.startswith("::warning file=mine.py,line=7,title=stale-metadata in Pass::wrong shape%0A")
    text = summary.read_text()
    assert text.startswith("before\n## tcverify\n\n| pass |")
    assert "| `Pass` | `2 ranks` | **refuted** | 20 | 9 | 1 `wrong-value`, 1 `stale-metadata` (hygiene) |\n" in text
    assert text.count("<details><summary>") == text.count("</details>") == 2
    assert f"<summary>{CASE.id}: wrong-value in Pass</summary>\n\n### `wrong-value` in `Pass`" in text


def test_a_sound_run_has_no_annotations(summary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(STARTED, finished(), RunFinished(0))
    assert capsys.readouterr().out == ""
    assert summary.read_text().endswith(
        "|---|---|---|---|---|---|\n| `Pass` | `2 ranks` | passed | 20 | 9 | none |\n\n"
    )


def test_the_summary_says_what_else_ended_a_campaign(summary: Path) -> None:
    tested = finished("nothing tested", why="the pass changed | nothing")
    run(STARTED, tested, replace(STARTED, mesh="4 ranks"), RunFinished(2, "the disk is full"))
    text = summary.read_text()
    assert "The run ended early: `the disk is full`\n" in text
    assert "| **nothing tested**: `the pass changed \\| nothing` |" in text
    assert "| `Pass` | `4 ranks` | **not finished** |" in text


def test_without_the_variable_there_are_annotations_alone(
    summary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SUMMARY)
    run(STARTED, FindingFound(CASE), finished("refuted", CASE), RunFinished(1))
    assert capsys.readouterr().out.startswith("::error ")
    assert not summary.exists()


def test_a_summary_that_cannot_be_written_is_told(summary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary.mkdir()
    told: list[str] = []
    report = GithubReport(Path("reports"), told.append)
    for event in (STARTED, FindingFound(CASE), finished("refuted", CASE), RunFinished(1)):
        report(event)
    assert told == [
        f"{summary} was not written: IsADirectoryError: [Errno 21] Is a directory: '{summary}'; the run continues"
    ]


def test_whatever_a_pass_says_stays_in_its_place(summary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(nasty_case(), facts=PassFacts("<b>a,b:50%\n::set-env", "mine.py:Pass"))
    started = replace(STARTED, facts=case.facts)
    run(started, FindingFound(case), finished("refuted", case, facts=case.facts), RunFinished(1))
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"::error file=[^,:]*,line=1,title=[^,:]*::.*", line)
    assert "title=pass-raised in <b>a%2Cb%3A50%25\\n%3A%3Aset-env::" in line
    assert line.isprintable()
    text = summary.read_text()
    assert "<summary>" + case.id + ": pass-raised in &lt;b&gt;a,b:50%\\n::set-env</summary>" in text
    assert "| `<b>a,b:50%\\n::set-env` | `2 ranks` |" in text


def test_a_long_summary_keeps_what_there_is_room_for(summary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary.write_text("x" * 100)
    monkeypatch.setattr(github, "MAX_SUMMARY", 3000)
    cases = [replace(CASE, id=f"0000000{number}") for number in range(4)]
    run(STARTED, *map(FindingFound, cases), finished("refuted", *cases), RunFinished(1))
    text = summary.read_text()
    shown = text.count("<details><summary>")
    assert 0 < shown < 4
    assert f"{4 - shown} more case" in text
    assert len(text) < 3200


def test_what_goes_to_a_baseline_is_a_warning(tmp_path: Path) -> None:
    shown = annotate(CASE, tmp_path / "case.json", accepting=True)
    assert workflow_command(shown).startswith("::warning ")


def test_files_are_named_from_the_root_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path / "sub")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    command = workflow_command(annotate(CASE, Path("case.json")))
    assert command.startswith("::error file=sub/mine.py,line=7,")
