"""Evidence: each kind is taken when a check first asks for it, once; what cannot be taken is a doubt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from tcverify import Evidence, Finding, register_check, register_evidence, verify
from tcverify.application import InProcess, Pair
from tcverify.application.loading import prepare_pass
from tcverify.checks import CHECKS, EvidenceRequest
from tcverify.errors import ExecutorError, UsageError
from tcverify.execution import Lockstep
from tcverify.program import Contract, Doubt
from tcverify.registry.evidence import EVIDENCE
from tests.support.programs import reduce_then_norm


def nothing(gm: fx.GraphModule) -> None:
    pass


def pointless(gm: fx.GraphModule) -> None:
    """Changes a name, and so the program, but no value."""
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    first._rename("renamed")


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    kinds, checks = list(EVIDENCE), list(CHECKS)
    yield
    for registry, known in ((EVIDENCE, kinds), (CHECKS, checks)):
        for name in [name for name in registry if name not in known]:
            del registry[name]


def test_a_kind_from_outside_is_taken_once_and_when_asked_for() -> None:
    asked: list[Evidence] = []

    def sizes(evidence: Evidence) -> list[int]:
        asked.append(evidence)
        return [len(graph.nodes) for graph in evidence.pair.original.graphs]

    def small(evidence: Evidence) -> list[Finding]:
        least = min(evidence.take("sizes"))
        assert evidence.take("sizes") is evidence.take("sizes")
        return [Finding("small", "small", f"a graph of {least} nodes")] if least < 100 else []

    register_evidence("sizes", sizes)
    assert "sizes" not in verify(nothing, reduce_then_norm()).evidence
    assert not asked
    register_check("small", small)
    register_check("small-too", small)
    verdict = verify(nothing, reduce_then_norm())
    assert [finding.kind for finding in verdict.findings] == ["small", "small"]
    assert len(asked) == 1
    assert verdict.evidence["sizes"] >= 0


def test_what_cannot_be_taken_is_a_doubt() -> None:
    def broken(evidence: Evidence) -> None:
        raise ExecutorError("the machine is gone")

    def look(evidence: Evidence) -> list[Finding]:
        assert evidence.take("broken") is None
        return []

    register_evidence("broken", broken)
    register_check("look", look)
    verdict = verify(nothing, reduce_then_norm())
    assert verdict.status == "inconclusive"
    assert verdict.doubts == [Doubt("executor-failed", "the machine is gone")]


def test_checks_decide_what_is_taken() -> None:
    assert set(verify(pointless, reduce_then_norm(), checks=["structure"]).evidence) == {"lockstep", "domain"}
    taken = verify(pointless, reduce_then_norm()).evidence
    assert {"lockstep", "arena"} <= set(taken)
    assert not {"conditioning", "rounding", "exact-difference", "op-laws"} & set(taken)


@pytest.mark.parametrize(("kind", "provider"), [("arena", len), ("Two Words", len), ("mine", 3)])
def test_what_cannot_be_registered(kind: str, provider: object) -> None:
    with pytest.raises(UsageError):
        register_evidence(kind, provider)  # type: ignore[arg-type]


def random_values(gm: fx.GraphModule) -> None:
    """Returns random numbers: what that computes nobody can say."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    returned = output.all_input_nodes[0]
    with gm.graph.inserting_before(output):
        made = gm.graph.call_function(torch.ops.aten.rand_like.default, (returned,))
    made.meta["val"] = torch.empty_like(returned.meta["val"])
    output.replace_input_with(returned, made)


def foreign(gm: fx.GraphModule) -> None:
    """Calls what no table knows, and changes no value: only this process can run the graph."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    returned = output.all_input_nodes[0]
    with gm.graph.inserting_before(output):
        made = gm.graph.call_function(torch.mul, (returned, 1.0))
    made.meta["val"] = torch.empty_like(returned.meta["val"])
    output.replace_input_with(returned, made)


def test_why_the_rewritten_program_did_not_run_is_said_whatever_checks_are_chosen() -> None:
    for checks in (["structure"], ["metadata"], None):
        verdict = verify(random_values, reduce_then_norm(), checks=checks)
        assert [doubt.reason for doubt in verdict.doubts] == ["unsupported-op"]
        assert verdict.status == "inconclusive"


@pytest.mark.parametrize("domain", ["float64", "native", "exact"])
def test_what_only_the_pass_can_run_is_run_as_it_ran_it(domain: str) -> None:
    verdict = verify(InProcess(prepare_pass(foreign, "", {})), reduce_then_norm(), domain=domain)
    assert verdict.pair.foreign is not None
    assert verdict.pair.rewritten is not None  # of processes of their own the graph does not come back
    assert verdict.evidence.keys() >= {"lockstep", "arena"}
    assert verdict.runs == [verdict.pair.foreign.judged]
    assert [note.reason for note in verdict.notes] == ([] if domain == "float64" else [f"{domain}-aside"])
    evidence = Evidence(verdict.pair, Contract(), EvidenceRequest(verdict.runs[0].original, Lockstep(), list(CHECKS)))
    assert evidence.rewritten is None
    assert (evidence.arena, evidence.exploration, evidence.extremes) == (None, None, [])


def test_a_measurement_that_fails_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(evidence: Evidence) -> None:
        raise ExecutorError("no measure")

    monkeypatch.setitem(EVIDENCE, "conditioning", fails)
    program = reduce_then_norm()
    baseline = Lockstep().run(program)
    evidence = Evidence(Pair(program, program), Contract(), EvidenceRequest(baseline, Lockstep(), list(CHECKS)))
    for _ in range(2):
        with pytest.raises(ExecutorError, match="no measure"):
            evidence.probe()
