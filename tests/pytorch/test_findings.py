"""What is written down of defects of PyTorch holds in the torch that runs this: scripts end as said, counterexamples replay."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tcverify.cases.counterexample import read_counterexample
from tcverify.errors import UsageError
from tcverify.pytorch import PREFIX, SUBJECTS
from tcverify.pytorch.findings import TorchFinding, read_finding, read_findings
from tcverify.replay import replay_case

FINDINGS = Path(__file__).parents[2] / "reports" / "pytorch"
TORCH = torch.__version__.partition("+")[0]

FOLDERS = sorted(path.name for path in FINDINGS.iterdir() if path.is_dir()) if FINDINGS.is_dir() else []

#: Whose scripts every run of the tests starts. What a script does depends on torch alone, so that all of them run where that is
#: another one: `tox -e findings-torch213`.
CHOSEN = {"bucketing-cat-promotes-integers", "dtensor-topk-cache", "unsharded-parameters-in-lists"}

#: A script has to end within a minute; importing torch takes longer where many tests run at once.
SECONDS = 120


def imported(source: str) -> set[str]:
    """The packages that a script imports, anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def ends_with(script: Path, place: Path) -> tuple[int, str]:
    """Run a script where nothing of this repository can be imported; return how it ends, and what it prints."""
    cache = str(place.parent / "inductor")  # C++ headers take most of a minute: those of a session are compiled once
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH", "TORCH"))}
    finished = subprocess.run(
        [sys.executable, str(script)], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(place), "TORCHINDUCTOR_CACHE_DIR": cache},
        timeout=SECONDS, check=False,
    )  # fmt: skip
    return finished.returncode, finished.stdout


def exit_codes(finding: TorchFinding, version: str) -> tuple[int, ...]:
    """What its script may end with in a version of torch."""
    if version in finding.affects:
        return (1,)
    return (0, 2) if version in finding.unaffected else (0, 1, 2)


def require_as_said(finding: TorchFinding, version: str, code: int, out: str) -> None:
    """Assert that a script ended as its folder says of this version."""
    assert code in exit_codes(finding, version), f"{finding.script} ends with {code} on torch {version}:\n{out}"
    if code == 1:
        assert "expected" in out.lower(), f"{finding.script} does not say what was expected:\n{out}"
        assert "Traceback" not in out, f"{finding.script} ends with an error of its own:\n{out}"


def require_cause(finding: TorchFinding, where: Path) -> None:
    """Assert that the file of torch that is to blame has what the cause names."""
    file, _, name = finding.cause.partition(":")
    source = (where / file).read_text(encoding="utf-8")
    last = name.rpartition(".")[2]
    assert re.search(rf"(?m)^\s*(?:(?:async )?def|class) {last}\b|^{last}\b", source), f"{file} has no {name}"


def require_replays(finding: TorchFinding, version: str) -> None:
    """Assert that the counterexample shows the defect where this version is affected, and only there."""
    assert finding.counterexample is not None
    case = read_counterexample(finding.counterexample)
    assert case.finding.kind == finding.kind, f"{finding.counterexample} shows {case.finding.kind}"
    again = replay_case(case, None)
    shows = again.case is not None and again.case.finding.kind == finding.kind
    if version in finding.affects:
        assert shows, f"torch {version} does not show it: {again.state}, {again.message}"
    elif version in finding.unaffected:
        assert not shows, f"torch {version} shows it: {again.message}"


def test_chosen_scripts_are_there() -> None:
    assert set(FOLDERS) >= CHOSEN


@pytest.mark.parametrize("name", FOLDERS)
def test_the_facts_are_complete(name: str) -> None:
    finding = read_finding(FINDINGS / name)
    assert finding.subject.removeprefix(PREFIX) in SUBJECTS, f"there is no subject '{finding.subject}'"
    assert "tcverify" not in imported(finding.script.read_text(encoding="utf-8")), finding.script
    issue = (finding.folder / "issue.md").read_text(encoding="utf-8")
    assert len(issue.split()) >= 60, (
        f"{finding.folder}/issue.md: too short to be understood by who has not seen the script"
    )
    if finding.affects[-1] == TORCH and finding.cause.partition(":")[0].endswith(".py"):
        require_cause(finding, Path(torch.__file__).parents[1])


