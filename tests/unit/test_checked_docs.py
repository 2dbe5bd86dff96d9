"""The code of docs/checked.md runs, in a process of its own, in the order in which it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "checked.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    script = tmp_path / "page.py"
    script.write_text("\n".join([*blocks, 'print("the end", backend.report())']))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the end forget_sum: refuted; 1 graph, 1 changed, 1 refuted" in done.stdout
