"""What is written down of defects of PyTorch holds in the torch that runs this: scripts end as said, counterexamples replay."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tcverify.cases.counterexample import read_counterexample
from tcverify.errors import UsageError
from tcverify.pytorch import PREFIX, SUBJECTS
from tcverify.pytorch.findings import VERSIONS, TorchFinding, read_finding, read_findings, run_script
from tcverify.replay import replay_case

FINDINGS = Path(__file__).parents[2] / "reports" / "pytorch"
TORCH = torch.__version__.partition("+")[0]

FOLDERS = sorted(path.name for path in FINDINGS.iterdir() if path.is_dir()) if FINDINGS.is_dir() else []

#: Whose scripts every run of the tests starts. What a script does depends on torch alone, so that all of them run where that is
#: another one: `tox -e findings-torch213`.
CHOSEN = {"bucketing-cat-promotes-integers", "dtensor-topk-cache", "unsharded-parameters-in-lists"}

#: A script has to end within a minute; importing torch and compiling C++ take longer where many tests run at once.
SECONDS = 200


def imported(source: str) -> set[str]:
    """The packages that a script imports, anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def outcomes(finding: TorchFinding, version: str) -> tuple[str, ...]:
    """What may come of its script in a version of torch."""
    shows = finding.shows_in(version)
    return ("bad", "good", "not there", "error") if shows is None else ("bad",) if shows else ("good", "not there")


def require_as_said(finding: TorchFinding, version: str, outcome: str, out: str) -> None:
    """Assert that what came of a script is what its folder says of this version."""
    assert outcome in outcomes(finding, version), f"{finding.script}: {outcome} on torch {version}:\n{out}"
    if outcome == "bad":
        assert "expected" in out.lower(), f"{finding.script} does not say what was expected:\n{out}"


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
    if not SUBJECTS[finding.subject.removeprefix(PREFIX)].here:
        pytest.skip(f"{finding.subject} cannot be verified with torch {version}")
    again = replay_case(case, None)
    if again.case is None and "this torch" in again.message and not case.environment["torch"].startswith(version):
        pytest.skip(again.message)
    shows = again.case is not None and again.case.finding.kind == finding.kind
    said = finding.shows_in(version)
    assert shows or not said, f"torch {version} does not show it: {again.state}, {again.message}"
    assert not shows or said is not False, f"torch {version} shows it: {again.message}"


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
    if finding.counterexample is not None:
        frames = re.findall(r'File \\"([^"\\]+)', finding.counterexample.read_text(encoding="utf-8"))
        assert not [file for file in frames if file.startswith("/") or "site-packages" in file], "paths of one machine"
    if finding.affects[-1] == TORCH and finding.cause.partition(":")[0].endswith(".py"):
        require_cause(finding, Path(torch.__file__).parents[1])


@pytest.mark.parametrize(
    "name", [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS]
)
def test_the_script_ends_as_is_said(name: str, tmp_path: Path) -> None:
    finding = read_finding(FINDINGS / name)
    require_as_said(finding, TORCH, *run_script(finding.script, tmp_path, SECONDS))


#: Findings with a counterexample.
SHOWN = [name for name in FOLDERS if (FINDINGS / name / "counterexample.json").is_file()]


@pytest.mark.parametrize(
    "name",  # a third of them, in every run
    [pytest.param(name, marks=[] if i % 3 == 0 else pytest.mark.slow) for i, name in enumerate(SHOWN)],
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
    "reach": "opt-in",
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
    assert [outcomes(two, version) for version in ("2.9.1", "2.11.0")] == [
        ("bad",),
        ("bad", "good", "not there", "error"),
    ]
    assert outcomes(one, "2.9.1") == ("good", "not there")
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
        ({"reach": "eager"}, "there is no reach 'eager'"),
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
    outcome, out = run_script(finding.script, tmp_path, SECONDS)
    assert (outcome, out) == ("bad", "expected 1, got 2\n")
    require_as_said(finding, "2.13.0", outcome, out)
    require_as_said(finding, "2.11.0", outcome, out)
    with pytest.raises(AssertionError, match=r"bad on torch 2\.9\.1"):
        require_as_said(finding, "2.9.1", outcome, out)
    with pytest.raises(AssertionError, match=r"good on torch 2\.13\.0"):
        require_as_said(finding, "2.13.0", "good", "")
    with pytest.raises(AssertionError, match="does not say what was expected"):
        require_as_said(finding, "2.13.0", "bad", "1, 2")
    for tells_nothing in ("error", "timed out"):
        with pytest.raises(AssertionError, match=tells_nothing):
            require_as_said(finding, "2.9.1", tells_nothing, "")


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("import sys; sys.exit(0)", "good"),
        ("import sys; sys.exit(1)", "bad"),
        ("import sys; sys.exit(2)", "not there"),
        ("import sys; sys.exit(3)", "error"),
        ("assert False", "error"),
        ("import os; os.kill(os.getpid(), 9)", "error"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])", "timed out"),
    ],
)
def test_what_came_of_a_script(script: str, outcome: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "one", script)
    assert run_script(folder / "script.py", folder, 2.0 if outcome == "timed out" else SECONDS)[0] == outcome


def test_a_release_that_nobody_has_measured_is_as_the_newest_before_it(tmp_path: Path) -> None:
    one = read_finding(written(tmp_path / "one", affects=["2.9.0", "2.10.0", "2.15.0"], unaffected=["2.9.1", "2.13.0"]))
    versions = (
        "2.8.0",
        "2.9.0",
        "2.9.1",
        "2.9.2",
        "2.10.1",
        "2.13.0",
        "2.13.1",
        "2.14.0",
        "2.16.0.dev20270101+cpu",
        "3.0",
    )
    assert {version: one.shows_in(version) for version in versions} == {
        "2.8.0": None, "2.9.0": True, "2.9.1": False, "2.9.2": False, "2.10.1": True, "2.13.0": False, "2.13.1": False,
        "2.14.0": None, "2.16.0.dev20270101+cpu": True, "3.0": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shows", "span"),
    [
        ("bbbbbbbbbb", "all"),
        ("gggbbbbbbb", "since 2.11.0"),
        ("bbbggggggg", "until 2.10.0"),
        ("gggbbggggg", "2.11.0 to 2.12.0"),
        ("bggggbgggb", "until 2.9.0, 2.12.1, since 2.15.0"),
        ("gg??bbbbbb", "since 2.12.0; not known: 2.10.0, 2.11.0"),
        ("bb??bbgg?g", "until 2.12.1"),
        ("?ggbbbbbgg", "2.11.0 to 2.14.0"),
        ("?bggggggb?", "until 2.9.1, since 2.14.1; not known: 2.9.0, 2.15.0"),
    ],
)
def test_versions_are_said_in_words(shows: str, span: str, tmp_path: Path) -> None:
    listed = {mark: [v for v, one in zip(VERSIONS, shows, strict=True) if one == mark] for mark in "bg"}
    assert read_finding(written(tmp_path / "one", affects=listed["b"], unaffected=listed["g"])).span == span


def test_a_script_sees_nothing_of_this_repository(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", "import sys\nsys.exit(any('tests' in path for path in sys.path))\n")
    assert run_script(folder / "script.py", tmp_path, SECONDS) == ("good", "")
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
