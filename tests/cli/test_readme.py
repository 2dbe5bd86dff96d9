"""README's examples are what the command really prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import run_apart

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sink_all_reduce", "--seed 3"),
        ("own_stream", "--strategy structured --seed 7"),
        ("late_wait", "--strategy functional --seed 1"),
        ("gather_in_rank_order", "--strategy resharding --seed 1"),
    ],
)
def test_the_examples_of_the_readme_are_real(name: str, options: str, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    source = (ROOT / "docs" / f"{name}.py").read_text()
    assert source[source.index(f"def {name}") :].strip() in readme
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / f"{name}.py").write_text(source)
    command = f"run -x docs/{name}.py:{name} --world-size 2 {options}"
    assert f"tcverify {command}" in readme
    finished = run_apart("-m", "tcverify", *command.split(), cwd=tmp_path)
    assert finished.code == 1, finished.err
    shown = [line for line in _block(finished.out, name) if not line.startswith("found by")]  # names versions
    written = [line for line in _block(readme, name) if not line.startswith("found by")]
    assert shown == written


def _block(text: str, name: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{name}  case "))
    end = next(i for i, line in enumerate(lines) if i > start and line.startswith("Reproduce with:"))
    return lines[start : end + 1]
