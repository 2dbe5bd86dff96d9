"""Issues for PyTorch: what a maintainer reads first is there, and the script in it shows the defect."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tcverify.cases.counterexample import EditingLine, write_counterexample
from tcverify.cases.end_to_end import EndToEnd
from tcverify.pytorch.end_to_end.issue import to_issue
from tcverify.pytorch.end_to_end.script import make_script
from tcverify.pytorch.end_to_end.trial import pipeline_of
from tests.cli.conftest import run_here, says
from tests.pytorch.end_to_end.test_trial import ON_213, case_of
from tests.support.html_cases import case as other_case

SHOWN = EndToEnd("shown", "torch.compile", "wrong value on rank 1", ("rank 1: output 0: expected [1.0], got [2.0]",))


def script_in(issue: str) -> str:
    (script,) = re.findall(r"^```python\n(.*?)^```$", issue, re.DOTALL | re.MULTILINE)
    return str(script)


def test_what_torch_compile_shows_is_shown_by_it() -> None:
    case = replace(case_of("wait-alias-unknown"), end_to_end=SHOWN)
    issue = to_issue(case)
    assert issue.startswith("# [inductor] reinplace_inplaceable_ops: wrong value on rank 1 in torch.compile\n")
    assert SHOWN.lines[0] in issue
    assert script_in(issue) == make_script(case, pipeline_of(case), "users")
    assert "without these settings" not in issue
    assert "without these settings" in to_issue(replace(case, end_to_end=replace(SHOWN, with_defaults=True)))
    assert f"torch {case.environment['torch']}, Python {case.environment['python']}" in issue


@ON_213
def test_what_it_does_not_show_is_shown_by_the_pass(tmp_path: Path) -> None:
    case = case_of("bucketing-returns-strided-views")
    issue = to_issue(case)
    script = tmp_path / "script.py"
    script.write_text(script_in(issue))
    assert "This calls the pass on the traced step" in script.read_text()
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[-1] == "raises RuntimeError on ranks 0, 1"


@pytest.mark.parametrize("name", ["functional-broadcast-has-no-gradient", "static-graph-breaks-without-sync"])
def test_what_no_script_reaches_has_none(name: str) -> None:
    """Compiling the step would not run what is at fault, and the script would say that all is well."""
    case = case_of(name)
    issue = to_issue(case)
    assert f"There is no script: {pipeline_of(case).unreachable}. The graph is" in issue
    assert "python script.py" not in issue
    assert "called directly" not in issue


def test_the_cause_is_named() -> None:
    case = case_of("collective-waited-twice")
    assert "torch/_inductor/fx_passes/bucketing.py:1318 in process_collective_bucket" in to_issue(case)
    installed = case.finding.detail.replace('File "torch/', 'File "/venv/lib/python3.11/site-packages/torch/')
    assert installed != case.finding.detail
    assert to_issue(replace(case, finding=replace(case.finding, detail=installed))) == to_issue(case)
    made = (EditingLine("cat", "creates", "torch/_inductor/fx_passes/bucketing.py", 7, "merge"),)
    assert "bucketing.py:7 in merge (creates 'cat')" in to_issue(replace(case, made_by=made))
    assert "torch/_inductor/fx_passes/reinplace.py:reinplace_inplaceable_ops" in to_issue(case_of("wait-alias-unknown"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = write_counterexample(case_of("wait-alias-unknown"), tmp_path / "reports")
    outcome = run_here("show", str(theirs), "--format", "pytorch-issue")
    assert outcome.code == 0
    assert outcome.out.rstrip() == to_issue(case_of("wait-alias-unknown")).rstrip()
    ours = write_counterexample(other_case("wrong-value"), tmp_path / "reports")
    says(run_here("show", str(ours), "--format", "pytorch-issue"), 2, "is not a pass of PyTorch", "torch: subjects")
    both = run_here("show", str(ours), str(theirs), "--format", "pytorch-issue")
    says(both, 2, "an issue shows one counterexample, not 2", "give one file or ID")


@ON_213
def test_a_replay_tries_again_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stale = replace(case_of("dtensor-fill-partial"), end_to_end=EndToEnd("right", "DTensor", "as it was"))
    path = str(write_counterexample(stale, tmp_path / "reports"))
    again = run_here("replay", path)
    assert again.code == 1
    assert "end to end: also in DTensor: wrong value on ranks 0, 1" in again.out
    assert "end to end" not in run_here("replay", path, "--confirm", "none").out
