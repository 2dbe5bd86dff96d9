"""What scripts of findings do in this torch is compared with what their folders say, and written into them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from tcverify.pytorch.findings import VERSIONS, read_finding
from tests.support.scripts import load_script

ENDS = {"bad": "print('expected 1'); sys.exit(1)", "good": "pass", "not there": "sys.exit(2)", "error": "sys.exit(3)"}


@pytest.fixture(scope="module")
def findings() -> ModuleType:
    return load_script(Path(__file__).parents[2] / "benchmarks" / "findings.py")


def folder(where: Path, name: str, outcome: str, affects: list[str], unaffected: list[str]) -> Path:
    made = where / name
    made.mkdir()
    facts = {
        "title": "one", "subject": "torch:dtensor", "kind": "wrong-value", "cause": "torch/a.py:b", "why": "So.",
        "contract": "Values stay.", "reported": "unreported", "reach": "default", "unshown": "No strategy draws it.",
    }  # fmt: skip
    lines = [f"{key} = {json.dumps(value)}" for key, value in facts.items()]
    lines += [f"affects = {json.dumps(affects)}", f"unaffected = {json.dumps(unaffected)}  # has no such op"]
    (made / "finding.toml").write_text("\n".join(lines) + "\n")
    (made / "script.py").write_text(f"import sys\n{ENDS[outcome]}\n")
    (made / "issue.md").write_text("What is wrong.\n")
    return made


def ran(findings: ModuleType, *arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(findings.main, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_findings_that_are_as_said_change_nothing(findings: ModuleType, tmp_path: Path) -> None:
    old, new = list(VERSIONS[:1]), list(VERSIONS[1:])
    folder(tmp_path, "affected", "bad", new, old)
    folder(tmp_path, "mended", "good", old, new)
    folder(tmp_path, "absent", "not there", old, new)
    folder(tmp_path, "unknown", "error", old, [])
    code, out = ran(findings, "run", "--found", tmp_path, "--log", tmp_path / "log")
    assert (code, "0 of 4 differ" in out) == (0, True), out
    outcomes = {one["finding"]: one["outcome"] for one in map(json.loads, (tmp_path / "log").read_text().splitlines())}
    assert outcomes == {"affected": "bad", "mended": "good", "absent": "not there", "unknown": "error"}


@pytest.mark.parametrize(
    ("outcome", "affected", "says"),
    [
        ("good", True, "one: is fixed (good)"),
        ("not there", True, "one: is fixed (not there)"),
        ("bad", False, "one: has come back"),
        ("error", True, "one: its script tells nothing, error"),
        ("error", False, "one: its script tells nothing, error"),
    ],
)
def test_a_change_is_named(findings: ModuleType, outcome: str, affected: bool, says: str, tmp_path: Path) -> None:
    old, new = list(VERSIONS[:1]), list(VERSIONS[1:])
    folder(tmp_path, "one", outcome, *((new, old) if affected else (old, new)))
    code, out = ran(findings, "run", "--found", tmp_path, "one")
    assert (code, "1 of 1 differ" in out, says in out) == (1, True, True), out


def test_what_logs_hold_is_recorded(findings: ModuleType, tmp_path: Path) -> None:
    first, second, third, fourth = VERSIONS[:4]
    made = folder(tmp_path, "one", "bad", [first, third], [second])
    rows = [(second, "bad"), (third, "timed out"), (fourth, "not there"), ("2.99.0", "bad")]
    lines = [json.dumps({"torch": version, "finding": "one", "outcome": outcome}) for version, outcome in rows]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    code, out = ran(findings, "record", "--found", tmp_path, tmp_path / "log")
    assert (code, "torch 2.99.0 is left out" in out) == (0, True), out
    one = read_finding(made)
    assert (one.affects, one.unaffected) == ((first, second), (fourth,))
    assert "]  # has no such op\n" in (made / "finding.toml").read_text()
