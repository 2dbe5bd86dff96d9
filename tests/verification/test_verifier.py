"""Each check refutes a planted defect and stays silent on sound rewrites; verdicts are honest."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import Contract, Finding, verify
from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence, register_check
from tcverify.domains import FLOAT64, Domain
from tcverify.errors import ExecutorError, UsageError
from tcverify.execution import MAX_RANKS, Comparison, Lockstep, ProcessGroupPool, Run, device_of, of_any_size
from tcverify.ops import Op, register_dialect
from tcverify.passes import Multistream
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, Recipe, spmd_program
from tests.support.programs import GAIN, TP2, X, reduce_then_norm
from tests.support.stream_programs import Builder
from tests.support.stream_programs import program as lowerable

GRID = Mesh.grid({"dp": 2, "tp": 2})


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def insert(gm: fx.GraphModule, after: str, op: torch._ops.OpOverload, *args: object) -> None:
    """Put op(value, *args) between a value and its users, with the value's own metadata."""
    value = node(gm, after)
    with gm.graph.inserting_after(value):
        name = op._schema.name.split("::")[1]
        new = gm.graph.create_node("call_function", op, (value, *args), name=name)
    value.replace_all_uses_with(new)
    new.args = (value, *args)
    new.meta["val"] = torch.empty_like(value.meta["val"])


def kinds(pass_: Callable[[fx.GraphModule], object], program: Program | None = None, **options: object) -> list[str]:
    verdict = verify(pass_, program or reduce_then_norm(), **options)  # type: ignore[arg-type]
    assert (verdict.status == "refuted") == bool(verdict.findings)
    return [f.kind for f in verdict.findings]


def two_groups() -> Program:
    """Two independent all_reduces over the two groups of a 2 × 2 mesh."""

    def build(b: GraphBuilder) -> object:
        x = b.input("x")
        return (
            b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp")),
            b.call("tensor_cast::all_reduce", x, b.rank, b.group("dp")),
        )

    return spmd_program(GRID, [InputSpec("x", (4, 8), placements=(("tp", PARTIAL), ("dp", PARTIAL)))], build)


# ---------------------------------------------------------------------------------------------------------- silence


def test_the_identity_passes() -> None:
    verdict = verify(lambda gm: gm, reduce_then_norm())
    assert verdict.status == "passed"
    assert not verdict.changed
    assert verdict.executors == ["lockstep"]


def test_a_sound_rewrite_passes() -> None:
    def commute(gm: fx.GraphModule) -> None:
        """A sum of shards: reduce_scatter then all_gather is the same."""
        if not any(n.name == "all_reduce" for n in gm.graph.nodes):
            return
        reduced = node(gm, "all_reduce")
        x, rank, group = reduced.args
        with gm.graph.inserting_after(reduced):
            shard = gm.graph.call_function(torch.ops.tensor_cast.reduce_scatter.default, (x, 0, rank, group))
        with gm.graph.inserting_after(shard):
            whole = gm.graph.call_function(torch.ops.tensor_cast.all_gather.default, (shard, 0, rank, group))
        shard.meta["val"] = torch.empty_like(x.meta["val"][:2])
        whole.meta["val"] = torch.empty_like(x.meta["val"])
        reduced.replace_all_uses_with(whole)
        gm.graph.erase_node(reduced)

    verdict = verify(commute, reduce_then_norm(), deep=True)
    assert verdict.status == "passed", verdict.findings
    assert verdict.changed


def test_another_order_on_other_communicators_is_legal_when_all_ranks_agree() -> None:
    def swap(gm: fx.GraphModule) -> None:
        node(gm, "all_reduce_1").append(node(gm, "all_reduce"))

    assert kinds(swap, two_groups()) == []


def test_another_order_on_one_rank_is_legal_when_nobody_waits_in_a_circle() -> None:
    def swap_on_rank_0(gm: fx.GraphModule) -> None:
        if node(gm, "all_reduce").args[1] == 0:
            node(gm, "all_reduce_1").append(node(gm, "all_reduce"))

    assert kinds(swap_on_rank_0, two_groups()) == []


def test_rounding_within_the_probe_is_no_finding() -> None:
    def reassociate(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.mul.Tensor, 3.0)
        insert(gm, "mul", torch.ops.aten.div.Tensor, 3.0)

    assert kinds(reassociate) == []