@pytest.mark.parametrize(
    "name", [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS]
)
def test_the_script_ends_as_is_said(name: str, tmp_path: Path) -> None:
    finding = read_finding(FINDINGS / name)
    require_as_said(finding, TORCH, *ends_with(finding.script, tmp_path))


#: Findings with a counterexample.
SHOWN = [name for name in FOLDERS if (FINDINGS / name / "counterexample.json").is_file()]


@pytest.mark.parametrize(
    "name",  # half of them, in every run
    [pytest.param(name, marks=[] if i % 2 == 0 else pytest.mark.slow) for i, name in enumerate(SHOWN)],
)
def test_the_counterexample_replays_where_it_should(name: str) -> None:
    require_replays(read_finding(FINDINGS / name), TORCH)


# ---------------------------------------------------------------------------------------- what the tests above are worth

FACTS = {
    "title": "all_gathers of two dtypes become one",
    "subject": "torch:bucket_all_gather",
    "kind": "wrong-value",
    "cause": "torch/_inductor/fx_passes/bucketing.py:bucket_all_gather",
    "why": "Nobody asks for the dtype.",
    "contract": "A pass keeps what a program computes.",
    "affects": ["2.13.0"],
    "unaffected": ["2.9.1"],
    "reported": "unreported",
    "entry": "torch.compile",
}


def written(folder: Path, script: str = "", **facts: object) -> Path:
    """Write a folder without a counterexample; facts that are None are left out."""
    folder.mkdir()
    both = {**FACTS, "unshown": "No program has it.", **facts}
    lines = [f"{name} = {json.dumps(value)}" for name, value in both.items() if value is not None]
    (folder / "finding.toml").write_text("\n".join(lines) + "\n")
    (folder / "script.py").write_text(script)
    (folder / "issue.md").write_text("What is wrong.\n")
    return folder


