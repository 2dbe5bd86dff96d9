"""Whole outputs, pinned at 80 columns without colour."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tcverify.pytorch import PREFIX, SUBJECTS
from tests.cli.conftest import Outcome, normalise, only_case, run_apart, run_here, says

Snapshot = Callable[[str, str], None]

MUTANT = "tests.mutants.sequence_parallel:FirstChunkForAll"


@pytest.fixture(scope="module")
def refuted(place: Path) -> Outcome:
    """A mutant, refuted on one program in lockstep and on gloo."""
    return run_here(
        "run",
        MUTANT,
        "--no-coverage",
        "--strategy",
        "one",
        "--world-size",
        "2",
        "--seed",
        "1",
        "--report-dir",
        "refuted",
    )


@pytest.fixture(scope="module")
def case(place: Path, refuted: Outcome) -> str:
    return only_case(place / "refuted")


def _altered(place: Path, case: str, name: str, **facts: str) -> str:
    """Write a counterexample with other facts about its pass; return its path."""
    data = json.loads((place / "refuted" / case / "counterexample.json").read_text())
    data["pass"].update(facts)
    path = Path(name)
    path.write_text(json.dumps(data))
    return str(path)


def test_run_passed(place: Path, snapshot: Snapshot) -> None:
    passed = run_here(
        "run", "sequence_parallel", "identity", "--no-coverage", "--strategy", "one", "--world-size", "2", "--seed", "1"
    )
    assert passed.code == 0
    snapshot("run_passed", normalise(passed.out))


def test_run_refuted(refuted: Outcome, snapshot: Snapshot) -> None:
    assert refuted.code == 1
    assert refuted.err == ""
    snapshot("run_refuted", normalise(refuted.out))


def test_run_nothing_tested(place: Path, snapshot: Snapshot) -> None:
    outcome = run_here(
        "run", "mine.py:does_nothing", "--strategy", "one", "--world-size", "2", "--seed", "1", "--confirm", "none"
    )
    assert outcome.code == 1
    snapshot("run_nothing_tested", normalise(outcome.out))


def test_run_raising_pass(place: Path, snapshot: Snapshot) -> None:
    outcome = run_here(
        "run", "mine.py:raises", "--strategy", "one", "--world-size", "2", "--seed", "1", "--confirm", "none",
        "--report-dir", "raising",
    )  # fmt: skip
    assert outcome.code == 1
    snapshot("run_raising_pass", normalise(outcome.out, place))


def test_run_refuted_pipeline(place: Path, snapshot: Snapshot) -> None:
    pipeline = f"identity+{MUTANT}+identity"
    outcome = run_here(
        "run",
        pipeline,
        "--no-coverage",
        "--strategy",
        "one",
        "--world-size",
        "2",
        "--seed",
        "1",
        "--confirm",
        "none",
        "--report-dir",
        "piped",
    )
    assert outcome.code == 1
    snapshot("run_refuted_pipeline", normalise(outcome.out))
    again = run_here("replay", only_case(place / "piped"), "--confirm", "none", "--report-dir", "piped")
    assert again.code == 1
    assert "(stage FirstChunkForAll)" in " ".join(again.out.split())


def test_replay_failed(place: Path, case: str, snapshot: Snapshot) -> None:
    outcome = run_here("replay", case, "--report-dir", "refuted")
    assert outcome.code == 1
    snapshot("replay_failed", normalise(outcome.out))


def test_replay_fixed(place: Path, case: str, snapshot: Snapshot) -> None:
    path = _altered(place, case, "fixed.json", target="tcverify.passes.identity:Identity", source="another")
    outcome = run_here("replay", path)
    assert outcome.code == 0
    snapshot("replay_fixed", normalise(outcome.out))


def test_replay_error(place: Path, case: str, snapshot: Snapshot) -> None:
    path = _altered(place, case, "error.json", target="no_such_module:Pass")
    outcome = run_here("replay", path)
    assert outcome.code == 2
    snapshot("replay_error", normalise(outcome.out))


def test_replay_of_several_cases_counts_them(place: Path, case: str, snapshot: Snapshot) -> None:
    path = _altered(place, case, "again.json", target="no_such_module:Pass")
    outcome = run_here("replay", case, path, "--report-dir", "refuted", "--confirm", "none")
    assert outcome.code == 1
    snapshot("replay_several", normalise(outcome.out))


def test_show_text(place: Path, case: str, snapshot: Snapshot) -> None:
    outcome = run_here("show", case[:5], "--report-dir", "refuted")
    assert outcome.code == 0
    snapshot("show_text", normalise(outcome.out))


def test_show_markdown(place: Path, case: str, snapshot: Snapshot) -> None:
    outcome = run_here("show", case, "--report-dir", "refuted", "--format", "md")
    assert outcome.code == 0
    snapshot("show_md", normalise(outcome.out))


def test_show_json_is_the_file(place: Path, case: str) -> None:
    outcome = run_here("show", case, "--report-dir", "refuted", "--format", "json")
    assert json.loads(outcome.out) == json.loads((place / "refuted" / case / "counterexample.json").read_text())


def test_show_is_80_columns_wide_where_there_is_no_terminal(place: Path, case: str) -> None:
    alone = run_here("show", case, "--report-dir", "refuted", columns=None).out
    assert alone == run_here("show", case, "--report-dir", "refuted", columns=80).out
    assert max(map(len, alone.splitlines())) == 80
    assert max(map(len, run_here("show", case, "--report-dir", "refuted", columns=120).out.splitlines())) > 80


@pytest.mark.parametrize("form", ["text", "md", "json"])
def test_show_several(place: Path, case: str, form: str) -> None:
    data = json.loads((place / "refuted" / case / "counterexample.json").read_text())
    data["pass"]["name"] = "Other"
    path = "another.json"
    Path(path).write_text(json.dumps(data))
    outcome = run_here("show", case, path, "--report-dir", "refuted", "--format", form)
    assert outcome.code == 0
    first, second = outcome.out.index("FirstChunkForAll"), outcome.out.index("Other")
    assert first < second
    alone = run_here("show", path, "--report-dir", "refuted", "--format", form).out
    assert outcome.out.endswith(alone)


def test_a_trace_shows_one_case(place: Path, case: str) -> None:
    outcome = run_here("show", case, case, "--report-dir", "refuted", "--format", "trace")
    says(outcome, 2, "a trace shows one counterexample, not 2", "give one file or ID")


def test_passes(place: Path, snapshot: Snapshot) -> None:
    outcome = run_here("passes")
    assert outcome.code == 0
    ours, title, theirs = outcome.out.partition("Passes of PyTorch")
    snapshot("passes", ours)
    for one in SUBJECTS.values():  # which of them there are depends on the torch that is installed
        line = one.what if one.here else f"not in this torch; {one.versions}"
        assert f" {PREFIX}{one.name} {line} " in " ".join(theirs.split())
    assert title
    assert "Your own passes: module:attribute" in theirs


def test_doctor(place: Path, snapshot: Snapshot) -> None:
    outcome = run_here("doctor")
    assert outcome.code == 0
    snapshot("doctor", normalise(outcome.out))


@pytest.mark.parametrize("verb", ["", "run", "replay", "show", "passes", "doctor"])
def test_help(verb: str, snapshot: Snapshot) -> None:
    outcome = run_here(*verb.split(), "--help")
    assert outcome.code == 0
    snapshot(f"help_{verb or 'tcverify'}", outcome.out)


# ------------------------------------------------------------------------------------------- in a process of its own


def test_a_whole_run_passes_on_gloo(tmp_path: Path, snapshot: Snapshot) -> None:
    command = [
        "-m",
        "tcverify",
        "run",
        "identity",
        "--no-coverage",
        "--max-examples",
        "4",
        "--world-size",
        "2",
        "--seed",
        "1",
    ]
    outcome = run_apart(*command, cwd=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    snapshot("run_identity", normalise(outcome.out))


def test_a_whole_run_is_refuted_replayed_and_reproduced(tmp_path: Path) -> None:
    run = ["-m", "tcverify", "run", MUTANT, "--max-examples", "60", "--world-size", "2", "--seed", "1", "-x"]
    first = run_apart(*run, cwd=tmp_path)
    assert (first.code, first.err) == (1, "")
    found = only_case(tmp_path / "reports")
    block = first.out[first.out.index("──") : first.out.index("found by")]
    assert "wrong-value" in block
    again = run_apart("-m", "tcverify", "replay", found, cwd=tmp_path)
    assert (again.code, again.err) == (1, "")
    assert again.out.startswith(f"x FAILED {found}")
    script = run_apart(f"reports/{found}/repro.py", cwd=tmp_path)
    assert (script.code, script.err) == (1, "")
    title = block.splitlines()[1:3]
    for out in (again.out, script.out):
        assert out[out.index("──") :].splitlines()[1:3] == title
