"""Which subjects this torch has is what the table of subjects says, and each of them can be verified by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tcverify.extra.pytorch import PREFIX, SUBJECTS, TorchSubject
from tcverify.extra.pytorch.findings import VERSIONS
from tests.cli.conftest import run_apart

SUBJECT = TorchSubject("new", "no:matter", "", "torch.fx:GraphModule", since="2.11", until="2.13")


@pytest.mark.parametrize("name", SUBJECTS)
def test_this_torch_has_what_the_table_says(name: str) -> None:
    one = SUBJECTS[name]
    assert one.here == one.exists_in(torch.__version__), f"{PREFIX}{name}: mend its since and until ({one.versions})"


def test_versions_are_compared_as_numbers() -> None:
    found = {version: SUBJECT.exists_in(version) for version in (*VERSIONS, "2.13.1+cpu", "2.100.0", "3.0.0")}
    assert found == {
        "2.9.1": False, "2.11.0": True, "2.13.0": True, "2.13.1+cpu": True, "2.15.0": False, "2.100.0": False, "3.0.0": False
    }  # fmt: skip
    assert TorchSubject("new", "no:matter", "", "torch.fx:Graph", since="2.11").exists_in("3.0.0")


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_command_line_verifies_it(name: str, tmp_path: Path) -> None:
    """A defect of PyTorch may show or not; what is not in this torch is said to be in others."""
    found = run_apart(
        "-m", "tcverify", "run", PREFIX + name, "--max-examples", "4", "--world-size", "2", "--seed", "1",
        "--confirm", "none", "--report-dir", "reports", "--shrink-time", "1", cwd=tmp_path,
    )  # fmt: skip
    if SUBJECTS[name].here:
        assert found.code in (0, 1), found.out + found.err
        assert f"{PREFIX}{name} on 2 ranks: " in found.out
        assert "(0 passed, 0 refuted," not in found.out, f"nothing could be judged: {found.out}"
    else:
        assert found.code == 2, found.out + found.err
        assert SUBJECTS[name].versions in " ".join(found.err.split())