def test_a_folder_that_is_complete_is_read(tmp_path: Path) -> None:
    written(tmp_path / "two", affects=["2.15.0", "2.9.1"], unaffected=[])
    written(tmp_path / "one", reported="https://github.com/pytorch/pytorch/issues/1")
    (tmp_path / "neither.txt").write_text("")
    one, two = read_findings(tmp_path)
    assert (one.folder.name, two.folder.name) == ("one", "two")
    assert (one.title, one.unaffected, one.counterexample) == (FACTS["title"], ("2.9.1",), None)
    assert two.affects == ("2.9.1", "2.15.0")
    assert [exit_codes(two, version) for version in ("2.9.1", "2.11.0")] == [(1,), (0, 1, 2)]
    assert exit_codes(one, "2.9.1") == (0, 2)
    (one.folder / "counterexample.json").write_text("{}")
    assert one.counterexample == one.folder / "counterexample.json"
    require_cause(one, Path(torch.__file__).parents[1])


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        *((({name: None}), f"{name} is None") for name in FACTS),
        ({"title": " "}, "title is ' '"),
        ({"why": 3}, "why is 3"),
        ({"affects": "2.13.0"}, "affects is '2.13.0'"),
        ({"affects": ["2.13"]}, r"affects is \['2.13'\]"),
        ({"affects": ["2.13.0", "2.13.0"]}, "affects is"),
        ({"affects": []}, "no version is affected"),
        ({"unaffected": ["2.13.0"]}, "2.13.0 cannot be affected and unaffected"),
        ({"subject": "bucket_all_gather"}, "subject is 'bucket_all_gather'"),
        ({"kind": "odd"}, "there is no kind 'odd'"),
        ({"entry": "eager"}, "there is no entry 'eager'"),
        ({"cause": "bucketing.py"}, "cause is 'bucketing.py'"),
        ({"reported": "maybe"}, "reported is 'maybe'"),
        ({"also": "wrong-value: neg is unrelated"}, "also is 'wrong-value"),
        ({"also": ["neg is unrelated"]}, r"also is \['neg"),
        ({"severity": "high"}, "unknown key 'severity'"),
        ({"unshown": None}, "neither a counterexample.json beside it nor 'unshown'"),
        ({"unshown": ""}, "unshown is ''"),
    ],
)  # fmt: skip
def test_facts_that_cannot_be_are_refused(facts: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        read_finding(written(tmp_path / "one", **facts))


@pytest.mark.parametrize(
    ("file", "says"), [("script.py", "no script.py"), ("issue.md", "no issue.md"), ("finding.toml", "cannot be read")]
)
def test_files_that_are_missing_are_named(file: str, says: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "one")
    (folder / file).unlink()
    with pytest.raises(UsageError, match=says):
        read_finding(folder)


def test_a_counterexample_is_there_or_it_is_said_why_not(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", unshown=None)
    (folder / "counterexample.json").write_text("{}")
    assert read_finding(folder).unshown == ""
    other = written(tmp_path / "two")
    assert read_finding(other).unshown == "No program has it."
    (other / "counterexample.json").write_text("{}")
    with pytest.raises(UsageError, match="'unshown' stands beside a counterexample"):
        read_finding(other)


def test_a_script_that_ends_otherwise_is_noticed(tmp_path: Path) -> None:
    script = "import sys\nprint('expected 1, got 2')\nsys.exit(1)\n"
    finding = read_finding(written(tmp_path / "one", script))
    code, out = ends_with(finding.script, tmp_path)
    assert (code, out) == (1, "expected 1, got 2\n")
    require_as_said(finding, "2.13.0", code, out)
    require_as_said(finding, "2.11.0", code, out)
    with pytest.raises(AssertionError, match=r"ends with 1 on torch 2\.9\.1"):
        require_as_said(finding, "2.9.1", code, out)
    with pytest.raises(AssertionError, match=r"ends with 0 on torch 2\.13\.0"):
        require_as_said(finding, "2.13.0", 0, "")
    with pytest.raises(AssertionError, match="does not say what was expected"):
        require_as_said(finding, "2.13.0", 1, "AssertionError")
    with pytest.raises(AssertionError, match="an error of its own"):
        require_as_said(finding, "2.13.0", 1, "expected 1\nTraceback (most recent call last):\n")
    with pytest.raises(AssertionError, match="ends with -9"):
        require_as_said(finding, "2.11.0", -9, "")


def test_a_script_sees_nothing_of_this_repository(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", "import sys\nsys.exit(any('tests' in path for path in sys.path))\n")
    assert ends_with(folder / "script.py", tmp_path) == (0, "")
    assert imported("import torch.fx\ndef f():\n    from tcverify.ops import lookup\n") == {"torch", "tcverify"}


def test_a_cause_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "one.py").write_text("RULES = []\nclass A:\n    def first(self):\n        second = 1\n")
    for name in ("A", "A.first", "first", "RULES"):
        require_cause(read_finding(written(tmp_path / name, cause=f"torch/one.py:{name}")), tmp_path)
    with pytest.raises(AssertionError, match=r"torch/one\.py has no second"):
        require_cause(read_finding(written(tmp_path / "two", cause="torch/one.py:second")), tmp_path)


def test_a_counterexample_that_replays_otherwise_is_noticed(tmp_path: Path) -> None:
    finding = read_finding(written(tmp_path / "one"))
    exhibit = FINDINGS.parent / "gallery" / "bucket-in-the-first-dtype"
    shutil.copy(exhibit / "counterexample.json", finding.folder)
    require_replays(finding, "2.13.0")
    with pytest.raises(AssertionError, match=r"torch 2\.9\.1 shows it"):
        require_replays(finding, "2.9.1")
    other = read_finding(written(tmp_path / "two", kind="race"))
    shutil.copy(exhibit / "counterexample.json", other.folder)
    with pytest.raises(AssertionError, match="shows wrong-value"):
        require_replays(other, "2.13.0")
    sound = json.loads((exhibit / "counterexample.json").read_text())
    sound["pass"] |= {"target": "tcverify.passes.identity:Identity", "options": {}}
    (finding.folder / "counterexample.json").write_text(json.dumps(sound))
    require_replays(finding, "2.9.1")
    with pytest.raises(AssertionError, match=r"torch 2\.13\.0 does not show it: fixed"):
        require_replays(finding, "2.13.0")
