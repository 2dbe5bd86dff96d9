"""events.ndjson: lines as they are documented, whatever happens."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import (
    Campaign,
    CampaignPlan,
    CampaignStarted,
    Crashed,
    Event,
    FindingFound,
    Progress,
    RunFinished,
    RunStarted,
    Statistics,
)
from tcverify.cases.baseline import Baseline, KnownFinding
from tcverify.cases.counterexample import FILE_NAME
from tcverify.errors import Unsupported
from tcverify.report import ndjson
from tcverify.report.ndjson import EVENTS_NAME, EventLog, statistics
from tests.cases.test_counterexample import some_case
from tests.report.test_report import nasty_case
from tests.support.json_schema import parts, problems
from tests.support.programs import reduce_then_norm

ROOT = Path(__file__).parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "events.schema.json").read_text())
MANUAL = (ROOT / "docs" / "events.md").read_text()


def raises(gm: fx.GraphModule) -> None:
    raise ValueError("no idea")


def drops_reductions(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if "all_reduce" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def declines(gm: fx.GraphModule) -> None:
    raise Unsupported("not today")


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """What three campaigns tell, the second with known findings."""
    place = tmp_path_factory.mktemp("campaigns")
    told: list[Event] = [RunStarted(("raises", "drops", "declines"), ("2 ranks",), 1)]
    known = Baseline(
        (KnownFinding("raises", "pass-raised", "the pass raised ValueError: no idea, in raises", reason="so it is"),)
    )
    for pass_, baseline in ((raises, None), (raises, known), (drops_reductions, None), (declines, None)):
        programs = st.just(reduce_then_norm())
        plan = CampaignPlan(
            programs, "2 ranks", place / "reports", place / f"{len(told)}", max_examples=5, seed=1, baseline=baseline
        )
        keep = lambda event: told.append(deepcopy(event) if isinstance(event, Progress) else event)  # noqa: E731
        Campaign(InProcess(prepare_pass(pass_, "", {})), plan, None, [keep]).run()
    started = next(event for event in told if isinstance(event, CampaignStarted))
    return [*told, started, Crashed(place / "crashed-01234567.json"), RunFinished(3, "InternalError: oops")]


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / EVENTS_NAME).read_text().splitlines()]


def write(directory: Path, events: list[Event]) -> list[dict[str, Any]]:
    ticks = iter(range(10**6))
    log = EventLog(directory, pytest.fail, clock=lambda: float(next(ticks)))
    for event in events:
        log(event)
    log.note("a page is not written")
    return read(directory)


def test_every_event_is_as_the_schema_says(events: list[Event], tmp_path: Path) -> None:
    lines = write(tmp_path, events)
    assert {line["event"] for line in lines} == SCHEMA["$defs"].keys() - {
        "value", "real", "counts", "brief-statistics", "statistics",
    }  # fmt: skip
    assert [problem for line in lines for problem in problems(line, SCHEMA)] == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(lambda line: line.update(extra=1), "'extra' is not documented", id="field"),
        pytest.param(lambda line: line.pop("title"), "it lacks 'title'", id="missing"),
        pytest.param(lambda line: line.update(rank="0"), "$.rank: '0' is not of type", id="type"),
        pytest.param(lambda line: line.update(rank=True), "$.rank: True is not of type", id="bool"),
        pytest.param(lambda line: line["program"].update(size=1), "$.program: 'size' is not documented", id="nested"),
        pytest.param(lambda line: line["others"].append({}), "$.others[0]: it lacks 'kind'", id="list"),
        pytest.param(lambda line: line.update(id="x"), "does not look like", id="pattern"),
    ],
)
def test_the_schema_refuses_what_is_not_documented(events: list[Event], tmp_path: Path, change: Any, text: str) -> None:
    line = next(line for line in write(tmp_path, events) if line["event"] == "finding")
    change(line)
    assert any(text in problem for problem in problems(line, SCHEMA))


def _names(definition: str) -> set[str]:
    found: set[str] = set()
    for part in parts({}, SCHEMA["$defs"][definition], SCHEMA):
        found |= part.get("properties", {}).keys()
    return found


def test_the_manual_names_every_event_and_field() -> None:
    assert [field for name in SCHEMA["$defs"] for field in _names(name) if f"`{field}`" not in MANUAL] == []
    conditions = [part["if"]["properties"]["event"]["const"] for part in SCHEMA["allOf"]]
    assert [name for name in conditions if f"\n## `{name}`\n" not in MANUAL] == []


def test_every_count_is_told() -> None:
    assert statistics(Statistics()).keys() == {field.name for field in fields(Statistics)} == _names("statistics")


def test_a_finding_is_told_with_what_the_block_shows(events: list[Event], tmp_path: Path) -> None:
    lines = [line for line in write(tmp_path, events) if line["event"] == "finding"]
    cases = [event.counterexample for event in events if isinstance(event, FindingFound)]
    assert [line["id"] for line in lines] == [case.id for case in cases]
    raised, wrong = lines[0], next(line for line in lines if line["kind"] == "wrong-value")
    assert raised["title"] == cases[0].finding.title
    assert raised["path"] == str(tmp_path / raised["id"] / FILE_NAME)
    assert raised["fingerprint"] == "the pass raised ValueError: no idea, in raises"
    assert wrong["divergence"]["sentence"].startswith("output 0 returns 'x', which is equal to")
    assert any(line.startswith("- all_reduce") for line in wrong["graph"])
    assert wrong["values"][0]["label"] == "output 0"


def test_campaigns_are_told_with_their_ends(events: list[Event], tmp_path: Path) -> None:
    lines = write(tmp_path, events)
    assert lines[0]["schema"] == "tcverify-events"
    assert lines[0]["version"] == 1
    ends = [line for line in lines if line["event"] == "campaign-finished"]
    assert [end["campaign"] for end in ends] == [1, 2, 3, 4]
    assert [end["verdict"] for end in ends] == ["refuted", "nothing tested", "refuted", "nothing tested"]
    assert [(known["reason"], known["programs"]) for known in ends[1]["known"]] == [("so it is", 1)]
    reasons = [line for line in lines if line["event"] == "inconclusive"]
    assert [(line["campaign"], line["reason"], line["detail"]) for line in reasons] == [(4, "declined", "not today")]
    assert lines[-2]["exit_code"] == 3
    assert (lines[-1]["event"], lines[-1]["text"], lines[-1]["reason"]) == ("note", "a page is not written", None)


def test_progress_comes_once_a_second(tmp_path: Path) -> None:
    clock = [0.0]
    log = EventLog(tmp_path, pytest.fail, clock=lambda: clock[0])
    for i in range(34):
        clock[0] = i / 8
        log(Progress(Statistics(), "verifying"))
    assert [line["elapsed"] for line in read(tmp_path)] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("rewritten", [True, False])
def test_whatever_a_pass_says_is_one_line_of_json(tmp_path: Path, rewritten: bool) -> None:
    case = nasty_case() if rewritten else nasty_case(rewritten=None, listing="x")
    nasty = replace(case.finding, data={"stage": 3})
    EventLog(tmp_path, pytest.fail)(FindingFound(replace(case, finding=nasty)))
    (line,) = read(tmp_path)
    assert line["title"] == case.finding.title
    assert line["values"][0]["expected"] == "nan"
    assert "NaN" not in (tmp_path / EVENTS_NAME).read_text()


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_infinite_numbers_are_written_as_text(tmp_path: Path, number: float) -> None:
    case = nasty_case()
    values = (replace(case.values[0], expected=number), *case.values[1:])
    EventLog(tmp_path, pytest.fail)(FindingFound(replace(case, values=values)))
    (line,) = read(tmp_path)
    assert line["values"][0]["expected"] == repr(number)


def test_a_finding_that_cannot_be_explained_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(ndjson, "make_block", fails)
    told: list[str] = []
    EventLog(tmp_path, told.append)(FindingFound(some_case()))
    (line,) = read(tmp_path)
    assert (line["id"], line["divergence"]) == (some_case().id, None)
    assert told == [
        f"{tmp_path / EVENTS_NAME}: case {line['id']} is reported without its explanation: ZeroDivisionError: oops"
    ]


def test_runs_append_and_a_line_without_end_gets_one(tmp_path: Path) -> None:
    (tmp_path / EVENTS_NAME).write_text('{"event": "run-fini')
    for _ in range(2):
        EventLog(tmp_path, pytest.fail)(RunFinished(0))
    first, *rest = (tmp_path / EVENTS_NAME).read_text().splitlines()
    assert first == '{"event": "run-fini'
    one, two = map(json.loads, rest)
    assert one["run"] != two["run"]


@pytest.mark.parametrize("full", [True, False], ids=["full", "directory"])
def test_a_bad_disk_is_told_once(tmp_path: Path, full: bool) -> None:
    told: list[str] = []
    path = tmp_path / EVENTS_NAME
    if full:
        path.symlink_to("/dev/full")
    else:
        path.mkdir()
    log = EventLog(tmp_path, told.append)
    for _ in range(3):
        log(RunFinished(0))
    (line,) = told
    assert line.startswith(f"{path} cannot be written: ")
    assert ("No space left on device" in line) == full
    path.unlink() if full else path.rmdir()
    log(RunFinished(0))
    assert [line["event"] for line in read(tmp_path)] == ["run-finished"]
