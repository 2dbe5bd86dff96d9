"""`tcverify init`: what it writes works as it is, names what exists, and overwrites nothing in silence."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tcverify.cli import main, template
from tcverify.cli.running import STATE_DIR
from tcverify.report.sarif import SARIF_NAME
from tcverify.system.configuration import configuration
from tests.cli.conftest import ROOT, environment, run_apart, run_here, says
from tests.pytest_plugin import conftest as plugin

FILES = ["example_pass.py", "tests/test_passes.py", "tox.ini", ".github/workflows/tcverify.yml", "pyproject.toml"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> str:
    outcome = run_here("init", *arguments)
    assert outcome.code == 0, outcome.err
    return outcome.out


def require_parsed(words: list[str]) -> None:
    """Assert that a command takes these arguments."""
    main.COMMANDS[words[0]].make_context(words[0], words[1:], parent=main.main.make_context("tcverify", words))


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_what_it_writes_passes_its_own_tests(here: Path) -> None:
    out = init()
    assert [line for line in out.splitlines() if line.startswith("wrote ")] == [f"wrote {name}" for name in FILES]
    test = here / "tests" / "test_passes.py"
    few = test.read_text().replace("world_sizes=(2, 4)", "world_sizes=(2,), max_examples=12, programs='structured'")
    assert "max_examples=12" in few
    test.write_text(few)
    ran = plugin.run(
        here, "-q", "-p", "no:cacheprovider", "tests/test_passes.py", "--tcverify-profile", "ci", "--tcverify-seed", "3"
    )
    assert ran.code == 0, ran.out
    assert "4 passed" in ran.out  # the shards of the profile


def test_the_tests_that_it_writes_refute_a_wrong_pass(here: Path) -> None:
    init()
    source = (here / "example_pass.py").read_text()
    (here / "example_pass.py").write_text(source.replace("(x, y, gain, eps)", "(x, x, gain, eps)"))
    test = here / "tests" / "test_passes.py"
    test.write_text(
        test.read_text().replace("world_sizes=(2, 4)", "world_sizes=(2,), max_examples=30, programs='structured'")
    )
    arguments = ["-q", "-p", "no:cacheprovider", "tests/test_passes.py", "--tcverify-confirm", "none"]
    ran = plugin.run(here, *arguments, GITHUB_ACTIONS="true")
    assert ran.code == 1
    assert "wrong-value" in ran.out
    assert re.search(r"(?m)^::error file=example_pass.py,line=\d+,title=wrong-value in fuse_add_norm::", ran.out)


def test_the_command_that_it_names_runs(here: Path) -> None:
    (line,) = [line for line in init().splitlines() if line.startswith("  tcverify run")]
    command = line.replace("--max-examples 50", "--max-examples 6").replace(f" {template.EXAMPLE}", "").split()[1:]
    outcome = run_apart(
        "-m", "tcverify", *command, "--strategy", "structured", "--confirm", "none", "--seed", "1", cwd=here
    )
    assert outcome.code == 0, outcome.out + outcome.err
    assert "example_pass" not in outcome.err
    assert "fuse_add_norm on 2 ranks" in outcome.out  # all three from [tool.tcverify]
    assert "fuse_add_norm on 4 ranks" in outcome.out


def test_the_configuration_is_understood(here: Path) -> None:
    init()
    known = [parameter.name for parameter in main.COMMANDS["run"].params if parameter.name is not None]
    assert configuration(here / "pyproject.toml", known) == {
        "passes": ["example_pass:fuse_add_norm"], "world_size": "2,4", "max_examples": 200
    }  # fmt: skip


def test_the_workflow_is_one_and_names_what_exists(here: Path) -> None:
    init()
    workflow: dict[Any, Any] = yaml.safe_load((here / ".github" / "workflows" / "tcverify.yml").read_text())
    triggers = workflow[True]  # what YAML 1.1 makes of "on"
    assert set(triggers) == {"pull_request", "workflow_dispatch", "schedule"}
    steps = workflow["jobs"]["passes"]["steps"]
    uses = {step["uses"]: step.get("with", {}) for step in steps if "uses" in step}
    assert list(uses) == [
        "actions/checkout@v4",
        "actions/setup-python@v5",
        "actions/cache@v4",
        "github/codeql-action/upload-sarif@v4",
        "actions/upload-artifact@v4",
    ]
    assert uses["actions/cache@v4"]["path"] == str(STATE_DIR)
    assert uses["actions/cache@v4"]["restore-keys"].splitlines() == ["tcverify-${{ github.ref_name }}-", "tcverify-"]
    assert uses["github/codeql-action/upload-sarif@v4"]["sarif_file"] == f"reports/{SARIF_NAME}"
    assert workflow["permissions"]["security-events"] == "write"
    assert uses["actions/upload-artifact@v4"]["path"] == "reports/"
    commands = " \n".join(step["run"] for step in steps if "run" in step)
    verbs = re.findall(r"(?m)^tcverify (\w+)", commands)
    assert verbs
    assert set(verbs) <= set(main.COMMANDS)
    runs = re.findall(r"(?m)^tcverify run (.*)$", commands)
    assert len(runs) == 2
    for arguments in runs:
        require_parsed(["run", *arguments.replace("${{ github.run_number }}", "7").split()])
    assert "${{ github.run_number }}" in runs[1]
    assert "{%" not in commands


@pytest.mark.parametrize("name", ["action.yml", ".pre-commit-hooks.yaml"])
def test_what_other_repositories_use_of_this_one_runs(name: str) -> None:
    text = (ROOT / name).read_text()
    found: Any = yaml.safe_load(text)
    if name == "action.yml":
        (command,) = re.findall(r"tcverify (run .*)$", text, re.MULTILINE)
        words = (
            command.replace("$PASSES", "mine:Pass").replace("$OPTIONS", found["inputs"]["options"]["default"]).split()
        )
    else:
        (hook,) = found
        words = [*hook["entry"].split()[1:], *hook["args"]]
    require_parsed(words)


def test_tox_reads_its_configuration(here: Path) -> None:
    pytest.importorskip("tox", reason="tox is not installed: pip install tox")
    init()
    command = [sys.executable, "-m", "tox", "config", "-k", "commands", "deps", "--core"]
    ran = subprocess.run(command, cwd=here, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for factor, version in template.TORCH.items():
        section = ran.stdout.partition(f"[testenv:{factor}]")[2].partition("[testenv:")[0]
        assert f"torch=={version}" in section
        assert section.count("torch==") == 1
        assert re.search(r"pytest -n auto .*tests.test_passes\.py", section)


def test_a_second_run_refuses(here: Path) -> None:
    init()
    says(run_here("init"), 2, "all already exist here; nothing was written")
    (here / "tox.ini").write_text("[tox]\n")
    says(
        run_here("init"),
        2,
        "tox.ini: would be overwritten here; nothing was written",
        "--force overwrites it",
        "--keep",
    )
    assert (here / "tox.ini").read_text() == "[tox]\n"
    (here / "example_pass.py").unlink()
    out = init("--keep")
    assert "wrote example_pass.py" in out
    assert "skipped tox.ini" in out
    assert (here / "tox.ini").read_text() == "[tox]\n"
    assert "overwrote tox.ini" in init("--force")
    assert "torch213" in (here / "tox.ini").read_text()


def test_a_dry_run_writes_nothing(here: Path) -> None:
    out = init("--dry-run")
    assert out.splitlines() == [f"would write {name}" for name in FILES]
    assert files(here) == []
    (here / "tox.ini").write_text("[tox]\n")
    assert "exists with other contents: tox.ini" in init("--dry-run")
    assert files(here) == ["tox.ini"]


def test_passes_of_the_users(here: Path) -> None:
    (here / "mine.py").write_text("def my_pass(gm):\n    return gm\n")
    init(
        "--pass",
        "mine.py:my_pass",
        "--pass",
        "sequence_parallel",
        "--pass",
        "mycompiler.passes:MyPass",
        "--pass",
        "other:MyPass",
    )
    text = (here / "tests" / "test_passes.py").read_text()
    tests = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert [test.name for test in tests] == [
        "test_my_pass", "test_sequence_parallel", "test_my_pass_2", "test_my_pass_3"
    ]  # fmt: skip
    named = [
        ast.literal_eval(test.decorator_list[0].args[0])
        for test in tests
        if isinstance(test.decorator_list[0], ast.Call)
    ]
    assert named == ["mine.py:my_pass", "sequence_parallel", "mycompiler.passes:MyPass", "other:MyPass"]
    assert not (here / "example_pass.py").exists()


def test_a_pyproject_of_the_users_keeps_what_it_has(here: Path) -> None:
    (here / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"')
    assert "added [tool.tcverify] to pyproject.toml" in init()
    text = (here / "pyproject.toml").read_text()
    assert text.startswith('[project]\nname = "mine"\nversion = "1"\n\n[tool.tcverify]')
    assert configuration(here / "pyproject.toml")["max_examples"] == 200
    assert "package = editable" in (here / "tox.ini").read_text()
    assert "pip install --editable . tcverify" in (here / ".github" / "workflows" / "tcverify.yml").read_text()


def test_a_configuration_of_the_users_is_left_alone(here: Path) -> None:
    mine = "[tool.tcverify]\nseed = 3\n"
    (here / "pyproject.toml").write_text(mine)
    out = init()
    assert "pyproject.toml already has [tool.tcverify] and is not changed" in out
    assert "max-examples = 200" in out
    assert 'passes = ["example_pass:fuse_add_norm"]' in out
    assert (here / "pyproject.toml").read_text() == mine
    workflow = (here / ".github" / "workflows" / "tcverify.yml").read_text()
    assert "tcverify run example_pass:fuse_add_norm --seed 1 --report" in workflow
    assert "skip_install = true" in (here / "tox.ini").read_text()


def test_another_directory(here: Path) -> None:
    out = init("sub/dir")
    assert files(here / "sub" / "dir") == sorted(FILES)
    assert "  cd sub/dir" in out


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--pass", "nope"], ["there is no built-in pass 'nope'"]),
        (["--pass", "nope.py:x"], ["there is no file nope.py"]),
        (["--pass", 'a:b"); import os; ("'], ["is not a pass", "module:attribute"]),
        (["--force", "--keep"], ["--force and --keep exclude each other"]),
        (["file"], ["file is not a directory", "root of the repository"]),
        (["bad"], ["pyproject.toml cannot be read", "fix it first"]),
    ],
)
def test_what_makes_no_sense(here: Path, arguments: list[str], texts: list[str]) -> None:
    (here / "file").write_text("")
    (here / "bad").mkdir()
    (here / "bad" / "pyproject.toml").write_text("[tool")
    before = files(here)
    says(run_here("init", *arguments), 2, *texts)
    assert files(here) == before
