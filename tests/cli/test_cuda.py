"""`--confirm cuda` on a machine with a CUDA device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import FOREIGN, run_apart

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BRIEF = ["--max-examples", "6", "--seed", "1", "--world-size", "2"]


@pytest.mark.parametrize("options", [
    ["multistream", "--strategy", "overlap"],
    ["sequence_parallel", "--domain", "native"],
    ["sequence_parallel", "--domain", "exact"],
])  # fmt: skip
def test_sound_passes_are_confirmed_on_the_device(options: list[str], tmp_path: Path) -> None:
    found = run_apart("-m", "tcverify", "run", *options, *BRIEF, "--confirm", "cuda", cwd=tmp_path)
    assert found.code == 0, found.out + found.err
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo (CUDA)"
    assert "lockstep, then cuda" in found.out
    assert f"6 on {backend}" in found.out
    assert "6 passed" in found.out


def test_a_defect_is_refuted_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FOREIGN)
    found = run_apart(
        "-m", "tcverify", "run", "mine.py:drops_reduction", "--strategy", "mixed", "--seed", "7", "--world-size", "2",
        "--max-examples", "60", "-x", "--confirm", "cuda", cwd=tmp_path,
    )  # fmt: skip
    assert found.code == 1, found.out + found.err
    assert re.search(r"found by equivalence in lockstep and (nccl|gloo \(CUDA\))", found.out), found.out


def test_doctor_says_what_the_device_is(tmp_path: Path) -> None:
    found = run_apart("-m", "tcverify", "doctor", cwd=tmp_path)
    assert found.code == 0, found.out + found.err
    assert f"{torch.cuda.get_device_name(0)}; NCCL for up to {torch.cuda.device_count()} ranks" in found.out + found.err
