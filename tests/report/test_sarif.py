"""tcverify.sarif: what editors and code scanning are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcverify.application import PassFacts
from tcverify.campaign import CampaignFinished, CampaignStarted, Crashed, Event, FindingFound, RunFinished, RunStarted
from tcverify.campaign.events import Statistics
from tcverify.cases.counterexample import Counterexample, EditingLine
from tcverify.cases.fingerprint import fingerprint_of
from tcverify.program import KINDS, Finding
from tcverify.report import annotation
from tcverify.report.annotation import annotate
from tcverify.report.sarif import SARIF_NAME, SarifReport
from tests.cases.test_counterexample import some_case
from tests.report.test_report import nasty_case

FACTS = PassFacts("Pass", "mine.py:Pass")
STARTED = CampaignStarted(FACTS, "2 ranks", "gloo", 20, None, 1, True)
MADE = EditingLine("rms_norm", "creates", "mine.py", 7, "rewrite")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import torch\n\n\nclass Pass:\n    pass\n\n\nother: object = Pass()\n")
    return tmp_path


def finished(*cases: Counterexample) -> CampaignFinished:
    verdict = "refuted" if cases else "passed"
    return CampaignFinished(FACTS, "2 ranks", Statistics(), cases, verdict, "", "examples", 1)


def written(*events: Event) -> dict[str, Any]:
    """The only run of the log; every version of the file on the way is valid."""
    report = SarifReport(Path("reports"), pytest.fail)
    for event in (RunStarted(("mine.py:Pass",), ("2 ranks",), 1), STARTED, *events):
        report(event)
        log = json.loads((Path("reports") / SARIF_NAME).read_bytes().decode("ascii"))
        require_valid(log)
    assert [path.name for path in Path("reports").iterdir()] == [SARIF_NAME]
    run: dict[str, Any] = log["runs"][0]
    return run


def require_valid(log: dict[str, Any]) -> None:
    """What the schema of SARIF 2.1.0 requires of the objects that are written, and the rules that it cannot express."""
    assert log.keys() == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert run.keys() == {"tool", "invocations", "originalUriBaseIds", "columnKind", "results"}
    driver = run["tool"]["driver"]
    assert driver["name"] == "tcverify"
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        assert rule["help"]["text"]
        assert rule["shortDescription"]["text"].endswith(".")
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    for base in run["originalUriBaseIds"].values():
        assert base["uri"].startswith("file:///")
        assert base["uri"].endswith("/")
    (invocation,) = run["invocations"]
    assert type(invocation["executionSuccessful"]) is bool
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("note", "error")
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["region"]["startLine"] >= 1
        for one in (location, *result["relatedLocations"]):
            artifact = one["physicalLocation"]["artifactLocation"]
            assert artifact["uri"].isascii()
            assert " " not in artifact["uri"]
            assert artifact.get("uriBaseId") in (None, *run["originalUriBaseIds"])
        assert all(type(value) is str for value in result.get("partialFingerprints", {}).values())


def place(result: dict[str, Any]) -> tuple[str, int]:
    physical = result["locations"][0]["physicalLocation"]
    return physical["artifactLocation"]["uri"], physical["region"]["startLine"]


def test_a_finding_is_a_result_at_the_line_that_made_it() -> None:
    case = some_case(made_by=(MADE,), facts=FACTS)
    run = written(FindingFound(case), finished(case), RunFinished(1))
    (result,) = run["results"]
    assert (result["ruleId"], result["level"], place(result)) == ("wrong-value", "error", ("mine.py", 7))
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
    title, *_, replay = result["message"]["text"].splitlines()
    assert (title, replay) == (
        "output 0 is wrong",
        f"Replay: tcverify replay {case.id}",
    )
    assert result["partialFingerprints"] == {"tcverify/v1": f"mine.py:Pass: {fingerprint_of(case)}"}
    (beside,) = result["relatedLocations"]
    assert beside["physicalLocation"]["artifactLocation"]["uri"] == f"reports/{case.id}/counterexample.json"
    rule = run["tool"]["driver"]["rules"][result["ruleIndex"]]
    assert rule["shortDescription"]["text"].lower() == f"{KINDS['wrong-value'].lower()}."
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]


def test_a_sound_run_has_no_results() -> None:
    run = written(finished(), RunFinished(0))
    assert run["results"] == []
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 0}]


def test_hygiene_is_a_note() -> None:
    finding = Finding("stale-metadata", "metadata", "wrong shape", severity="hygiene")
    (result,) = written(FindingFound(some_case(finding=finding)))["results"]
    assert (result["ruleId"], result["level"]) == ("stale-metadata", "note")


def test_a_kind_of_the_users_has_a_rule() -> None:
    run = written(*(FindingFound(some_case(finding=Finding(kind, "mine", "no"))) for kind in ("own", "race", "own")))
    assert [result["ruleIndex"] for result in run["results"]] == [0, 1, 0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["own", "race"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        pytest.param((), [], id="killed"),
        pytest.param((RunFinished(2, "the disk\nis full"),), ["the disk\\nis full"], id="error"),
        pytest.param((Crashed(Path("c.json")),), ["tcverify failed on a program, which is kept as c.json"], id="crashed"),
    ],
)  # fmt: skip
def test_a_run_that_did_not_end_keeps_what_it_found_and_says_so(end: tuple[Event, ...], said: list[str]) -> None:
    run = written(FindingFound(some_case()), *end)
    assert len(run["results"]) == 1
    (invocation,) = run["invocations"]
    assert not invocation["executionSuccessful"]
    assert [one["message"]["text"] for one in invocation.get("toolExecutionNotifications", [])] == said


def test_whatever_a_pass_says_is_json_and_no_link() -> None:
    case = nasty_case()
    link = Finding("race", "races", "a [link](1) and x[0]")
    run = written(FindingFound(case), FindingFound(some_case(finding=link, facts=case.facts)))
    first, second = run["results"]
    assert "[red]x[/red] \\x1b[31mred" in first["message"]["text"]
    assert second["message"]["text"].startswith("a \\[link](1) and x[0]\n")


def test_a_file_that_cannot_be_written_is_told_once(here: Path) -> None:
    (here / SARIF_NAME).mkdir()
    told: list[str] = []
    report = SarifReport(here, told.append)
    for event in (STARTED, FindingFound(some_case()), finished()):
        report(event)
    (line,) = told
    assert line.startswith(f"{here / SARIF_NAME} was not written: UsageError: ")
    (here / SARIF_NAME).rmdir()
    report(RunFinished(1))
    assert len(json.loads((here / SARIF_NAME).read_text())["runs"][0]["results"]) == 1


# ------------------------------------------------------------------------------------------------------------ locations

RAISED = Finding(
    "pass-raised",
    "application",
    "the pass raised",
    'File "{}", line 5, in rewrite\n  File "/x/lib/python3/y.py", line 9, in z',
)


@pytest.mark.parametrize(
    ("target", "stage", "place"),
    [
        pytest.param("mine.py:Pass", None, ("mine.py", 4), id="class"),
        pytest.param("mine.py:other", None, ("mine.py", 8), id="assigned"),
        pytest.param("mine:Pass.part", None, ("mine.py", 4), id="module"),
        pytest.param("mine.py:absent", None, ("mine.py", 1), id="made in another way"),
        pytest.param("package.inner.own:Pass+mine.py:Pass", "Pass", ("package/inner/own.py", 2), id="first stage"),
        pytest.param("mine.py:other+package.inner.own:Pass", "Pass", ("package/inner/own.py", 2), id="stage to blame"),
        pytest.param("no.such:Pass", None, ("case.json", 1), id="no file"),
        pytest.param("", None, ("case.json", 1), id="no reference"),
    ],
)  # fmt: skip
def test_the_pass_is_shown_where_no_line_is_known(
    here: Path, target: str, stage: str | None, place: tuple[str, int]
) -> None:
    (here / "package" / "inner").mkdir(parents=True)
    (here / "package" / "__init__.py").write_text("raise RuntimeError('this must not be imported')\n")
    (here / "package" / "inner" / "own.py").write_text("\nasync def Pass(): pass\n")
    finding = replace(some_case().finding, data={"stage": stage} if stage else {})
    shown = annotate(some_case(facts=PassFacts("Pass", target), finding=finding), Path("case.json"))
    assert (shown.file, shown.line) == place


def test_a_pass_that_raises_is_shown_where_it_did(here: Path) -> None:
    finding = replace(RAISED, detail=RAISED.detail.format(here / "mine.py"))
    shown = annotate(some_case(facts=FACTS, finding=finding), Path("case.json"))
    assert (shown.file, shown.line) == ("mine.py", 5)


def test_what_cannot_be_explained_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotation, "make_block", lambda *_: 1 / 0)
    shown = annotate(some_case(made_by=(MADE,)), Path("case.json"))
    assert (shown.file, shown.line, shown.message) == ("mine.py", 7, ("output 0 is wrong",))
