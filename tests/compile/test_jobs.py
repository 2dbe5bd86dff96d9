"""`checked` in jobs of two processes that meet over gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(directory: Path, *names: str) -> list[dict[str, Any]]:
    """What every rank says of the jobs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.jobs", *names],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_jobs(tmp_path: Path) -> None:
    """One start of two processes for all that is quick."""
    ranks = run(tmp_path, "cached", "different", "one_raises", "fewer", "storeless")

    for rank in ranks:
        assert (rank["cached"]["status"], rank["cached"]["changed"], rank["cached"]["cached"]) == ("passed", 3, 2)

    assert ranks[0]["different"] == ranks[1]["different"]
    assert ranks[0]["different"]["kind"] in ("deadlock", "collective-mismatch")

    assert ranks[1]["one_raises"] == {"error": "LookupError", "text": "no such pattern"}
    assert ranks[0]["one_raises"]["error"] == "PassRaised"
    assert "LookupError: no such pattern on rank 1" in ranks[0]["one_raises"]["text"]

    for rank in ranks:
        assert rank["fewer"]["first"]["status"] == "passed"
    assert ranks[1]["fewer"]["last"]["status"] == "passed"
    assert ranks[0]["fewer"]["last"]["doubts"] == {"missing-ranks": 1}
    assert "rank 1 did not show up within 2 s" in ranks[0]["fewer"]["last"]["details"]["missing-ranks"]

    for rank in ranks:
        assert "the store is gone" in rank["storeless"]["details"]["no-store"]


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs a C++ compiler (g++), with which Inductor makes code for CPUs"
)
def test_inductor(tmp_path: Path) -> None:
    ranks = run(tmp_path, "inductor")

    for rank in ranks:
        found = rank["inductor"]
        assert (found["status"], found["calls"], found["changed"], found["equal"]) == ("passed", 2, 2, True)
        assert "wrong-value" in found["raised"]
    assert ranks[0]["inductor"]["raised"] == ranks[1]["inductor"]["raised"]
    assert list((tmp_path / "reports").glob("*/counterexample.json"))
