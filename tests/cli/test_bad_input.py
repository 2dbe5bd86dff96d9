"""What a user gets wrong: one message that says what and how to mend it, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tcverify.cases import counterexample
from tcverify.program.codec import MAX_BYTES
from tests import warm
from tests.cli.conftest import FOREIGN, environment, finish, only_case, pin, run_here, says, start
from tests.faults.processes import alive, descendants

SYNTAX_ERROR = "def broken(:\n"


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with things that do not work."""
    directory = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        pin(patch, directory)
        Path("syntax.py").write_text(SYNTAX_ERROR)
        Path("exits.py").write_text("raise SystemExit(3)\n")
        Path("values.py").write_text("number = 3\ndef two_keywords(gm, *, a, b): ...\n")
        Path("file").write_text("")
        yield directory


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        pytest.param(["sequence_paralel"], ["no built-in pass", "did you mean 'sequence_parallel'?"], id="misspelt-builtin"),
        pytest.param(["zzz"], ["no built-in pass 'zzz'", "`tcverify passes` lists"], id="unknown"),
        pytest.param(["mine.py"], ["does not name a pass in the file", "mine.py:MyPass"], id="file-without-attribute"),
        pytest.param(["no_such:Pass"], ["no module 'no_such'", "current directory"], id="missing-module"),
        pytest.param(["no_such.py:Pass"], ["no file no_such.py"], id="missing-file"),
        pytest.param(["mine.py:raise"], ["mine.py has no 'raise'", "did you mean 'raises'?"], id="missing-attribute"),
        pytest.param(["values.py:zzz"], ["values.py has no 'zzz'", "it defines two_keywords"], id="no-such-attribute"),
        pytest.param(["syntax.py:broken"], ["importing 'syntax.py' fails: SyntaxError", "syntax.py:1: def"], id="syntax-error"),
        pytest.param(["exits.py:x"], ["ends the interpreter"], id="exits-at-import"),
        pytest.param(["values.py:number"], ["is a int, which cannot be called", "a pass takes a GraphModule"], id="not-callable"),
        pytest.param(["values.py:two_keywords"], ["is not that of a pass"], id="wrong-signature"),
        pytest.param(["identity", "--pass-option", "colour=red"], ["no option 'colour'", "its options are"], id="pass-option"),
        pytest.param(["identity", "--pass-option", "colour"], ["does not have the form name=value"], id="pass-option-form"),
        pytest.param(["identity+nope"], ["no built-in pass 'nope'"], id="unknown-stage"),
        pytest.param(["identity++identity"], ["has an empty stage", "first+second"], id="empty-stage"),
        pytest.param(
            ["sequence_parallel+identity", "--pass-option", "patterns=P1"],
            ["names no stage", "identity.NAME or 2.NAME"],
            id="stage-option",
        ),
        pytest.param(
            ["sequence_parallel+identity", "--pass-option", "identity.colour=red"],
            ["pass 'identity' has no option 'colour'"],
            id="option-of-stage",
        ),
        pytest.param(["identity", "--contract", "boundary=maybe"], ["not strict or lenient"], id="contract-word"),
        pytest.param(["identity", "--contract", "fast=true"], ["'fast' is not a promise", "idempotent"], id="contract-key"),
        pytest.param(["identity", "--contract", "idempotent=maybe"], ["not true or false"], id="contract-value"),
        pytest.param(["--world-size", "1"], ["needs at least 2 ranks, not 1", "no collectives"], id="one-rank"),
        pytest.param(["--world-size", "0"], ["needs at least 2 ranks, not 0"], id="no-ranks"),
        pytest.param(["--world-size", "two"], ["'two' is not a number of ranks"], id="ranks-in-words"),
        pytest.param(["--world-size", "²"], ["'²' is not a number of ranks"], id="ranks-superscript"),
        pytest.param(["--world-size", ""], ["'' is not a number of ranks"], id="ranks-empty"),
        pytest.param(["--world-size", "100"], ["at most 64"], id="many-ranks"),
        pytest.param(["--world-size", "9" * 5000], ["is not a number of ranks"], id="huge-number"),
        pytest.param(["--mesh", "tp"], ["does not have the form name=value"], id="mesh-form"),
        pytest.param(["--mesh", "tp=x"], ["'x' is not a number of ranks"], id="mesh-text"),
        pytest.param(["--mesh", "tp=0"], ["at least 2 ranks, not 0"], id="mesh-zero"),
        pytest.param(["--mesh", "tp=1,dp=1"], ["at least 2 ranks, not 1"], id="mesh-one"),
        pytest.param(["--mesh", "tp=2,tp=2"], ["names 'tp' twice"], id="mesh-twice"),
        pytest.param(["--mesh", "tp=999999999,dp=999999999"], ["at most 64"], id="mesh-huge"),
        pytest.param(["--mesh", "tp=2", "--world-size", "2"], ["exclude each other"], id="mesh-and-ranks"),
        pytest.param(["--strategy", "structred"], ["no strategy 'structred'", "did you mean 'structured'?"], id="strategy"),
        pytest.param(["--checks", "purty"], ["no check 'purty'", "did you mean 'purity'?"], id="check"),
        pytest.param(["--checks", ""], ["no check given", "structure"], id="no-check"),
        pytest.param(["--fail-on", "rain"], ["no condition 'rain'", "inconclusive"], id="fail-on"),
        pytest.param(["--max-time", "nonsense"], ["--max-time nonsense is not a time", "8h"], id="max-time"),
        pytest.param(["--max-time", "nan"], ["is not a time"], id="max-time-nan"),
        pytest.param(["--max-time", "-5s"], ["is not a time"], id="max-time-negative"),
        pytest.param(["--max-examples", "0"], ["--max-examples", "x>=1"], id="max-examples"),
        pytest.param(["--pass-timeout", "0"], ["--pass-timeout"], id="pass-timeout"),
        pytest.param(["--confirm", "mpi"], ["--confirm", "gloo"], id="confirm"),
        pytest.param(["--confirm", "nccl"], ["no CUDA device", "--confirm gloo"], id="no-nccl"),
        pytest.param(["--report-dir", "file/reports"], ["file/reports", "cannot be written", "--report-dir"], id="report-dir"),
        pytest.param(["--repot-dir", "x"], ["No such option"], id="unknown-option"),
    ],
)  # fmt: skip
def test_run_refuses(bad: Path, arguments: list[str], texts: list[str]) -> None:
    if "--confirm" not in arguments:
        arguments = [*arguments, "--confirm", "none"]
    says(run_here("run", *arguments), 2, *texts)


