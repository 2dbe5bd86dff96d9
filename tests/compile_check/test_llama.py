"""docs/llama_tp.py as users start it: two gloo processes, a compiled Llama, a sound pass and three planted defects."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tcverify import verify
from tcverify.cases.counterexample import read_counterexample
from tests import warm

ROOT = Path(__file__).parents[2]

#: What finds each of the planted defects.
KINDS = {"residual_first": "wrong-value", "own_rows": "wrong-value", "no_waits": "missing-wait"}


@pytest.mark.parametrize("defect", ["residual_first", pytest.param("all", marks=pytest.mark.slow)])
def test_llama(defect: str, tmp_path: Path) -> None:
    kinds = {name: kind for name, kind in KINDS.items() if defect in (name, "all")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = ("docs/llama_tp.py", "--defect", defect, "--report-dir", str(tmp_path))
    code, out, err = warm.run(*command, cwd=ROOT, env=environment)

    assert code == 1, err[-3000:]  # the defects are refuted
    for rank in range(2):
        for name in kinds:
            assert f"[rank {rank}] {name}: refuted; 1 graph, 1 changed, 1 refuted" in out
        if defect == "all":
            assert f"[rank {rank}] equal to eager" in out
            assert re.search(rf"\[rank {rank}\] sequence_parallel: passed; 1 graph, 1 changed, 1 passed", out)
            assert re.findall(r"P3 (\d+)", out) == ["4", "4"]

    for name, kind in kinds.items():
        texts = re.findall(rf"refuted\n({name} +case.*?)\n\[rank", out, re.DOTALL)
        assert len(texts) == 2
        assert texts[0] == texts[1]  # the same on every rank
        assert f"\n{kind}: " in texts[0]
        assert "repro.py" in texts[0]

    cases = [read_counterexample(path) for path in sorted(tmp_path.glob("*/counterexample.json"))]
    assert {case.facts.name: case.finding.kind for case in cases} == kinds
    for case in cases:
        assert case.facts.target == f"docs/llama_passes.py:{case.facts.name}"
        assert case.program.size <= 6
        assert verify(str(ROOT / case.facts.target), case.program).status == "refuted"
