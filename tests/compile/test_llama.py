"""docs/llama_tp.py as users start it: two gloo processes, a compiled Llama, a sound pass and three planted defects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tcverify import verify
from tcverify.counterexample import read_counterexample

ROOT = Path(__file__).parents[2]

#: What finds each of the planted defects.
KINDS = {"residual_first": "wrong-value", "own_rows": "wrong-value", "no_waits": "missing-wait"}


def test_llama(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "docs/llama_tp.py", "--defect", "all", "--report-dir", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr[-3000:]  # the defects are refuted
    for rank in range(2):
        assert f"[rank {rank}] equal to eager" in done.stdout
        assert re.search(rf"\[rank {rank}\] sequence_parallel: passed; 1 graph, 1 changed, 1 passed", done.stdout)
        for name in KINDS:
            assert f"[rank {rank}] {name}: refuted; 1 graph, 1 changed, 1 refuted" in done.stdout
    assert re.findall(r"P3 (\d+)", done.stdout) == ["4", "4"]

    for name, kind in KINDS.items():
        texts = re.findall(rf"refuted\n({name} +case.*?)\n\[rank", done.stdout, re.DOTALL)
        assert len(texts) == 2
        assert texts[0] == texts[1]  # the same on every rank
        assert f"\n{kind}: " in texts[0]
        assert "repro.py" in texts[0]

    cases = [read_counterexample(path) for path in sorted(tmp_path.glob("*/counterexample.json"))]
    assert {case.facts.name: case.finding.kind for case in cases} == KINDS
    for case in cases:
        assert case.facts.target == f"docs/llama_passes.py:{case.facts.name}"
        assert case.program.size <= 6
        assert verify(str(ROOT / case.facts.target), case.program).status == "refuted"
