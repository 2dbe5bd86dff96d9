"""Reports for machines and baselines of known findings, from the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import strategies as st

from tcverify.campaign import Campaign, program_verifier
from tcverify.errors import InternalError
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.registry.strategies import STRATEGIES
from tests.cli.conftest import Outcome, only_case, pin, run_here, says
from tests.support.json_schema import problems

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "events.schema.json").read_text())

PASSES = """
import torch

aten = torch.ops.aten


def swaps(gm):
    for node in gm.graph.nodes:
        if node.target is aten.neg.default:
            node.target = aten.exp.default
        if node.target is aten.sigmoid.default:
            node.target = aten.cos.default
        if node.target is aten.tanh.default:
            raise ValueError("no idea")
        if node.target is aten.abs.default:  # a change that preserves the meaning
            with gm.graph.inserting_after(node):
                twice = gm.graph.call_function(aten.abs.default, (node,))
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)
            twice.meta["val"] = torch.empty_like(node.meta["val"])
            break
    gm.recompile()
"""


def program(*ops: str) -> Program:
    def build(b: GraphBuilder) -> object:
        value = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        for op in ops:
            value = b.call(f"aten::{op}", value)
        return value

    x = InputSpec("x", (2, 2), placements=(("tp", PARTIAL),))
    return spmd_program(Mesh.grid({"tp": 2}), [x], build, seed=1)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a pass that fails in three ways, and a strategy that draws one program for each and a sound one."""
    directory = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        pin(patch, directory)
        few = st.sampled_from([program(op) for op in ("abs", "neg", "sigmoid", "tanh")])
        patch.setitem(STRATEGIES, "few", lambda mesh, world_size: few)
        patch.setitem(STRATEGIES, "sound", lambda mesh, world_size: st.just(program("abs")))
        (directory / "defects.py").write_text(PASSES)
        yield directory


def go(*arguments: str, strategy: str = "few", seed: int = 1) -> Outcome:
    """Run it without a past."""
    shutil.rmtree(".tcverify", ignore_errors=True)
    common = ["--confirm", "none", "--world-size", "2", "--strategy", strategy, "--seed", str(seed)]
    return run_here("run", "defects.py:swaps", *common, *arguments)


def events(directory: str) -> list[dict[str, Any]]:
    """The events of a file, all as documented."""
    lines = [json.loads(line) for line in Path(directory, "events.ndjson").read_text().splitlines()]
    assert [problem for line in lines for problem in problems(line, SCHEMA)] == []
    return lines


def junit(directory: str) -> ElementTree.Element:
    (suite,) = ElementTree.parse(Path(directory, "junit.xml")).getroot()
    return suite


@pytest.fixture(scope="module")
def known(here: Path) -> str:
    """A baseline of all that is found."""
    outcome = go("--write-baseline", "known.json", "--report", "junit,ndjson", "--report-dir", "first")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("baseline known.json: 3 known, 3 of them new; fill in their reasons\n")
    return "known.json"


def entries(path: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(Path(path).read_text())["known"]
    return found


def altered(path: str, name: str, known: list[dict[str, str]]) -> str:
    Path(name).write_text(json.dumps({**json.loads(Path(path).read_text()), "known": known}, indent=1))
    return name


# ------------------------------------------------------------------------------------------------------------- reports


def test_html_is_what_is_written_unless_asked(here: Path) -> None:
    assert go("-x", "--report-dir", "pages").code == 1
    assert {path.name for path in Path("pages").iterdir()} == {only_case(here / "pages")}
    assert {path.name for path in Path("pages", only_case(here / "pages")).iterdir()} == {
        "counterexample.json", "report.html", "repro.py",
    }  # fmt: skip


def test_other_reports_stand_beside_the_cases(here: Path, known: str) -> None:
    cases = [path for path in Path("first").iterdir() if path.is_dir()]
    assert len(cases) == 3
    assert {file.name for case in cases for file in case.iterdir()} == {"counterexample.json", "repro.py"}
    told = events("first")
    assert [line["event"] for line in told if line["event"] not in ("progress", "finding")] == [
        "run-started", "campaign-started", "campaign-finished", "run-finished",
    ]  # fmt: skip
    findings = [line for line in told if line["event"] == "finding"]
    assert {line["id"] for line in findings} == {case.name for case in cases}
    assert {line["fingerprint"] for line in findings} == {entry["fingerprint"] for entry in entries(known)}
    assert all(Path(line["path"]).is_file() for line in findings)
    assert told[-1]["exit_code"] == 0
    assert (junit("first").get("tests"), junit("first").get("skipped")) == ("3", "3")


def test_findings_are_shown_at_lines_of_the_pass(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(here / "summary.md"))
    outcome = go("--report", "sarif,github", "--report-dir", "shown")
    assert outcome.code == 1
    results = json.loads(Path("shown", "tcverify.sarif").read_text())["runs"][0]["results"]
    shown = {(one["ruleId"], one["locations"][0]["physicalLocation"]["region"]["startLine"]) for one in results}
    lines = PASSES.splitlines()
    assert shown == {
        ("pass-raised", lines.index('            raise ValueError("no idea")') + 1),
        ("wrong-value", lines.index("            node.target = aten.exp.default") + 1),
        ("wrong-value", lines.index("            node.target = aten.cos.default") + 1),
    }
    for kind, number in shown:
        assert f"\n::error file=defects.py,line={number},title={kind} in swaps::" in outcome.out
    assert (here / "summary.md").read_text().count("<details><summary>") == len(results)


def test_an_interrupted_run_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Campaign) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Campaign, "_rounds", interrupted)
    assert go("--report", "junit,ndjson", "--report-dir", "interrupted").code == 130
    assert junit("interrupted").get("errors") == "1"
    finished, end = events("interrupted")[-2:]
    assert (finished["stop"], end["event"], end["exit_code"]) == ("interrupted", "run-finished", 130)


