"""junit.xml: what continuous integration is told, in a form that all of it reads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from tcverify.application import PassFacts
from tcverify.campaign import (
    CampaignFinished,
    CampaignStarted,
    Crashed,
    Event,
    FindingFound,
    Progress,
    RunFinished,
    RunStarted,
    Statistics,
)
from tcverify.cases.baseline import KnownFinding
from tcverify.cases.counterexample import Counterexample
from tcverify.program import Finding
from tcverify.report.junit import JUNIT_NAME, JunitReport
from tests.cases.test_counterexample import some_case
from tests.report.test_report import nasty_case

FACTS = PassFacts("Pass", "mine:Pass")
STARTED = CampaignStarted(FACTS, "2 ranks", "gloo", 20, None, 1, True)
KNOWN = KnownFinding("mine:Pass", "race", "'op' is read early", reason="accepted")


def finished(verdict: str = "passed", *cases: Counterexample, **changes: Any) -> CampaignFinished:
    counts = Statistics(programs=20, passed=18, inconclusive=2, elapsed=1.5)
    counts.doubts["overflow"], counts.doubt_details["overflow"] = 2, "output 0 overflows"
    return replace(CampaignFinished(FACTS, "2 ranks", counts, cases, verdict, "", "examples", 1), **changes)


def written(tmp_path: Path, *events: Event, **options: Any) -> Element:
    """What the report of a run looks like; every version of the file on the way is valid."""
    report = JunitReport(tmp_path, pytest.fail, **options)
    for event in (RunStarted(("mine:Pass",), ("2 ranks",), 1), *events):
        report(event)
        root = ElementTree.parse(tmp_path / JUNIT_NAME).getroot()
        require_valid(root)
    assert [path.name for path in tmp_path.iterdir()] == [JUNIT_NAME]
    return root


#: What both schemas allow, in their order: Ant's "JUnit.xsd" and the one of Jenkins' plugin.
SUITE = {"name", "timestamp", "hostname", "tests", "failures", "errors", "skipped", "time", "id", "package"}
CHILDREN = re.compile("properties (testcase )*system-out system-err ")


def require_valid(root: Element) -> None:
    assert (root.tag, root.attrib) == ("testsuites", {})
    for number, suite in enumerate(root):
        assert suite.tag == "testsuite"
        assert suite.attrib.keys() == SUITE
        assert CHILDREN.fullmatch("".join(f"{child.tag} " for child in suite))
        assert suite.attrib["id"] == str(number)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.attrib["timestamp"])
        cases = suite.findall("testcase")
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[attribute]) == len(suite.findall(f"testcase/{tag}"))
        assert (
            int(suite.attrib["tests"]) == len(cases) == len({(c.attrib["classname"], c.attrib["name"]) for c in cases})
        )
        for one in suite.findall("properties/property"):
            assert one.attrib.keys() == {"name", "value"}
            assert one.attrib["value"]
        for case in cases:
            assert case.attrib.keys() == {"classname", "name", "time"}
            assert len(case) <= 1
            for outcome in case:
                assert outcome.attrib.keys() == ({"message"} if outcome.tag == "skipped" else {"type", "message"})
        for one in [suite, *cases]:
            assert re.fullmatch(r"\d+\.\d{3}", one.attrib["time"])


def outcomes(root: Element) -> list[tuple[str, str]]:
    """Per case what became of it, and of which type."""
    return [
        (child[0].tag, child[0].get("type", "")) if len(child) else ("passed", "") for child in root.iter("testcase")
    ]


def test_what_passed_passes_and_says_what_was_inconclusive(tmp_path: Path) -> None:
    root = written(tmp_path, STARTED, Progress(Statistics(), "verifying"), finished())
    assert outcomes(root) == [("passed", "")]
    (suite,) = root
    assert (suite.get("name"), suite.get("time")) == ("Pass on 2 ranks", "1.500")
    assert "inconclusive, overflow: 2 programs (output 0 overflows)" in suite.findtext("system-out", "")
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert (properties["tcverify.inconclusive"], properties["tcverify.seed"]) == ("2", "1")


def test_what_is_asked_to_fail_on_inconclusive_fails(tmp_path: Path) -> None:
    root = written(tmp_path, STARTED, finished(), failing=["inconclusive"])
    assert outcomes(root) == [("failure", "inconclusive")]


def test_every_finding_fails_a_case(tmp_path: Path) -> None:
    one = some_case()
    two = replace(one, id="0123abcd", finding=Finding("deadlock", "collectives", "rank 0 waits"))
    root = written(tmp_path, STARTED, FindingFound(one), FindingFound(two), finished("refuted", one, two))
    assert outcomes(root) == [("failure", one.finding.kind), ("failure", "deadlock")]
    first, second = root.iter("testcase")
    assert (first.get("name"), second.get("name")) == ("preserves the meaning", "deadlock (case 0123abcd)")
    text = first.findtext("failure", "")
    assert f"tcverify replay {one.id}" in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize(
    ("end", "outcome", "message"),
    [
        pytest.param(finished("nothing tested", why="none passed"), ("failure", "nothing-tested"), "none passed", id="nothing"),
        pytest.param(finished(stop="interrupted"), ("error", "interrupted"), "interrupted after 20 programs", id="interrupted"),
        pytest.param(finished("refuted"), ("failure", "refuted"), "refuted", id="refuted"),
        pytest.param(RunFinished(2, "the disk is full"), ("error", "unfinished"), "the disk is full", id="error"),
        pytest.param(Crashed(Path("crashed.json")), ("error", "unfinished"), "saved as crashed.json", id="crashed"),
        pytest.param(Progress(Statistics(), "verifying"), ("error", "unfinished"), "has not ended", id="killed"),
    ],
)  # fmt: skip
def test_what_did_not_pass_is_not_green(tmp_path: Path, end: Event, outcome: tuple[str, str], message: str) -> None:
    root = written(tmp_path, STARTED, end)
    assert outcomes(root) == [outcome]
    assert message in next(root.iter(outcome[0])).get("message", "")


def test_known_findings_are_skipped(tmp_path: Path) -> None:
    root = written(tmp_path, STARTED, finished(known=((KNOWN, 3),)))
    assert outcomes(root) == [("passed", ""), ("skipped", "")]
    assert next(root.iter("skipped")).get("message") == "known, race: 3 programs (accepted)"


def test_what_goes_to_the_baseline_does_not_fail(tmp_path: Path) -> None:
    case = some_case()
    root = written(tmp_path, STARTED, FindingFound(case), finished("refuted", case), accepting=True)
    assert outcomes(root) == [("skipped", "")]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        pytest.param((RunFinished(2, "p.py has no 'f'"),), "p.py has no 'f'", id="no campaign began"),
        pytest.param((STARTED, finished(), RunFinished(130)), "exit code 130", id="interrupted between campaigns"),
        pytest.param((STARTED, finished(), RunFinished(2, "the disk is full")), "the disk is full", id="ended badly"),
        pytest.param((STARTED, FindingFound(some_case()), finished("refuted"), RunFinished(1)), "exit code 1", id="none passed"),
    ],
)  # fmt: skip
def test_a_run_that_fails_is_not_green_though_its_campaigns_are(
    tmp_path: Path, events: tuple[Event, ...], why: str
) -> None:
    root = written(tmp_path, *events, accepting=True)
    assert outcomes(root)[-1] == ("error", "run-failed")
    assert why in next(root.iter("error")).get("message", "")
    assert not list(root.iter("failure"))


def test_a_suite_per_campaign(tmp_path: Path) -> None:
    root = written(tmp_path, STARTED, finished(), replace(STARTED, mesh="4 ranks"), RunFinished(130, "interrupted"))
    assert [suite.get("name") for suite in root] == ["Pass on 2 ranks", "Pass on 4 ranks"]
    assert outcomes(root) == [("passed", ""), ("error", "unfinished")]


def test_whatever_a_pass_says_is_xml(tmp_path: Path) -> None:
    case = nasty_case()
    started = replace(STARTED, facts=case.facts, mesh="\x00\x1b]]>&\uffff\ud800")
    root = written(tmp_path, started, FindingFound(case), finished("refuted", case, facts=case.facts))
    assert "[red]x[/red] \\x1b[31mred" in next(root.iter("failure")).get("message", "")
    assert (tmp_path / JUNIT_NAME).read_bytes().isascii()


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / JUNIT_NAME).mkdir()
    told: list[str] = []
    report = JunitReport(tmp_path, told.append)
    for event in (STARTED, FindingFound(some_case()), finished()):
        report(event)
    (line,) = told
    assert line.startswith(f"{tmp_path / JUNIT_NAME} was not written: UsageError: ")
    (tmp_path / JUNIT_NAME).rmdir()
    report(RunFinished(1))
    assert (tmp_path / JUNIT_NAME).is_file()