def test_negative_getitem_and_swapped_operands_are_legal() -> None:
    def build(b: GraphBuilder) -> object:
        pair = b.call("tensor_cast::add_rms_norm2", b.input("x"), b.input("y"), b.input("gain"), 1e-6)
        return b.getitem(pair, 0), b.getitem(pair, 1)

    program = spmd_program(TP2, [X, InputSpec("y", (4, 8)), GAIN], build)

    def rewrite(gm: fx.GraphModule) -> None:
        norm, last = node(gm, "add_rms_norm2"), node(gm, "getitem_1")
        norm.args = (norm.args[1], norm.args[0], *norm.args[2:])
        last.args = (norm, -1)

    assert kinds(rewrite, program) == []


# ---------------------------------------------------------------------------------------------------------- refuting


def test_equivalence_sees_a_residual_scaled_in_its_twelfth_digit() -> None:
    def scale(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.mul.Tensor, 1 + 1e-12)

    assert kinds(scale) == ["wrong-value"]


def test_equivalence_names_output_ranks_and_values() -> None:
    def negate_on_rank_1(gm: fx.GraphModule) -> None:
        if node(gm, "all_reduce").args[1] == 1:
            insert(gm, "rms_norm", torch.ops.aten.neg.default)

    (finding,) = verify(negate_on_rank_1, reduce_then_norm()).findings
    assert finding.title == "output 1 is wrong on rank 1"
    assert finding.rank == 1
    assert "instead of" in finding.detail


def test_equivalence_sees_another_shape() -> None:
    def transpose(gm: fx.GraphModule) -> None:
        insert(gm, "rms_norm", torch.ops.aten.t.default)

    assert "wrong-value" in kinds(transpose)


def test_equivalence_sees_outputs_that_begin_to_share_storage() -> None:
    def return_twice(gm: fx.GraphModule) -> None:
        output = node(gm, "output")
        output.args = ((node(gm, "a"), node(gm, "a")),)
        gm.graph.erase_node(node(gm, "b"))

    def build(b: GraphBuilder) -> object:
        x = b.input("x")
        return b.call("aten::neg", x).graph and _twins(b, x)

    program = spmd_program(TP2, [X], build)
    assert kinds(return_twice, program) == ["wrong-alias"]


