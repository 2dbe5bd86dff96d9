"""The tables of PyTorch's subjects and of what was found in them are as the code and the folders of findings say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import pytest

from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.findings import TorchFinding, read_findings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pytorch.md"
FOUND = ROOT / "reports" / "pytorch"
TABLES = ("subjects", "versions", "campaigns", "covered", "findings", "unshown")
MARKS = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in TABLES)


def test_the_tables_of_the_page_are_up_to_date(generate: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert generate.pytorch(text) == text, "python docs/generate.py writes them anew"


def test_a_row_says_what_exists_ran_and_was_found(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = dataclasses.replace(SUBJECTS["bucket_all_gather"], since="2.13")
    monkeypatch.setattr(generate, "SUBJECTS", {one.name: one})
    counts = {"campaigns": 2, "programs": 1400, "changed": 90, "refuted": 1, "inconclusive": 0, "cpu_s": 5400.0}
    seen = {
        "options": {"mode=default": 1400, "cap_mb=no longer drawn": 2},
        "features": {"bucketing": 1400, "any": 2},
        "branches": {"reached": 5, "all": 9},
        "found": {"draw": ["dtypes-mixed"], "search": []},
    }
    runs = [{"torch": version, "subject": one.name, **counts, **seen} for version in ("2.15.0", "2.11.0", "2.13.0")]
    (tmp_path / "campaigns.ndjson").write_text("\n".join(map(json.dumps, runs)) + "\n")
    folder = tmp_path / "dtypes-mixed"
    folder.mkdir()
    facts = {
        "title": "dtypes | mixed", "subject": "torch:bucket_all_gather", "kind": "wrong-value", "cause": "torch/a.py:b",
        "why": "So.", "contract": "Values stay.", "affects": ["2.13.0", "2.15.0"], "unaffected": ["2.11.0"],
        "reported": "https://github.com/pytorch/pytorch/issues/1", "reach": "opt-in",
        "unshown": "No strategy draws it.",
    }  # fmt: skip
    (folder / "finding.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in facts.items()))
    for name in ("script.py", "issue.md"):
        (folder / name).write_text("")
    page = generate.pytorch(MARKS, tmp_path)
    assert "\n| `torch:bucket_all_gather` | – | 1,400 programs, 1 found | 1,400 programs, 1 found |\n" in page
    assert "\n| 2.15.0 | 1.5 | 2 | 1,400 | 90 | 1 | 0 |\n" in page
    assert "\n| `torch:bucket_all_gather` | 1 of 6, 2, 5 of 9 | 1 of 6, 2, 5 of 9 | 1 of 6, 2, 5 of 9 |\n" in page
    assert "\n| all | 0 found | 1 found | 1 found |\n" in page
    assert (
        "| `dtypes-mixed`: dtypes \\| mixed | `wrong-value` | `a.py:b` | opt-in | drawing |"
        " since 2.13.0; not known: 2.12.0, 2.12.1 |"
        " [yes](https://github.com/pytorch/pytorch/issues/1) |"
    ) in page
    assert "| `dtypes-mixed` | No strategy draws it. |" in page
    assert generate.pytorch(page, tmp_path) == page


def test_a_page_without_marks_is_refused(generate: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no marks <!-- table: findings -->"):
        generate.pytorch(MARKS.replace("findings", "finds"), tmp_path)


@pytest.mark.parametrize("one", read_findings(FOUND), ids=lambda one: one.folder.name)
def test_the_issue_says_the_versions_of_the_facts(generate: ModuleType, one: TorchFinding) -> None:
    assert one.folder.joinpath("issue.md").read_text(encoding="utf-8") == generate.issue(one), (
        "python docs/generate.py writes it"
    )


def test_an_issue_without_a_line_of_versions_is_refused(generate: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "issue.md").write_text("**Cause**: this.\n\n**Versions**, old.\nEarlier ones have no such pass.\n")
    one = dataclasses.replace(read_findings(FOUND)[0], folder=tmp_path)
    assert generate.issue(one) == (
        f"**Cause**: this.\n\n**Versions**, of 2.9.0 to 2.15.0: {one.span}.\nEarlier ones have no such pass.\n"
    )
    (tmp_path / "issue.md").write_text("**Cause**: this.\n")
    with pytest.raises(ValueError, match="has 0 lines that begin with"):
        generate.issue(one)


@pytest.mark.parametrize("one", read_findings(FOUND), ids=lambda one: one.folder.name)
def test_the_gallery_says_of_a_finding_what_its_facts_say(one: TorchFinding) -> None:
    path = one.folder / "about.json"
    assert path.is_file() == (one.counterexample is not None)
    if path.is_file():
        assert json.loads(path.read_text(encoding="utf-8")) == one.about, "python docs/generate.py writes it anew"
