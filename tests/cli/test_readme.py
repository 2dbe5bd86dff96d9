"""README's example is what the command really prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_example_of_the_readme_is_real(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    source = (ROOT / "docs" / "sink_all_reduce.py").read_text()
    assert source[source.index("def sink_all_reduce") :].strip() in readme
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "sink_all_reduce.py").write_text(source)
    command = "run -x docs/sink_all_reduce.py:sink_all_reduce --world-size 2 --seed 1"
    assert f"tcverify {command}" in readme
    finished = subprocess.run(
        [sys.executable, "-m", "tcverify", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 1, finished.stderr
    shown = [line for line in _block(finished.stdout) if not line.startswith("found by")]  # names versions
    written = [line for line in _block(readme) if not line.startswith("found by")]
    assert shown == written


def _block(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("sink_all_reduce  case "))
    end = next(i for i, line in enumerate(lines) if i > start and line.startswith("Reproduce with:"))
    return lines[start : end + 1]
