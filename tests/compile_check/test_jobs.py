"""`checked` in jobs of two processes that meet over gloo."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]


def run(directory: Path, *names: str) -> list[dict[str, Any]]:
    """What every rank says of the jobs."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache"),
    }
    code, out, err = warm.run("-m", "tests.compile_check.jobs", *names, cwd=directory, env=environment, seconds=570)
    assert code == 0, err[-3000:]
    found: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return found


def test_jobs(tmp_path: Path) -> None:
    """One start of two processes for all that is quick."""
    ranks = run(tmp_path, "inductor", "cached", "different", "one_raises", "fewer", "storeless")

    for rank in ranks:
        sound, wrong = rank["inductor"]["sound"], rank["inductor"]["wrong"]
        assert (sound["status"], sound["changed"]) == ("passed", 1)
        assert "EndOfTest" in sound["raised"]
        assert "WrongValue" in wrong["raised"]
        assert wrong["raised"] == ranks[0]["inductor"]["wrong"]["raised"]
        assert (tmp_path / wrong["cases"][0]).exists()

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
    assert "rank 1 did not respond within 2 s" in ranks[0]["fewer"]["last"]["details"]["missing-ranks"]

    for rank in ranks:
        assert "the store is gone" in rank["storeless"]["details"]["no-store"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs a C++ compiler (g++), with which Inductor makes code for CPUs"
)
def test_inductor_makes_code_of_what_was_checked(tmp_path: Path) -> None:
    for rank in run(tmp_path, "generated"):
        found = rank["generated"]
        assert (found["status"], found["calls"], found["changed"], found["equal"]) == ("passed", 2, 2, True)
