"""Hygiene findings: counted, kept as one case per kind, and in the way of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import CampaignFinished
from tcverify.campaign.campaign_verdict import judge_campaign, tolerated
from tcverify.campaign.events import Statistics
from tcverify.cases.counterexample import FILE_NAME, read_counterexample
from tcverify.program import Contract
from tcverify.verification.verifier import verify
from tests.campaign.test_campaign import go, reductions


def forgets_metadata(gm: fx.GraphModule) -> fx.GraphModule:
    """Every all_reduce is multiplied by 1, which has no metadata."""
    for reduced in reductions(gm):
        with gm.graph.inserting_after(reduced):
            once = gm.graph.call_function(torch.ops.aten.mul.Tensor, (reduced, 1.0))
        reduced.replace_all_uses_with(once, delete_user_cb=lambda user, new=once: user is not new)
    gm.recompile()
    return gm


def doubles_and_forgets(gm: fx.GraphModule) -> fx.GraphModule:
    """As `forgets_metadata`, and what is multiplied by 1 is multiplied by 2."""
    forgets_metadata(gm)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        if node.args[1] == 1.0 and "val" not in node.meta:
            node.args = (node.args[0], 2.0)
    gm.recompile()
    return gm


def campaign(place: Path, pass_: Any, **plan: Any) -> CampaignFinished:
    return go(place, pass_, **plan)


def test_a_pass_that_forgets_metadata_passes_and_one_small_case_is_kept(tmp_path: Path) -> None:
    finished = campaign(tmp_path, forgets_metadata)
    assert (finished.verdict, finished.counterexamples) == ("passed", ())
    assert finished.statistics.hygiene["stale-metadata"] == finished.statistics.changed > 1
    (case,) = finished.hygiene
    assert (case.finding.kind, case.finding.severity) == ("stale-metadata", "hygiene")
    assert case.program.size <= 2
    assert {line.caller for line in case.made_by} == {""}
    kept = read_counterexample(tmp_path / "reports" / case.id / FILE_NAME)
    assert (kept.finding, kept.contract.strict) == (case.finding, True)
    again = verify(InProcess(prepare_pass(forgets_metadata, "", {})), kept.program, contract=kept.contract)
    assert [finding.kind for finding in again.findings] == ["stale-metadata"]


def forgets_two_ways(gm: fx.GraphModule) -> fx.GraphModule:
    """Every all_reduce is multiplied by 1, and what follows a norm is, from another line."""
    norms = [
        node for node in gm.graph.nodes if "rms_norm" in str(node.target) and isinstance(node.meta["val"], torch.Tensor)
    ]
    forgets_metadata(gm)
    for norm in norms:
        with gm.graph.inserting_after(norm):
            once = gm.graph.call_function(torch.ops.aten.add.Tensor, (norm, 0.0))
        norm.replace_all_uses_with(once, delete_user_cb=lambda user, new=once: user is not new)
    gm.recompile()
    return gm


def multiply(node: fx.Node, by: float) -> None:
    with node.graph.inserting_after(node):
        new = node.graph.call_function(torch.ops.aten.mul.Tensor, (node, by))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def multiplies_sums(gm: fx.GraphModule) -> fx.GraphModule:
    for node in list(gm.graph.nodes):
        if "all_reduce" in str(node.target):
            multiply(node, 1.0)  # sums
    gm.recompile()
    return gm


def multiplies_norms(gm: fx.GraphModule) -> fx.GraphModule:
    for node in list(gm.graph.nodes):
        if "rms_norm" in str(node.target) and isinstance(node.meta["val"], torch.Tensor):
            multiply(node, 1.0)  # norms
    gm.recompile()
    return gm


@pytest.mark.parametrize(("pass_", "words"), [(multiplies_sums, "sums"), (multiplies_norms, "norms")])
def test_the_caller_of_a_helper_that_several_lines_call_is_named(tmp_path: Path, pass_: Any, words: str) -> None:
    (case,) = campaign(tmp_path, pass_, max_examples=40).hygiene
    made = case.made_by[0]
    source = Path(__file__).read_text().splitlines()
    number = next(number for number, text in enumerate(source, 1) if text.endswith(f"# {words}"))
    assert made.function == "multiply"
    assert made.caller == f"{made.file}:{number} in {pass_.__name__}"
    assert str(made).endswith(f", called at {made.caller}")
    kept = read_counterexample(tmp_path / "reports" / case.id / FILE_NAME)
    assert kept.made_by == case.made_by


def test_each_cause_has_a_case_and_one_line_of_the_pass_is_one_cause(tmp_path: Path) -> None:
    finished = campaign(tmp_path, forgets_two_ways, max_examples=40)
    assert finished.verdict == "passed"
    lines = [case.made_by[0].line for case in finished.hygiene]
    assert len(lines) == len(set(lines)) == 2
    assert {case.finding.kind for case in finished.hygiene} == {"stale-metadata"}
    assert len(list((tmp_path / "reports").iterdir())) == 2


def test_a_kind_of_many_causes_takes_its_time_and_no_more(tmp_path: Path) -> None:
    finished = campaign(tmp_path, forgets_two_ways, max_examples=40, shrink_time=0.0)
    assert len(finished.hygiene) == 1


def test_an_error_comes_first_and_hygiene_does_not_stop_a_run(tmp_path: Path) -> None:
    finished = campaign(tmp_path, doubles_and_forgets, fail_fast=True)
    assert (finished.verdict, finished.stop) == ("refuted", "first finding")
    assert [case.finding.kind for case in finished.counterexamples] == ["wrong-value"]
    assert finished.hygiene == ()
    sound = campaign(tmp_path / "sound", forgets_metadata, fail_fast=True)
    assert (sound.verdict, sound.stop) == ("passed", "examples")


@pytest.mark.parametrize("promise", ["metadata", "strict"])
def test_it_refutes_a_pass_that_promises_otherwise(tmp_path: Path, promise: str) -> None:
    finished = campaign(tmp_path, forgets_metadata, contract=Contract(**{promise: True}))  # type: ignore[arg-type]
    assert finished.verdict == "refuted"
    assert [case.finding.severity for case in finished.counterexamples] == ["error"]
    assert not finished.statistics.hygiene


def test_many_inconclusive_programs_are_no_pass() -> None:
    counts = Statistics(programs=10, passed=7, changed=7, inconclusive=3)
    counts.doubts.update({"unsupported-op": 2, "overflow": 1})
    verdict, why = judge_campaign(counts, 0, Contract())
    assert verdict == "inconclusive"
    assert why.startswith("30 % of the programs are inconclusive, 2 of them by unsupported-op; declare the op:")
    few = Statistics(programs=10, passed=8, changed=7, inconclusive=2)
    few.doubts.update({"unsupported-op": 2})
    assert judge_campaign(few, 0, Contract()) == ("passed", "")


@pytest.mark.parametrize("reason", ["ill-typed-program", "declined"])
def test_programs_that_do_not_run_or_are_declined_say_nothing_about_the_pass(reason: str) -> None:
    counts = Statistics(programs=10, passed=6, changed=6, inconclusive=4)
    counts.doubts.update({reason: 4})
    assert judge_campaign(counts, 0, Contract()) == ("passed", "")


def test_what_fails_a_run() -> None:
    assert tolerated(()) == tolerated(["inconclusive"]) == {"passed"}
    assert tolerated(["refuted"]) == {"passed", "inconclusive", "nothing tested"}
    assert tolerated(["refuted", "vacuity"]) == {"passed", "inconclusive"}
