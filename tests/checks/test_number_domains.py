"""Number domains on their way through verification: what runs where, what is said, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan
from tcverify.cases.counterexample import decode_counterexample, encode_counterexample, make_counterexample
from tcverify.checks import Evidence
from tcverify.domains import DRAWS, NATIVE, Domain, Exact
from tcverify.errors import ProgramError, UnsupportedOp, UsageError
from tcverify.execution import Comparison, Executor, Lockstep, ProcessGroupPool
from tcverify.program import Contract, GraphBuilder, InputSpec, Note, Program, spmd_program
from tcverify.replay import replay_case
from tcverify.strategies import transformer_programs
from tcverify.verification.confirmation import confirming_domain
from tests.support import domain_passes
from tests.support.domain_passes import (
    adds_one,
    adds_zero_over_zero,
    copies,
    copies_to_bfloat16,
    last_digit_of_eps,
    raises,
    reduces_in_bfloat16,
    reduces_on_rank_0_alone,
    touched,
)
from tests.support.programs import TP2, X, reduce_then_norm


class Watched:
    """Lockstep under another name, which notes in which domain it is asked to compare."""

    name = "watched"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def start_comparison(self, original: Program, rewritten: Program, domain: Domain) -> Callable[[], Comparison]:
        self.asked.append(domain.name)
        return Lockstep().start_comparison(original, rewritten, domain)


@pytest.mark.parametrize("domain", ["float64", "native", "exact"])
def test_what_is_sound_passes_in_every_domain(domain: str, pool: Callable[[int], ProcessGroupPool]) -> None:
    verdict = verify(touched, reduce_then_norm(), domain=domain, confirm=pool(2))
    assert (verdict.status, verdict.notes, verdict.domain) == ("passed", [], domain)
    ran = {"float64": ["float64"], "native": ["float64", "native"], "exact": ["float64", "exact:0", "exact:1"]}[domain]
    assert [run.domain for run in verdict.runs] == [*ran, {"exact": "exact:0"}.get(domain, domain)]
    assert verdict.executors == ["lockstep", "gloo"]
    assert DRAWS == 2


@pytest.mark.parametrize(("domain", "status"), [("float64", "passed"), ("native", "passed"), ("exact", "refuted")])
def test_the_last_digit_of_eps_shows_in_the_exact_domain_alone(domain: str, status: str) -> None:
    verdict = verify(last_digit_of_eps, reduce_then_norm(), domain=domain)
    assert verdict.status == status
    for finding in verdict.findings:
        assert (finding.kind, finding.data["domain"]) == ("wrong-value", "exact")


@pytest.mark.parametrize(("domain", "status"), [("float64", "passed"), ("exact", "passed"), ("native", "refuted")])
def test_a_sum_in_bfloat16_shows_in_the_native_domain_alone(domain: str, status: str) -> None:
    verdict = verify(reduces_in_bfloat16, reduce_then_norm(), domain=domain)
    assert verdict.status == status
    for finding in verdict.findings:
        assert (finding.kind, finding.data["domain"]) == ("wrong-value", "native")


@pytest.mark.parametrize(
    ("pass_", "domain"), [(last_digit_of_eps, "exact"), (copies_to_bfloat16, "native")], ids=["exact", "native"]
)
def test_the_process_group_confirms_in_the_domain(
    pass_: Callable[[fx.GraphModule], None], domain: str, pool: Callable[[int], ProcessGroupPool]
) -> None:
    verdict = verify(pass_, reduce_then_norm(), domain=domain, confirm=pool(2), always_confirm=True)
    assert [finding.kind for finding in verdict.findings] == ["wrong-value"]
    assert verdict.runs[-1].executor == "gloo"
    assert verdict.runs[-1].domain.partition(":")[0] == domain


def test_what_the_exact_domain_cannot_judge_is_confirmed_in_float64() -> None:
    pair = verify(touched, reduce_then_norm(), domain="exact")
    evidence = Evidence(pair.pair, Contract(), taken={"lockstep": pair.runs})
    assert isinstance(confirming_domain(evidence, [], []), Exact)
    assert confirming_domain(evidence, [], [Note("exact-aside", "why")]).name == "float64"
    native = verify(touched, reduce_then_norm(), domain="native")
    assert confirming_domain(Evidence(native.pair, Contract(), taken={"lockstep": native.runs}), [], []) is NATIVE


@pytest.mark.parametrize("domain", ["native", "exact"])
def test_what_float64_refutes_is_confirmed_in_float64(domain: str, pool: Callable[[int], ProcessGroupPool]) -> None:
    verdict = verify(adds_zero_over_zero, reduce_then_norm(), domain=domain, confirm=pool(2), always_confirm=True)
    assert [finding.kind for finding in verdict.findings] == ["wrong-value"]
    assert [run.domain for run in verdict.runs if run.executor == "gloo"] == ["float64"]


@pytest.mark.parametrize("domain", ["float64", "exact"])
def test_precision_that_a_pass_gives_up_is_noted_where_it_does_not_show(domain: str) -> None:
    verdict = verify(reduces_in_bfloat16, reduce_then_norm(), domain=domain)
    assert (verdict.status, [note.reason for note in verdict.notes]) == ("passed", ["coarser-dtype"])
    assert "rounds to bfloat16, coarser than any dtype of the original (float32)" in verdict.notes[0].detail


def test_precision_that_a_pass_gives_up_is_judged_in_the_native_domain() -> None:
    verdict = verify(reduces_in_bfloat16, reduce_then_norm(), domain="native")
    assert ([finding.kind for finding in verdict.findings], verdict.notes) == (["wrong-value"], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_noted_where_a_pass_keeps_to_the_dtypes_of_the_program(dtype: torch.dtype) -> None:
    verdict = verify(copies, reduce_then_norm(dtype=dtype))
    assert (verdict.status, verdict.changed, verdict.notes) == ("passed", True, [])


@pytest.mark.parametrize("pass_", [reduces_on_rank_0_alone, raises])
def test_what_does_not_come_to_values_is_refuted_without_a_word_about_them(
    pass_: Callable[[fx.GraphModule], None],
) -> None:
    verdict = verify(pass_, reduce_then_norm(), domain="exact")
    assert (verdict.status, verdict.domain, verdict.notes) == ("refuted", "exact", [])


@pytest.mark.parametrize("domain", ["native", "exact"])
def test_where_no_check_looks_at_values_the_verdict_says_so(domain: str) -> None:
    verdict = verify(touched, reduce_then_norm(), domain=domain, checks=["structure"])
    (note,) = verdict.notes
    assert note.reason == f"{domain}-aside"
    assert "'equivalence'" in note.detail


@pytest.mark.parametrize("domain", ["float64", "native", "exact"])
def test_the_confirming_executor_is_told_the_domain(domain: str) -> None:
    watched: Executor = Watched()  # type: ignore[assignment]
    assert verify(touched, reduce_then_norm(), domain=domain, confirm=watched).status == "passed"
    assert watched.asked == [{"exact": "exact:0"}.get(domain, domain)]  # type: ignore[attr-defined]


def norm_of_order_three() -> Program:
    def build(b: GraphBuilder) -> object:
        x = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        return b.call("aten::linalg_vector_norm", x, 3.0)

    return spmd_program(TP2, [X], build)


def test_an_op_without_exact_meaning_leaves_the_verdict_to_float64() -> None:
    with pytest.raises(UnsupportedOp, match="norm of order"):
        Lockstep().run(norm_of_order_three(), domain=Exact(0))
    verdict = verify(touched, norm_of_order_three(), domain="exact")
    assert verdict.status == "passed"
    (note,) = verdict.notes
    assert note.reason == "exact-aside"
    assert "norm of order" in note.detail


def test_what_does_not_run_in_its_own_dtypes_is_inconclusive() -> None:
    def build(b: GraphBuilder) -> object:
        x = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        return b.call("aten::_cdist_forward", x, x, 2.0, None)

    program = spmd_program(TP2, [InputSpec("x", (4, 8), torch.float16)], build)
    verdict = verify(touched, program, domain="native")
    assert verdict.status == "inconclusive"
    assert "own dtypes" in verdict.doubts[0].detail


def test_an_unknown_domain_is_refused() -> None:
    with pytest.raises(UsageError, match="no number domain 'real'"):
        verify(touched, reduce_then_norm(), domain="real")


def test_a_campaign_finds_and_keeps_what_its_domain_shows(tmp_path: Path) -> None:
    subject = InProcess(prepare_pass(last_digit_of_eps, "", {}))
    plan = CampaignPlan(
        transformer_programs(world_size=2), "2 ranks", tmp_path / "reports", tmp_path / "state",
        max_examples=30, seed=1, domain="exact", fail_fast=True,
    )  # fmt: skip
    (case,) = Campaign(subject, plan, None).run().counterexamples
    assert (case.domain, case.finding.kind, case.program.size) == ("exact", "wrong-value", 1)
    passed = Campaign(subject, replace(plan, domain="float64"), None).run()
    assert passed.verdict == "passed"
    assert (
        len(list(tmp_path.glob("state/failures/*/*/counterexample.json"))) == 1
    )  # what only exact sees is not forgotten


@pytest.mark.parametrize("pass_", [last_digit_of_eps, adds_one])
def test_the_values_of_a_case_are_those_that_its_finding_tells_of(pass_: Callable[[fx.GraphModule], None]) -> None:
    verdict = verify(pass_, reduce_then_norm(), domain="exact")
    case = make_counterexample(verdict, "wrong-value", InProcess(prepare_pass(pass_, "", {})).facts, Contract())
    first = case.values[0]
    assert f"it is {first.actual:.9g} instead of {first.expected:.9g} (" in case.finding.detail


def test_a_case_is_not_called_fixed_where_its_domain_steps_aside() -> None:
    verdict = verify(last_digit_of_eps, reduce_then_norm(), domain="exact")
    facts = replace(InProcess(prepare_pass(touched, "", {})).facts, target=f"{domain_passes.__name__}:touched")
    case = make_counterexample(verdict, "wrong-value", facts, Contract())
    again = replay_case(replace(case, program=norm_of_order_three()), None)
    assert again.state == "error"
    assert again.message.startswith("the exact domain, in which it was found, is not applicable now: ")
    assert replay_case(case, None).state == "fixed"


def test_files_keep_domain_and_notes() -> None:
    verdict = verify(last_digit_of_eps, reduce_then_norm(), domain="exact")
    verdict.notes.append(Note("exact-aside", "a reason"))
    case = make_counterexample(verdict, "wrong-value", InProcess(prepare_pass(touched, "", {})).facts, Contract())
    data = json.loads(json.dumps(encode_counterexample(case)))
    again = decode_counterexample(data, "here")
    assert (again.domain, again.notes) == ("exact", (("exact-aside", "a reason"),))
    del data["domain"], data["notes"]
    assert decode_counterexample(data, "a file of before").domain == "float64"
    with pytest.raises(ProgramError, match="not a number domain"):
        decode_counterexample({**data, "domain": "real"}, "here")


@pytest.mark.parametrize(
    ("pass_", "domain"), [(last_digit_of_eps, "exact"), (reduces_in_bfloat16, "native")], ids=["exact", "native"]
)
def test_the_values_of_a_case_are_those_that_its_finding_tells(
    pass_: Callable[[fx.GraphModule], None], domain: str
) -> None:
    verdict = verify(pass_, reduce_then_norm(), domain=domain)
    case = make_counterexample(verdict, "wrong-value", InProcess(prepare_pass(touched, "", {})).facts, Contract())
    first = case.values[0]
    assert f"{list(first.index)}" in case.finding.detail
    assert f"{first.actual:.9g}" in case.finding.detail
    assert f"{first.expected:.9g}" in case.finding.detail
