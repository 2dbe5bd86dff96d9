"""The code of docs/checked.md runs, in a process of its own, in the order in which it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "checked.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    script = tmp_path / "page.py"
    script.write_text("\n".join([*blocks, 'print("the end", backend.report())']))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    code, said, errors = warm.run(str(script), cwd=tmp_path, env=environment)
    assert code == 0, errors[-3000:]
    assert "the end forget_sum: refuted; 1 graph, 1 changed, 1 refuted" in said
