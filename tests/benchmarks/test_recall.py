"""A counterexample is recognised as a known defect by what it shows, and as no other."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tcverify.cases.counterexample import Counterexample, read_counterexample
from tests.support.scripts import load_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REPORTS = Path(__file__).parents[2] / "reports" / "pytorch"

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the counterexamples are of torch 2.13"
)


@pytest.fixture(scope="module")
def recall() -> ModuleType:
    return load_script(BENCHMARKS / "recall.py")


def case_of(name: str) -> Counterexample:
    return read_counterexample(REPORTS / name / "counterexample.json")


def known(recall: ModuleType, name: str) -> Any:
    return next(one for all_ in recall.defects_of(()).values() for one in all_ if one.finding.folder.name == name)


def test_an_exception_is_recognised_by_the_statement_that_raises_it(recall: ModuleType) -> None:
    case = case_of("collective-waited-twice")
    other = replace(case.finding, title=case.finding.title.replace("all_gather_into_tensor", "all_reduce"))
    assert known(recall, "collective-waited-twice").shown_by(replace(case, finding=other))
    assert recall.raising_statement(case)[:2] == ("bucketing.py", "process_collective_bucket")
    detail = case.finding.detail.replace("in process_collective_bucket", "in merge_all_reduce_bucket")
    elsewhere = replace(case, finding=replace(other, detail=detail), program=case_of("dtensor-fill-partial").program)
    assert not known(recall, "collective-waited-twice").shown_by(elsewhere)


def test_a_helper_that_raises_for_many_reasons_recognises_nothing(recall: ModuleType) -> None:
    assert recall.raising_statement(case_of("dtensor-argmax-not-traceable")) is not None
    assert known(recall, "dtensor-argmax-not-traceable").raised_by is None
    assert recall.raising_statement(case_of("dtensor-fill-partial")) is None


def test_a_wrong_value_of_dtensor_is_recognised_by_the_ops(recall: ModuleType) -> None:
    case = case_of("dtensor-any-sums-booleans")
    elsewhere = replace(case, program=case_of("dtensor-fill-partial").program)
    assert known(recall, "dtensor-any-sums-booleans").shown_by(case)
    assert not known(recall, "dtensor-any-sums-booleans").shown_by(elsewhere)
    assert recall.ops_of(case.program) == {"aten::any", "aten::_to_copy"}


def test_a_fingerprint_alone_recognises_no_wrong_value(recall: ModuleType) -> None:
    """What the rewritten graph does at the first divergence is the same for many causes."""
    case = case_of("wait-alias-unknown")
    other = replace(case, program=case_of("decomp-comms-global-values").program)
    assert known(recall, "wait-alias-unknown").shown_by(case)
    assert not known(recall, "wait-alias-unknown").shown_by(other)


def test_a_subject_that_runs_a_pass_shows_the_defects_of_it(
    recall: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "recall", recall)
    campaigns = load_script(BENCHMARKS / "pytorch.py")
    case, name = case_of("snapshot-of-input-removed"), "snapshot-of-input-removed"
    assert name in campaigns.names_of(case, campaigns.subject("post_grad_passes"))
    assert name not in campaigns.names_of(case, campaigns.subject("decomp_comms"))