def test_a_run_that_crashes_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> Iterator[None]:
        raise InternalError("oops")
        yield

    monkeypatch.setattr(program_verifier, "verify_in_steps", breaks)
    says(go("--report", "junit,ndjson", "--report-dir", "crashed", strategy="sound"), 3, "internal error: oops")
    crashed, end = events("crashed")[-2:]
    assert Path(crashed["path"]).is_file()
    assert (end["exit_code"], end["error"]) == (3, "internal error: oops")
    (error,) = junit("crashed").iter("error")
    assert "internal error: oops" in error.get("message", "")
    assert crashed["path"] in error.get("message", "")


def test_a_bad_disk_ends_no_run_and_loses_no_finding(here: Path) -> None:
    place = Path("bad")
    (place / "junit.xml").mkdir(parents=True)
    (place / "events.ndjson").symlink_to("/dev/full")
    (place / "tcverify.sarif").mkdir()
    outcome = go("-x", "--report", "html,junit,ndjson,sarif", "--report-dir", "bad")
    assert outcome.code == 1
    flat = " ".join(outcome.out.split())
    assert flat.count("bad/events.ndjson cannot be written: No space left on device; the run continues") == 1
    assert flat.count("bad/junit.xml was not written") == 1
    assert flat.count("bad/tcverify.sarif was not written") == 1
    assert list(place.glob("*/counterexample.json"))


# ----------------------------------------------------------------------------------------------------------- baselines


def test_known_findings_do_not_fail_a_run(here: Path, known: str) -> None:
    baseline = altered(known, "reasoned.json", [{**entry, "reason": "until summer"} for entry in entries(known)])
    outcome = go("--baseline", baseline, "--report", "junit,ndjson", "--report-dir", "again", "-x", seed=2)
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"  passed: \d+ programs \(\d+ passed, 0 refuted, 0 inconclusive, \d+ known\)\n", outcome.out)
    assert len(re.findall(r"known, wrong-value: \d+ programs? \(until summer\)\n", outcome.out)) == 2
    assert len(re.findall(r"known, pass-raised: \d+ programs? \(until summer\)\n", outcome.out)) == 1
    assert "baseline reasoned.json: 3 of 3 known findings found again\n" in outcome.out
    finished, end = events("again")[-2:]
    assert (finished["verdict"], len(finished["known"])) == ("passed", 3)
    assert finished["statistics"]["known"] == sum(one["programs"] for one in finished["known"])
    assert end["exit_code"] == 0
    assert not list(Path("again").glob("*/counterexample.json"))


@pytest.mark.parametrize("number", range(3))
def test_what_is_not_known_fails_a_run(here: Path, known: str, number: int) -> None:
    kept = entries(known)
    missing = kept.pop(number)
    baseline = altered(known, f"without{number}.json", kept)
    outcome = go("--baseline", baseline, "-x", "--report-dir", f"without{number}", seed=2)
    assert outcome.code == 1
    assert only_case(here / f"without{number}") == missing["case"]


def test_what_is_no_longer_seen_is_told_and_fails_nothing(here: Path, known: str) -> None:
    outcome = go("--baseline", known, strategy="sound")
    assert outcome.code == 0
    assert "baseline known.json: 0 of 3 known findings found again\n" in outcome.out
    assert outcome.out.count("not found again") == 3
    assert "not found again, wrong-value of defects.py:swaps: exp is unrelated; remove it" in outcome.out


def test_writing_a_baseline_again_keeps_what_it_holds(here: Path, known: str) -> None:
    stays = {"pass": "other:Pass", "kind": "race", "fingerprint": "x", "title": "", "case": "", "reason": "stays"}
    reasoned = {**entries(known)[0], "reason": "so it is"}
    path = altered(known, "more.json", [stays, reasoned])
    assert go("--write-baseline", path, "--report-dir", "more", seed=3).code == 0
    first, second, *new = entries(path)
    assert (first, second) == (stays, reasoned)
    assert {entry["fingerprint"] for entry in [second, *new]} == {entry["fingerprint"] for entry in entries(known)}


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        pytest.param(["--baseline", "none.json"], ["no baseline none.json", "--write-baseline"], id="missing"),
        pytest.param(["--baseline", "broken.json"], ["broken.json, line 3: not JSON"], id="broken"),
        pytest.param(["--write-baseline", "broken.json"], ["broken.json, line 3: not JSON"], id="not-overwritten"),
        pytest.param(["--write-baseline", "broken.json/x"], ["cannot be written", "another path"], id="unwritable"),
        pytest.param(["--report", "html,juint"], ["no report 'juint'", "did you mean 'junit'?"], id="report"),
        pytest.param(["--report", ""], ["no report given"], id="no-report"),
    ],
)
def test_run_refuses(here: Path, arguments: list[str], texts: list[str]) -> None:
    Path("broken.json").write_text('{\n "format": "tcverify-baseline",\n "known: []}\n')
    says(go(*arguments), 2, *texts)