def _twins(b: GraphBuilder, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second = b.call("aten::relu", x), b.call("aten::relu", x)
    first._rename("a")
    second._rename("b")
    return first, second


def test_equivalence_sees_a_lost_write_to_an_input() -> None:
    def build(b: GraphBuilder) -> object:
        x = b.input("x")
        b.call("aten::mul_.Tensor", x, 2.0)
        return b.call("aten::neg", x)

    program = spmd_program(TP2, [X], build)

    def functionalise(gm: fx.GraphModule) -> None:
        node(gm, "mul_").target = torch.ops.aten.mul.Tensor
        node(gm, "neg").args = (node(gm, "mul_"),)

    assert any("mul_" in n.name for n in program.graphs[0].nodes), "a write is not dead code"
    assert "wrong-value" in kinds(functionalise, program, contract=Contract(metadata=False))


def test_a_program_that_raises_after_the_pass_is_refuted() -> None:
    def break_group(gm: fx.GraphModule) -> None:
        reduced = node(gm, "all_reduce")
        reduced.args = (reduced.args[0], 0, reduced.args[2])

    (finding,) = verify(break_group, reduce_then_norm()).findings
    assert finding.kind == "rewritten-raises"
    assert "all_reduce on rank 1 says rank=0" in finding.title


def test_collectives_see_a_deadlock_and_its_cycle() -> None:
    def swap_on_two_ranks(gm: fx.GraphModule) -> None:
        if node(gm, "all_reduce").args[1] in (0, 3):
            node(gm, "all_reduce_1").append(node(gm, "all_reduce"))

    (finding,) = verify(swap_on_two_ranks, two_groups()).findings
    assert finding.kind == "deadlock"
    assert finding.title == "deadlock among ranks 0, 2, 3, 1"
    assert finding.detail.splitlines()[0] == "rank 0 waits in all_reduce #1 of group [0, 2]"


def test_collectives_see_a_mismatch() -> None:
    def gather_on_rank_0(gm: fx.GraphModule) -> None:
        reduced = node(gm, "all_reduce")
        if reduced.args[1] == 0:
            reduced.target = torch.ops.tensor_cast.all_gather.default
            reduced.args = (reduced.args[0], 0, *reduced.args[1:])

    findings = verify(gather_on_rank_0, reduce_then_norm(), contract=Contract(metadata=False)).findings
    assert [f.kind for f in findings] == ["collective-mismatch"]
    assert "rank 0 calls all_gather while rank 1 calls all_reduce" in findings[0].title


def test_metadata_sees_missing_and_wrong_values_and_mistaken_sharing() -> None:
    def forget(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.neg.default)
        insert(gm, "neg", torch.ops.aten.neg.default)
        del node(gm, "neg").meta["val"]

    def misjudge(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.neg.default)
        insert(gm, "neg", torch.ops.aten.neg.default)
        node(gm, "neg").meta["val"] = node(gm, "neg").meta["val"][:2]

    def share(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.neg.default)
        insert(gm, "neg", torch.ops.aten.neg.default)
        node(gm, "neg").meta["val"] = node(gm, "all_reduce").meta["val"]

    for pass_, words in ((forget, "is missing"), (misjudge, "says float32[2, 8]"), (share, "shares its storage")):
        verdict = verify(pass_, reduce_then_norm())
        assert (verdict.status, verdict.findings) == ("passed", [])
        (finding,) = verdict.hygiene
        assert (finding.kind, finding.severity) == ("stale-metadata", "hygiene")
        assert finding.node == "neg"
        assert words in finding.title
        assert ("torch.empty_like" in finding.detail) is (pass_ is share)
        for promises in (Contract(metadata=True), Contract(strict=True)):
            (error,) = verify(pass_, reduce_then_norm(), contract=promises).findings
            assert error == replace(finding, severity="error")
        unchecked = verify(pass_, reduce_then_norm(), contract=Contract(metadata=False))
        assert (unchecked.findings, unchecked.hygiene) == ([], [])


def test_a_wrong_value_comes_before_what_is_hygiene() -> None:
    def double(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.neg.default)
        del node(gm, "neg").meta["val"]

    verdict = verify(double, reduce_then_norm())
    assert [finding.kind for finding in verdict.findings] == ["wrong-value"]
    assert [finding.kind for finding in verdict.hygiene] == ["stale-metadata"]


def test_views_of_a_replaced_value_may_keep_their_storage_number() -> None:
    def build(b: GraphBuilder) -> object:
        x = b.input("x")
        same = b.call("aten::mul.Tensor", x, 1.0)
        return b.call("aten::view", same, [8, 4]), b.call("aten::view", same, [2, 16])

    def drop(gm: fx.GraphModule) -> None:
        node(gm, "mul").replace_all_uses_with(node(gm, "x"))
        gm.graph.erase_node(node(gm, "mul"))

    assert kinds(drop, spmd_program(TP2, [X], build)) == []


def test_metadata_that_was_stale_before_the_pass_is_not_its_fault() -> None:
    program = reduce_then_norm()
    stale = [program.graph(rank) for rank in range(2)]
    for graph in stale:
        norm = next(n for n in graph.nodes if n.name == "rms_norm")
        norm.meta["val"] = norm.meta["val"][:1]

    def rewrite(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.neg.default)
        insert(gm, "neg", torch.ops.aten.neg.default)

    assert kinds(rewrite, program.with_graphs(stale)) == []


def test_structure_and_purity_report_what_application_saw() -> None:
    def undefined(gm: fx.GraphModule) -> None:
        node(gm, "rms_norm").append(node(gm, "all_reduce"))

    assert kinds(undefined) == ["malformed-graph"]
    assert kinds(lambda gm: 42) == ["malformed-graph"]

    def grow(gm: fx.GraphModule) -> None:
        """Sound once: the second application doubles."""
        if any(n.name == "clone" for n in gm.graph.nodes):
            insert(gm, "rms_norm", torch.ops.aten.mul.Tensor, 2.0)
        else:
            insert(gm, "all_reduce", torch.ops.aten.clone.default)

    assert kinds(grow) == []
    assert kinds(grow, deep=True) == ["impure-pass"]


# ---------------------------------------------------------------------------------------------------- honest verdicts


def test_an_unknown_op_is_inconclusive_by_name() -> None:
    def unknown(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.rand_like.default)

    verdict = verify(unknown, reduce_then_norm())
    assert verdict.status == "inconclusive"
    assert "aten::rand_like" in verdict.doubts[0].detail


def test_an_ill_typed_program_is_inconclusive() -> None:
    program = reduce_then_norm()
    graphs = [program.graph(rank) for rank in range(2)]
    bad = next(n for n in graphs[0].nodes if n.name == "all_reduce")
    bad.args = (bad.args[0], 0, [0])
    verdict = verify(lambda gm: gm, program.with_graphs(graphs))
    assert (verdict.status, verdict.doubts[0].reason) == ("inconclusive", "ill-typed-program")


def test_ill_conditioning_is_inconclusive() -> None:
    def build(b: GraphBuilder) -> object:
        x = b.input("x")
        big = b.call("aten::add.Tensor", x, 1e14)
        return b.call("aten::sub.Tensor", big, 1e14)

    def reassociate(gm: fx.GraphModule) -> None:
        node(gm, "sub").args = (node(gm, "x"), 0.0)

    verdict = verify(reassociate, spmd_program(TP2, [X], build), contract=Contract(metadata=False))
    assert (verdict.status, verdict.doubts[0].reason) == ("inconclusive", "ill-conditioned")


def test_new_overflow_is_inconclusive_but_new_nan_is_not() -> None:
    def build(b: GraphBuilder) -> object:
        return b.call("aten::mul.Tensor", b.input("x"), 1e200)

    program = spmd_program(TP2, [InputSpec("x", (4,), recipe=Recipe("constant", 1.0))], build)

    def overflow(gm: fx.GraphModule) -> None:
        insert(gm, "mul", torch.ops.aten.mul.Tensor, 1e200)

    def nan(gm: fx.GraphModule) -> None:
        insert(gm, "mul", torch.ops.aten.mul.Tensor, float("nan"))

    assert verify(overflow, program).doubts[0].reason == "overflow"
    assert kinds(nan, program) == ["wrong-value"]


def test_a_pass_that_declines_is_inconclusive() -> None:
    from tcverify import Unsupported

    def declines(gm: fx.GraphModule) -> None:
        raise Unsupported("no")

    verdict = verify(declines, reduce_then_norm())
    assert (verdict.status, verdict.doubts[0].reason) == ("inconclusive", "declined")


def test_the_process_group_confirms(pool: Callable[[int], ProcessGroupPool]) -> None:
    verdict = verify(lambda gm: gm, reduce_then_norm(), confirm=pool(2))
    assert verdict.status == "passed", verdict
    assert verdict.executors == ["lockstep", "gloo"]


def test_refuted_values_are_confirmed_when_asked(pool: Callable[[int], ProcessGroupPool]) -> None:
    def negate(gm: fx.GraphModule) -> None:
        insert(gm, "rms_norm", torch.ops.aten.neg.default)

    assert verify(negate, reduce_then_norm(), confirm=pool(2)).executors == ["lockstep"]
    verdict = verify(negate, reduce_then_norm(), confirm=pool(2), always_confirm=True)
    assert verdict.executors == ["lockstep", "gloo"]
    assert [f.kind for f in verdict.findings] == ["wrong-value"]


class _Elsewhere:
    """An executor whose answers are those of lockstep, changed by a function."""

    name = "elsewhere"

    def __init__(self, change: Callable[[Comparison], None]) -> None:
        self.change = change

    def run(self, program: Program, *, observe: bool = False, domain: Domain = FLOAT64) -> Run:
        return Lockstep().run(program, observe=observe, domain=domain)

    def compare(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Comparison:
        comparison = Lockstep().compare(original, rewritten, domain)
        self.change(comparison)
        return comparison

    def start_comparison(
        self, original: Program, rewritten: Program, domain: Domain = FLOAT64
    ) -> Callable[[], Comparison]:
        return lambda: self.compare(original, rewritten, domain)


def test_executors_that_disagree_are_a_finding() -> None:
    def differ(comparison: Comparison) -> None:
        comparison.deltas[0].difference = 1.0

    verdict = verify(lambda gm: gm, reduce_then_norm(), confirm=_Elsewhere(differ))
    assert [f.kind for f in verdict.findings] == ["executor-divergence"]


def test_an_original_with_other_values_elsewhere_is_a_finding() -> None:
    def shift(comparison: Comparison) -> None:
        comparison.original.ranks[1].digest = [[1e3, 1e3], [0.0, 1.0]]

    (finding,) = verify(lambda gm: gm, reduce_then_norm(), confirm=_Elsewhere(shift)).findings
    assert finding.kind == "executor-divergence"
    assert "on rank 1" in finding.title


def test_an_executor_that_fails_makes_the_verdict_inconclusive() -> None:
    def fail(comparison: Comparison) -> None:
        raise ExecutorError("rank 1 died")

    verdict = verify(lambda gm: gm, reduce_then_norm(), confirm=_Elsewhere(fail))
    assert (verdict.status, verdict.doubts[0].reason) == ("inconclusive", "executor-failed")


class _OnDevice(_Elsewhere):
    """The same, as an executor whose ranks compute on a device. Notes the domains that it is given."""

    device = "cuda"

    def __init__(self) -> None:
        super().__init__(lambda comparison: self.domains.append(comparison.domain))
        self.domains: list[str] = []


def test_a_device_confirms_exact_programs_in_float64() -> None:
    def negate_twice(gm: fx.GraphModule) -> None:
        insert(gm, "rms_norm", torch.ops.aten.neg.default)
        insert(gm, "neg", torch.ops.aten.neg.default)

    elsewhere = _OnDevice()
    elsewhere.device = "cpu"
    assert verify(negate_twice, reduce_then_norm(), confirm=elsewhere, domain="exact").status == "passed"
    assert elsewhere.domains == ["exact:0"]
    device = _OnDevice()
    assert verify(negate_twice, reduce_then_norm(), confirm=device, domain="exact").status == "passed"
    assert device.domains == ["float64"]
    device = _OnDevice()
    campaign = of_any_size("cuda", lambda world_size: device, 2)  # what confirms the programs of a campaign
    assert verify(negate_twice, reduce_then_norm(), confirm=campaign, domain="exact").status == "passed"
    assert device.domains == ["float64"]


@pytest.mark.parametrize("first", [2, MAX_RANKS + 1])
def test_an_executor_of_any_size_tells_its_device(first: int) -> None:
    for executor, device in ((_OnDevice(), "cuda"), (Lockstep(), "cpu")):
        anyhow = of_any_size("some", lambda world_size, one=executor: one, first)  # type: ignore[misc]
        assert anyhow is not None
        assert device_of(anyhow) == device
    assert of_any_size("none", lambda world_size: None, first) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_streams_of_a_deep_verification_run_on_the_device_of_the_executor() -> None:
    def build(b: Builder) -> Any:
        return b.add(b.mm(b.all_reduce(b["x"])), b.mm(b.mm(b["r"])))

    original = lowerable(build)
    assert verify(Multistream(), original, confirm=_Elsewhere(lambda comparison: None), deep=True).status == "passed"
    campaign = of_any_size("cuda", lambda world_size: _OnDevice(), original.world_size)
    verdict = verify(Multistream(), original, confirm=campaign, deep=True)
    assert [doubt.detail for doubt in verdict.doubts] == ["there is no CUDA device"]


def test_what_the_exact_domain_alone_shows_is_not_confirmed_on_a_device() -> None:
    def hardly_scaled(gm: fx.GraphModule) -> None:
        insert(gm, "rms_norm", torch.ops.aten.mul.Tensor, 1.0 + 2**-46)

    device = _OnDevice()
    verdict = verify(hardly_scaled, reduce_then_norm(), confirm=device, domain="exact", always_confirm=True)
    assert [f.kind for f in verdict.findings] == ["wrong-value"]
    assert device.domains == []
    (note,) = [note for note in verdict.notes if note.reason == "not-confirmed"]
    assert note.detail == "the exact domain computes on the CPU alone; judged in lockstep only"


def test_unknown_checks_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no check 'magic'"):
        verify(lambda gm: gm, reduce_then_norm(), checks=["magic"])


def test_checks_can_be_chosen() -> None:
    def scale(gm: fx.GraphModule) -> None:
        insert(gm, "all_reduce", torch.ops.aten.mul.Tensor, 2.0)

    assert kinds(scale, checks=["structure", "metadata"]) == []


def test_an_own_check_takes_part() -> None:
    def no_norm(evidence: Evidence) -> list[Finding]:
        rewritten = evidence.pair.rewritten
        assert isinstance(evidence.pair, Pair)
        found = [n.name for g in rewritten.graphs for n in g.nodes if "norm" in n.name] if rewritten else []
        return [Finding("norm", "no-norm", f"'{found[0]}' is a norm", node=found[0])] if found else []

    register_check("no-norm", no_norm)
    try:
        assert kinds(lambda gm: gm) == ["norm"]
    finally:
        del CHECKS["no-norm"]


def test_an_own_dialect_takes_part() -> None:
    library = torch.library.Library("verifiertest", "DEF")
    library.define("half(Tensor x) -> Tensor")
    library.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")
    register_dialect("verifiertest", [Op("verifiertest::half", lambda x: x / 2)])

    def half(gm: fx.GraphModule) -> None:
        insert(gm, "rms_norm", torch.ops.verifiertest.half.default)

    def half_and_double(gm: fx.GraphModule) -> None:
        half(gm)
        insert(gm, "half", torch.ops.aten.mul.Tensor, 2.0)

    assert kinds(half) == ["wrong-value"]
    assert kinds(half_and_double) == []


def test_python_operators_are_ops() -> None:
    def double(gm: fx.GraphModule) -> None:
        value = node(gm, "rms_norm")
        with gm.graph.inserting_after(value):
            new = gm.graph.call_function(operator.add, (value, value))
        value.replace_all_uses_with(new)
        new.args = (value, value)
        new.meta["val"] = torch.empty_like(value.meta["val"])

    assert kinds(double) == ["wrong-value"]
