"""Which subjects this torch has is what the table of subjects says, and each of them can be verified by its name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings

from tcverify.application import InProcess, load_pass
from tcverify.cli import arguments
from tcverify.errors import UsageError
from tcverify.program import Program
from tcverify.pytorch import PREFIX, SUBJECTS, TorchSubject, subjects
from tcverify.pytorch import subject as find_subject
from tcverify.strategies import programs_of
from tcverify.strategies.options import with_options
from tcverify.verification.verifier import verify
from tests.cli.conftest import run_apart
from tests.sizes import by_night

SUBJECT = TorchSubject("new", "no:matter", "", "torch.fx:GraphModule", since="2.11", until="2.13")


#: What older torch has as well, but does not tell how process groups reduce.
TOLD = ("ddp", "fully_shard", "tensor_parallel")


@pytest.mark.parametrize("name", SUBJECTS)
def test_this_torch_has_what_the_table_says(name: str) -> None:
    one = SUBJECTS[name]
    there = replace(one, since="2.0", until=None).here
    said = one.exists_in(torch.__version__)
    assert one.here == said, f"{PREFIX}{name}: mend its since and until ({one.versions})"
    assert there == said or name in TOLD, f"{PREFIX}{name}: mend its since and until ({one.versions})"


def test_versions_are_compared_as_numbers() -> None:
    versions = ("2.9.1", "2.11.0", "2.12.1", "2.13.0", "2.13.1+cpu", "2.15.0", "2.100.0", "3.0.0")
    assert [version for version in versions if SUBJECT.exists_in(version)] == [
        "2.11.0",
        "2.12.1",
        "2.13.0",
        "2.13.1+cpu",
    ]
    assert TorchSubject("new", "no:matter", "", "torch.fx:Graph", since="2.11").exists_in("3.0.0")


@pytest.mark.parametrize("name", SUBJECTS)
def test_it_can_be_verified(name: str) -> None:
    """A defect of PyTorch may show or not, but most programs are judged."""
    one = SUBJECTS[name]
    if not one.here:
        with pytest.raises(UsageError) as raised:
            arguments.parse_target(PREFIX + name)
        assert one.versions in (raised.value.hint or "")
        return
    found: Counter[str] = Counter()
    subject = InProcess(load_pass(arguments.parse_target(PREFIX + name)))

    @settings(max_examples=6, database=None, derandomize=True, deadline=None, phases=[Phase.generate])
    @given(with_options(programs_of(one.strategy, None, 2), find_subject(PREFIX + name).draws))
    def judge(program: Program) -> None:
        if found["passed"] + found["refuted"] < by_night(6, 2):
            found[verify(subject, program).status] += 1

    judge()
    assert found["passed"] + found["refuted"] > 0, found


def test_options_that_this_torch_lacks_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    here, gone = "torch.fx.graph:find_nodes", "torch.fx.graph:of_yesterday"
    one = replace(
        SUBJECT, source="torch.fx.graph_module:GraphModule", draws={"old": (0, 1), "here": (0, 1), "gone": (0, 1)},
        needs={"here": here, "gone": gone}, since="2.0", until=None,
    )  # fmt: skip
    monkeypatch.setattr(subjects, "SUBJECTS", {"new": one})
    assert [one.lacks(option) for option in ("old", "here", "gone")] == ["", "", gone]
    assert list(find_subject("torch:new").draws) == ["old", "here"]


@pytest.mark.parametrize("name", SUBJECTS)
def test_options_that_torch_has_to_have_are_drawn(name: str) -> None:
    assert set(SUBJECTS[name].needs) <= set(SUBJECTS[name].draws)


def test_the_command_line_verifies_one(tmp_path: Path) -> None:
    found = run_apart(
        "-m", "tcverify", "run", PREFIX + "bucket_all_gather", "--max-examples", "4", "--world-size", "2", "--seed", "1",
        "--confirm", "none", "--report-dir", "reports", "--shrink-time", "1", cwd=tmp_path,
    )  # fmt: skip
    assert found.code in (0, 1), found.out + found.err
    assert f"{PREFIX}bucket_all_gather on 2 ranks: " in found.out