def test_a_directory_where_nothing_can_be_written(bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".tcverify").write_text("")  # for root, too
    says(run_here("run", "identity", "--confirm", "none"), 2, "cannot be written", "run in a writable directory")


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        pytest.param("[tool.tcverify]\nmax-exmples = 3", ["unknown key 'max-exmples'", "did you mean 'max-examples'?"], id="key"),
        pytest.param("[tool.tcverify", ["pyproject.toml cannot be read"], id="syntax"),
        pytest.param("[tool]\ntcverify = 3", ["is not a table"], id="no-table"),
        pytest.param("tool = 3", ["is not a table"], id="tool-no-table"),
        pytest.param("[tool.tcverify]\nmax-examples = 'many'", ["--max-examples", "'many' is not a valid integer"], id="value"),
        pytest.param("[tool.tcverify]\ncontract = 'idempotent'", ["contract is not a table"], id="contract"),
        pytest.param("[tool.tcverify]\nworld-size = [1, 2]", ["at least 2 ranks, not 1"], id="list"),
        pytest.param("[tool.tcverify]\npasses = 'identity'", ["passes is not a list"], id="passes"),
        pytest.param("[tool.tcverify]\nbaseline = 3", ["baseline is not a path"], id="path"),
        pytest.param("[tool.tcverify]\nconfirm = 'mpi'", ["'mpi' is not one of"], id="choice"),
        pytest.param("\udcff", ["pyproject.toml cannot be read"], id="bytes"),
    ],
)  # fmt: skip
def test_bad_configuration(
    bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, texts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(text, errors="surrogateescape")
    says(run_here("run", "identity"), 2, *texts)
    assert run_here("passes").code == 0


def test_configuration_holds_defaults_and_the_command_line_wins(
    bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(
        "[tool.tcverify]\nworld-size = [2]\nmax-examples = 5\nconfirm = 'none'\nseed = 4\ncontract = { idempotent = true }\n"
        "passes = ['no:such']\n"
    )
    outcome = run_here("run", "identity", "--max-examples", "2")
    assert outcome.out.startswith("identity on 2 ranks: 2 programs, lockstep, seed 4\n")
    says(run_here("run"), 2, "there is no module 'no'")


def test_no_gloo(bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    for command in (["run", "identity"], ["replay", "file"], ["doctor"]):
        says(run_here(*command), 2, "this torch is built without gloo", "--confirm none")
    arguments = ["--world-size", "2", "--max-examples", "2", "--confirm", "none"]
    assert run_here("run", "identity", *arguments).code == 0


# -------------------------------------------------------------------------------------------------- counterexamples


@pytest.fixture(scope="module")
def good(bad: Path) -> dict[str, Any]:
    """A counterexample, as data."""
    run_here(
        "run", "mine.py:drops_reduction", "--strategy", "one", "--world-size", "2", "--confirm", "none", "--seed", "1"
    )
    found: dict[str, Any] = json.loads(
        (bad / "reports" / only_case(bad / "reports") / "counterexample.json").read_text()
    )
    return found


def _with(**changes: Any) -> Any:
    return lambda good: json.dumps({**good, **changes})


def _rank_seven(good: dict[str, Any]) -> str:
    return json.dumps({**good, "finding": {**good["finding"], "rank": 7}})


def _unknown_op(good: dict[str, Any]) -> str:
    return json.dumps(good).replace("tensor_cast::all_reduce", "os::system")


@pytest.mark.parametrize("verb", ["show", "replay"])
@pytest.mark.parametrize(
    ("write", "text"),
    [
        pytest.param(lambda good: "", "is not JSON", id="empty"),
        pytest.param(lambda good: json.dumps(good)[:500], "may be truncated", id="truncated"),
        pytest.param(lambda good: "[" * 100_000, "nested too deeply", id="deep"),
        pytest.param(lambda good: "\0\x1b[2J", "is not JSON", id="binary"),
        pytest.param(lambda good: "[]", "not a tcverify counterexample", id="list"),
        pytest.param(lambda good: json.dumps(good["program"]), "not a tcverify counterexample", id="program"),
        pytest.param(_with(version=99), "reads version 1", id="version"),
        pytest.param(_with(id="../../etc"), "is not an id", id="id"),
        pytest.param(_with(finding=3), "malformed counterexample", id="finding"),
        pytest.param(_with(values=[{"rank": 0}]), "malformed counterexample: it lacks 'index'", id="values"),
        pytest.param(_with(program=None), "not a tcverify program", id="no-program"),
        pytest.param(_with(pass_timeout=1e9), "is not a time-out", id="timeout"),
        pytest.param(_with(contract={"fast": True}), "fast", id="contract"),
        pytest.param(_rank_seven, "about rank 7 of 2", id="rank"),
        pytest.param(_unknown_op, "os::system", id="unknown-op"),
        pytest.param(lambda good: " " * (MAX_BYTES + 1), "at most", id="oversized"),
    ],
)  # fmt: skip
def test_bad_counterexample(bad: Path, good: dict[str, Any], verb: str, write: Any, text: str) -> None:
    Path("bad.json").write_text(write(good))
    outcome = run_here(verb, "bad.json", *(["--confirm", "none"] if verb == "replay" else []))
    shown = " ".join((outcome.err if verb == "show" else outcome.out).split())
    assert outcome.code == 2, outcome
    assert text in shown
    assert shown.startswith("Error: bad.json" if verb == "show" else "! ERROR not replayed: bad.json")
    assert "Traceback" not in outcome.out + outcome.err
    assert "\x1b" not in outcome.out + outcome.err


@pytest.mark.parametrize("verb", ["show", "replay"])
@pytest.mark.parametrize(
    ("where", "texts"),
    [
        pytest.param("ffffffff", ["no counterexample 'ffffffff'", "reports"], id="unknown-id"),
        pytest.param("*", ["no counterexample '*'"], id="pattern"),
        pytest.param("several", ["no counterexample in several"], id="empty-directory"),
        pytest.param("x" * 5000, ["cannot be read"], id="long-name"),
    ],
)
def test_no_such_counterexample(bad: Path, good: dict[str, Any], verb: str, where: str, texts: list[str]) -> None:
    Path("several").mkdir(exist_ok=True)
    says(run_here(verb, where), 2, *texts)


def test_an_ambiguous_id_names_the_candidates(bad: Path, good: dict[str, Any]) -> None:
    for name in ("ab000001", "ab000002"):
        (Path("two") / name).mkdir(parents=True, exist_ok=True)
        (Path("two") / name / "counterexample.json").write_text(json.dumps(good))
    says(run_here("show", "ab", "--report-dir", "two"), 2, "'ab' matches 2", "ab000001, ab000002")


@pytest.mark.parametrize("form", ["text", "md", "json"])
def test_show_goes_on_after_a_file_that_cannot_be_read(bad: Path, good: dict[str, Any], form: str) -> None:
    for name, text in (("ab000003", "{"), ("ab000004", json.dumps(good))):
        (Path("some") / name).mkdir(parents=True, exist_ok=True)
        (Path("some") / name / "counterexample.json").write_text(text)
    outcome = run_here("show", "some", "--format", form)
    says(outcome, 2, "ab000003/counterexample.json is not JSON")
    assert good["id"] in outcome.out


def test_replay_goes_on_after_a_file_that_cannot_be_read(bad: Path, good: dict[str, Any]) -> None:
    Path("good.json").write_text(json.dumps(good))
    Path("bad.json").write_text("")
    outcome = run_here("replay", "bad.json", "good.json", "--confirm", "none")
    assert outcome.code == 1
    assert outcome.out.endswith("0 fixed, 1 failed, 1 error\n")


def test_an_error_of_ours_says_so(bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(counterexample, "find_counterexamples", breaks)
    says(run_here("show", "x"), 3, "internal error: ZeroDivisionError: oops", "please report it", "--debug")


# ------------------------------------------------------------------------------------------------- ends before the end


def _wait_for(condition: Any, process: warm.Started) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


RUN = ["-m", "tcverify", "run", "--world-size", "2", "--seed", "1", "--max-examples", "100000"]


@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "process-group"])
def test_ctrl_c_keeps_what_was_found(tmp_path: Path, whole_group: bool) -> None:
    (tmp_path / "mine.py").write_text(FOREIGN)
    confirm = "gloo" if whole_group else "none"
    process = start(*RUN, "mine.py:raises", "--confirm", confirm, cwd=tmp_path)
    _wait_for(lambda: list(tmp_path.glob("reports/*/repro.py")), process)
    children = descendants(process.pid)
    assert children
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    outcome = finish(process)
    assert (outcome.code, outcome.err) == (130, "")
    assert "; interrupted\n" in outcome.out
    assert "pass-raised" in outcome.out
    assert _gone(children)
    assert not list(tmp_path.glob(".tcverify/in-flight*"))
    assert json.loads((tmp_path / "reports" / only_case(tmp_path / "reports") / "counterexample.json").read_text())


def test_ctrl_c_while_shrinking_keeps_the_best_so_far(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FOREIGN)
    options = ["--confirm", "none", "--pass-timeout", "0.3", "--shrink-time", "1000"]
    process = start(*RUN, "mine.py:touches_and_hangs", *options, cwd=tmp_path)
    running = tmp_path / "running"
    # The first program has timed out, more than once perhaps: what runs now are trials.
    _wait_for(lambda: running.exists() and running.read_text().count("again") > 4, process)
    os.killpg(process.pid, signal.SIGINT)
    outcome = finish(process)
    assert (outcome.code, outcome.err) == (130, "")
    assert "pass-timeout" in outcome.out
    assert only_case(tmp_path / "reports")


def test_ctrl_c_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FOREIGN)
    process = start(*RUN, "mine.py:does_nothing", cwd=tmp_path)
    _wait_for((tmp_path / ".tcverify").exists, process)
    time.sleep(0.5)  # the fork server imports torch
    children = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    assert _gone(children)


@pytest.mark.parametrize("waits", ["time.sleep(60)", "exec('time.sleep(60)')"], ids=["code", "text"])
def test_ctrl_c_while_the_command_is_imported(tmp_path: Path, waits: str) -> None:
    (tmp_path / "torch.py").write_text(f"open('begun', 'w').close()\nimport time\n{waits}\n")
    process = warm.interpreter("-m", "tcverify", "doctor", cwd=tmp_path, env=environment())
    _wait_for((tmp_path / "begun").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    outcome = finish(process)
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


def test_a_run_that_is_killed_leaves_no_process_and_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FOREIGN)
    process = start(*RUN, "mine.py:touches_and_hangs", "--confirm", "none", cwd=tmp_path)
    _wait_for((tmp_path / "running").exists, process)
    children = descendants(process.pid)
    process.kill()
    finish(process)
    assert _gone(children)
    again = start(*RUN[:-1], "1", "identity", "--confirm", "none", cwd=tmp_path)
    outcome = finish(again)
    (kept,) = (tmp_path / "reports").glob("crashed-*.json")
    assert f"which is saved as reports/{kept.name}" in " ".join(outcome.out.split())
    assert not list(tmp_path.glob(".tcverify/in-flight*"))


def test_nccl_wants_a_device_for_each_rank(bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    outcome = run_here("run", "identity", "--world-size", "2", "--max-examples", "1", "--confirm", "nccl")
    assert outcome.code == 2
    assert "NCCL wants a CUDA device for each of 2 ranks, and this machine has 1" in outcome.err
    assert "use --confirm cuda, by which ranks may share a device" in outcome.err


def test_output_that_nobody_reads(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = start(
        *RUN[:-1], "20", "identity", "--confirm", "none", "--report", "ndjson,junit", cwd=tmp_path, stdout=writer
    )
    os.close(writer)
    os.close(reader)
    outcome = finish(process)
    assert outcome.code == 1
    assert outcome.err == ""
    last = json.loads((tmp_path / "reports" / "events.ndjson").read_text().splitlines()[-1])
    assert (last["event"], last["exit_code"], last["error"]) == ("run-finished", 1, "the output was closed")
    assert 'message="the output was closed"' in (tmp_path / "reports" / "junit.xml").read_text()
    assert not list(tmp_path.glob(".tcverify/in-flight*"))
