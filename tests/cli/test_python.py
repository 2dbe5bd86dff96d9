"""`tcverify.run`, and how results look where they are printed."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import fx

import tcverify
from tcverify.errors import UsageError
from tcverify.verification.verifier import Verdict
from tests.support.programs import reduce_then_norm


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def doubles(gm: fx.GraphModule) -> None:
    """Every all_reduce is doubled, and its double has no metadata."""
    for reduced in [node for node in gm.graph.nodes if "all_reduce" in str(node.target)]:
        with gm.graph.inserting_after(reduced):
            twice = gm.graph.call_function(torch.ops.aten.mul.Tensor, (reduced, 2.0))
        reduced.replace_all_uses_with(twice, delete_user_cb=lambda user, new=twice: user is not new)
    gm.recompile()


def test_a_sound_pass_passes_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    result = tcverify.run("sequence_parallel", world_size=2, seed=1, max_examples=15, confirm="none", search=False)
    assert (result.status, result.code, bool(result), result.counterexamples) == ("passed", 0, True, ())
    assert repr(result) == "<RunResult passed: 15 programs>"
    assert str(result) == "sequence_parallel on 2 ranks: passed"
    assert result._repr_html_() == "<pre>sequence_parallel on 2 ranks: passed</pre>"
    assert capsys.readouterr().out == ""


def test_a_wrong_pass_is_refuted_and_its_case_is_kept() -> None:
    out = StringIO()

    def local(gm: fx.GraphModule) -> None:
        doubles(gm)

    result = tcverify.run(
        local, mesh={"tp": 2}, strategy="structured", seed=1, max_examples=15, confirm="none",
        fail_fast=True, shrink_time=3.0, report_dir="found", console=Console(file=out, width=80),
    )  # fmt: skip
    assert (result.status, result.code, bool(result)) == ("refuted", 1, False)
    (case,) = result.counterexamples
    assert repr(result) == f"<RunResult refuted: wrong-value ({case.id})>"
    assert "◀ here" in str(result)
    assert result._repr_html_().startswith("<iframe srcdoc=")
    assert Path("found", case.id, "report.html").is_file()
    assert f"case {case.id}" in out.getvalue()


def test_strategies_are_tried_for_a_pass_without_a_name_as_in_a_notebook() -> None:
    def local(gm: fx.GraphModule) -> None:
        doubles(gm)

    out = StringIO()
    result = tcverify.run(
        local, world_size=2, seed=1, max_examples=10, confirm="none", fail_fast=True, search=False, shrink_time=1.0,
        console=Console(file=out, width=80),
    )  # fmt: skip
    assert result.status == "refuted"
    assert "(changed most by local)" in out.getvalue().replace("\n    ", " ")


def test_arguments_are_refused_as_on_the_command_line() -> None:
    with pytest.raises(UsageError, match="no built-in pass 'nonsense'"):
        tcverify.run("nonsense")
    with pytest.raises(UsageError, match="not a promise"):
        tcverify.run("identity", contract={"speed": True})


def test_a_verdict_is_short_as_repr_and_long_as_str() -> None:
    verdict = tcverify.verify(doubles, reduce_then_norm())
    assert repr(verdict) == "<Verdict refuted: wrong-value, output 0 is wrong on ranks 0, 1>"
    assert repr(verdict.findings) == "[<Finding wrong-value: output 0 is wrong on ranks 0, 1, rank 0>]"
    assert str(verdict.findings[0]).startswith("wrong-value: output 0 is wrong on ranks 0, 1\n  at [")
    text = str(verdict)
    assert text.startswith("doubles  case ")
    assert "first divergence: 'mul_tensor' is" in text
    assert text.endswith("hygiene, stale-metadata: meta['val'] of 'mul_tensor' is missing")
    assert "first divergence" in verdict._repr_html_().lower()


def test_verdicts_without_findings() -> None:
    verdict = tcverify.verify("identity", reduce_then_norm())
    assert (repr(verdict), str(verdict)) == (
        "<Verdict passed: the pass changed nothing>",
        "passed: the pass changed nothing",
    )
    assert verdict._repr_html_() == "<pre>passed: the pass changed nothing</pre>"

    def declines(gm: fx.GraphModule) -> None:
        raise tcverify.Unsupported("it has no all_gather")

    unsure: Verdict = tcverify.verify(declines, reduce_then_norm())
    assert repr(unsure) == "<Verdict inconclusive: declined, it has no all_gather>"
    assert str(unsure).splitlines()[-1] == "inconclusive, declined: it has no all_gather"
