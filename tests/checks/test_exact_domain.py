"""Whole programs in the exact domain: equal ones agree bit for bit, tiny defects show, and what it cannot judge it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.checks.values.exact import agrees, exact_differences
from tcverify.domains import DRAWS, Exact
from tcverify.domains.exact import field
from tcverify.errors import UnsupportedOp
from tcverify.execution import Explanation, Lockstep, ProcessGroupPool, explain
from tcverify.execution.exact_literals import RoundedLiteral, new_constant, rounded_literals
from tcverify.ops import TensorSpec
from tcverify.ops.dialects.tensor_cast.library import OPS
from tcverify.program import (
    PARTIAL,
    VARYING,
    GraphBuilder,
    InputSpec,
    Program,
    RankBinding,
    Recipe,
    shard,
    spmd_program,
)
from tests.support.exact_programs import Build, Writer, becomes, program, tensors
from tests.support.programs import TP2

Pool = Callable[[int], ProcessGroupPool]
aten = torch.ops.aten
CHECKS = ["equivalence"]


def judged(before: Build, after: Build, domain: str = "exact", **options: Any) -> Any:
    verdict = verify(becomes(after), program(before), domain=domain, checks=CHECKS, **options)
    assert verdict.changed
    return verdict


# ------------------------------------------------------------------------------------------- equal programs agree

#: Programs and others that compute the same in another order.
EQUAL: dict[str, tuple[Build, Build]] = {
    "the sum over the group behind the matmul": (
        lambda g: g("mm", g.total(g.x), g.w),
        lambda g: g.total(g("mm", g.x, g.w)),
    ),
    "three addends": (
        lambda g: g.norm(g.plus(g.plus(g.total(g.x), g.y), g.pos)),
        lambda g: g.norm(g.plus(g.pos, g.plus(g.y, g.total(g.x)))),
    ),
    "a matmul split over K": (
        lambda g: g("mm", g.y, g.w),
        lambda g: g.plus(
            g("mm", g("slice.Tensor", g.y, 1, 3, 8), g("slice.Tensor", g.w, 0, 3, 8)),
            g("mm", g("slice.Tensor", g.y, 1, 0, 3), g("slice.Tensor", g.w, 0, 0, 3)),
        ),
    ),
    "a product of three": (
        lambda g: g("mm", g("mm", g.total(g.x), g.w), g.v),
        lambda g: g.total(g("mm", g.x, g("mm", g.w, g.v))),
    ),
    "a scatter and a gather for a sum": (
        lambda g: g.norm(g.total(g.x)),
        lambda g: g(
            "tensor_cast::all_gather",
            g.norm(g("tensor_cast::reduce_scatter", g.x, 0, g.builder.rank, g.builder.group("tp"))),
            0, g.builder.rank, g.builder.group("tp"),
        ),
    ),
    "a mean and a norm by their parts": (
        lambda g: g.norm(g.y, 1e-5),
        lambda g: g("mul.Tensor", g("mul.Tensor", g.y, g("rsqrt", g("add.Scalar", g.scaled(
            g("sum.dim_IntList", g("pow.Tensor_Scalar", g.y, 2), [-1], True), 0.125), 1e-5))), g.gain),
    ),
    "masked attention weights": (
        lambda g: g("_softmax", g("masked_fill.Scalar", g.y, g("gt.Scalar", g.pos, 1.0), -math.inf), -1, False),
        lambda g: g("_softmax", g.plus(g("masked_fill.Scalar", g.scaled(g.y, 0.0), g("gt.Scalar", g.pos, 1.0), -math.inf),
                                       g.y), -1, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_equal_programs_agree_bit_for_bit_and_on_gloo_as_in_lockstep(name: str, pool: Pool) -> None:
    before, after = (program(build) for build in EQUAL[name])
    alone = [Lockstep().compare(before, after, Exact(draw)) for draw in range(DRAWS)]
    assert all(agrees(comparison) for comparison in alone)
    assert not torch.equal(*(c.original.ranks[0].outputs[0] for c in alone))  # two draws
    together = pool(2).compare(before, after, Exact(0))
    assert agrees(together)
    run = pool(2).run(before, domain=Exact(0))
    for mine, theirs in zip(alone[0].original.ranks, run.ranks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.outputs, theirs.outputs, strict=True))


def test_a_sound_rewrite_passes_without_a_word_confirmed_on_gloo(pool: Pool) -> None:
    verdict = judged(*EQUAL["a scatter and a gather for a sum"], confirm=pool(2))
    assert (verdict.status, verdict.notes) == ("passed", [])
    assert [(run.executor, run.domain) for run in verdict.runs] == [
        ("lockstep", "float64"), ("lockstep", "exact:0"), ("lockstep", "exact:1"), ("gloo", "exact:0"),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------- every op of the dialect

S8, U8, F8 = torch.int8, torch.uint8, torch.float8_e4m3fn
DIALECT_INPUTS = (
    InputSpec("x", (4, 8), torch.bfloat16, (("tp", PARTIAL),)),
    InputSpec("y", (4, 8)),
    InputSpec("w", (8, 6)),
    InputSpec("bias", (6,)),
    InputSpec("gain", (8,)),
    InputSpec("kv", (5, 2, 2)),
    InputSpec("mask", (4, 5), torch.bool, recipe=Recipe("mask")),
    InputSpec("w8", (8, 6), S8, recipe=Recipe("integers", 127)),
    InputSpec("w4", (4, 6), U8, recipe=Recipe("integers", 255)),
    InputSpec("offset", (6,), torch.int32, recipe=Recipe("constant", 3)),
    InputSpec("scale", (6,), recipe=Recipe("norm_weight")),
    InputSpec("xf8", (4, 8), F8),
    InputSpec("wf8", (8, 6), F8),
    InputSpec("row_scale", (4, 1), recipe=Recipe("norm_weight")),
    InputSpec("x4", (4, 32), U8, recipe=Recipe("integers", 255)),
    InputSpec("wx4", (32, 6), U8, recipe=Recipe("integers", 255)),
    InputSpec("x_blocks", (4, 2), recipe=Recipe("norm_weight")),
    InputSpec("w_blocks", (6, 2), recipe=Recipe("norm_weight")),
    InputSpec("token", (), torch.int64, recipe=Recipe("integers", 1)),
    InputSpec("chosen", (4, 2), torch.int64, recipe=Recipe("integers", 3)),
    InputSpec("rows", (8, 8)),
    InputSpec("experts", (3, 8, 6)),
)
STATIC = ("scale", "offset", None, None, "bias", torch.bfloat16)
#: Arguments of every op of the dialect: names of inputs, and what else they are given. RANK and GROUP are the caller's.
RANK, GROUP = "RANK", "GROUP"
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "rms_norm": ("x", "gain", 1e-6),
    "add_rms_norm": ("x", "y", "gain", 1e-6),
    "add_rms_norm2": ("x", "y", "gain", 1e-6),
    "layer_norm": ("x", "gain", "gain", 1e-5),
    "modulated_layer_norm": ("x", "gain", None, "y", "y", 1e-5),
    "silu": ("x",),
    "gelu": ("x", "tanh"),
    "swiglu": ("x", "y"),
    "gated_residual_add": ("x", "y", "y"),
    "cat": (["y", "y"], 1),
    "attention": ("y", "kv", "kv", "mask", None, None, None, None),
    "all_reduce": ("x", RANK, GROUP),
    "reduce_scatter": ("x", 1, RANK, GROUP),
    "all_gather": ("x", -1, RANK, GROUP),
    "all_to_all": ("x", [2, 2], [2, 2], RANK, GROUP),
    "pipeline_send_recv": ("x", 0, 1, 0, 1),
    "matmul_all_reduce": ("y", "w", "bias", RANK, GROUP),
    "static_quant_linear": ("x", "w8", *STATIC),
    "static_quant_linear_int4": ("x", "w4", *STATIC),
    "fp8_linear": ("xf8", "wf8", "row_scale", "scale", "bias", None),
    "mxfp4_linear": ("x4", "wx4", "x_blocks", "w_blocks", None, torch.float32),
    "moe_gating_top_k_softmax": ("y", 2),
    "init_routing_v2": ("y", "chosen"),
    "unpermute_tokens": ("rows", "chosen"),
    "grouped_matmul": (["y", "y"], ["w", "w"], ["bias", None]),
    "routed_matmul": ("rows", "experts", None, "chosen"),
    "_internal_mark_region_begin": ("x", 1),
    "_internal_mark_region_end": ("x", 1),
    "_internal_copy_region": ("x", 1),
    "_internal_order_barrier": ("x", "y"),
    "_internal_wait_and_bind": ("x", 1, ["token"]),
    "_internal_record": ("x", 1),
}
for _name in ("static_quant_linear", "static_quant_linear_int4", "fp8_linear", "mxfp4_linear"):
    ARGUMENTS[f"{_name}_all_reduce"] = (*ARGUMENTS[_name], RANK, GROUP)


#: Ops with two results.
PAIRS = ("add_rms_norm2", "moe_gating_top_k_softmax")


def dialect_program(name: str) -> Program:
    def build(b: GraphBuilder) -> Any:
        inputs = {spec.name: b.input(spec.name) for spec in DIALECT_INPUTS}
        known = {**inputs, RANK: b.rank, GROUP: b.group("tp")}

        def given(value: Any) -> Any:
            if isinstance(value, list):
                return [given(v) for v in value]
            return known.get(value, value) if isinstance(value, str) else value

        found = b.call(f"tensor_cast::{name}", *map(given, ARGUMENTS[name]))
        return (b.getitem(found, 0), b.getitem(found, 1)) if name in PAIRS else (found, inputs["y"])

    return spmd_program(TP2, DIALECT_INPUTS, build)


def test_every_op_of_the_dialect_has_arguments_here() -> None:
    assert {f"tensor_cast::{name}" for name in ARGUMENTS} == {op.name for op in OPS}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_op_of_the_dialect_computes_residues_of_its_shape(name: str) -> None:
    made = dialect_program(name)
    real = Lockstep().run(made)
    run = Lockstep().run(made, domain=Exact(0))
    assert run.finished, run.why
    for mine, theirs in zip(real.ranks, run.ranks, strict=True):
        for expected, found in zip(tensors(mine.outputs), tensors(theirs.outputs), strict=True):
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
            if found.is_floating_point():
                assert bool(((found == found.round()) & (found.abs() <= field.H)).all())
                assert int(found.unique().numel()) > found.numel() // 3


# -------------------------------------------------------------------------------------------------- what is refuted

UP = math.nextafter(1e-6, 1)
#: Each differs by so little that float64 passes it.
DEFECTS: dict[str, tuple[Build, Build]] = {
    "an eps one ulp larger": (lambda g: g.norm(g.total(g.x)), lambda g: g.norm(g.total(g.x), UP)),
    "a residual scaled by 1 + 1e-12": (
        lambda g: g.plus(g.scaled(g.y, 1e3), g.scaled(g.pos, 1e-3)),
        lambda g: g.plus(g.scaled(g.y, 1e3), g.scaled(g.scaled(g.pos, 1 + 1e-12), 1e-3)),
    ),
    "a mean over the wrong count": (
        lambda g: g.plus(g.y, g.scaled(g("mean.dim", g.x, [-1], True), 1e-17)),
        lambda g: g.plus(g.y, g.scaled(g("div.Scalar", g("sum.dim_IntList", g.x, [-1], True), 7), 1e-17)),
    ),
    "a contribution doubled": (
        lambda g: g.plus(g.y, g.scaled(g.total(g.x), 1e-17)),
        lambda g: g.plus(g.y, g.scaled(g.total(g.scaled(g.x, 2.0)), 1e-17)),
    ),
    "contributions of others lost, behind functions": (
        lambda g: g("_softmax", g("relu", g.norm(g.plus(g.y, g.scaled(g.total(g.x), 1e-17)))), -1, False),
        lambda g: g("_softmax", g("relu", g.norm(g.plus(g.y, g.scaled(g.x, 1e-17)))), -1, False),
    ),
    "a bias added on every rank": (
        lambda g: g.plus(g.total(g("mm", g.x, g.w)), g.scaled(g("mm", g.y, g.w), 1e-18)),
        lambda g: g.total(g.plus(g("mm", g.x, g.w), g.scaled(g("mm", g.y, g.w), 1e-18))),
    ),
    "a literal 4000 ulps away": (
        lambda g: g.plus(g.y, g.scaled(g.pos, 1e-6)),
        lambda g: g.plus(g.y, g.scaled(g.pos, 1e-6 + 4000 * math.ulp(1e-6))),
    ),
    "a maximum for a sum": (
        lambda g: g.plus(g.y, g.scaled(g.plus(g.x, g.pos), 1e-20)),
        lambda g: g.plus(g.y, g.scaled(g("maximum", g.x, g.pos), 1e-20)),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_too_small_for_float64_is_refuted(name: str) -> None:
    before, after = DEFECTS[name]
    assert judged(before, after, "float64").status == "passed"
    (finding,) = judged(before, after).findings
    assert (finding.kind, finding.data["domain"]) == ("wrong-value", "exact")
    assert finding.title.endswith("beyond the precision of float64")
    assert "in 2 of 2 draws" in finding.detail


def test_a_defect_that_float64_sees_is_told_in_its_words() -> None:
    (finding,) = judged(lambda g: g.total(g.x), lambda g: g.scaled(g.total(g.x), 2.0)).findings
    assert "beyond" not in finding.title


# ---------------------------------------------------------------------------------- laws that the field does not have

#: Sound rewrites by such laws, and the sentence about them.
LAWS: dict[str, tuple[Build, Build, str]] = {
    "exp of a sum": (
        lambda g: g("exp", g.plus(g.y, g.pos)), lambda g: g("mul.Tensor", g("exp", g.y), g("exp", g.pos)), "a law of exp"
    ),
    "the square of a root that is called still": (
        lambda g: (g("pow.Tensor_Scalar", g("sqrt", g.pos), 2), g("sqrt", g.pos)),
        lambda g: (g("clone", g.pos), g("sqrt", g.pos)),
        "a law of sqrt",
    ),
    "softmax without its maximum": (
        lambda g: g("_softmax", g.y, -1, False),
        lambda g: g("div.Tensor", g("exp", g.y), g("sum.dim_IntList", g("exp", g.y), [-1], True)),
        "a law of exp",
    ),
    "relu of a multiple": (
        lambda g: g("relu", g.scaled(g.y, 3.0)), lambda g: g.scaled(g("relu", g.y), 3.0), "a law of the order of numbers"
    ),
    "a mask that every number passes": (
        lambda g: g("clone", g.y),
        lambda g: g("where.ScalarOther", g("gt.Scalar", g.y, -1e9), g.y, 0.0),
        "a law of the order of numbers",
    ),
    "sine and cosine, both called still": (
        lambda g: (g.plus(*(g("pow.Tensor_Scalar", g(f, g.y), 2) for f in ("sin", "cos"))), g("sin", g.y), g("cos", g.y)),
        lambda g: (g("full_like", g.y, 1.0), g("sin", g.y), g("cos", g.y)),
        "a law of cos",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_a_rewrite_by_a_law_that_the_field_lacks_is_left_to_float64(name: str) -> None:
    before, after, sentence = LAWS[name]
    verdict = judged(before, after)
    (note,) = verdict.notes
    assert (verdict.status, note.reason) == ("passed", "exact-aside")
    assert sentence in note.detail


def clamped(gm: fx.GraphModule) -> None:
    """Between bounds that no number reaches."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    (value,) = output.all_input_nodes
    with gm.graph.inserting_before(output):
        between = gm.graph.call_function(torch.ops.aten.clamp.default, (value, -1e30, 1e30))
    between.meta["val"] = value.meta["val"].clone()
    output.replace_input_with(value, between)


def plus_infinity(gm: fx.GraphModule) -> None:
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    (value,) = output.all_input_nodes
    with gm.graph.inserting_before(output):
        more = gm.graph.call_function(torch.ops.aten.add.Tensor, (value, float("inf")))
    more.meta["val"] = value.meta["val"].clone()
    output.replace_input_with(value, more)


@pytest.mark.parametrize("elements", [1, 2, 3])
def test_a_law_of_the_order_shows_on_few_elements(elements: int) -> None:
    x = InputSpec("x", (elements,), placements=(("tp", PARTIAL),))
    for seed in range(4):
        program = spmd_program(
            TP2,
            [x],
            lambda b: b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp")),
            seed=seed,
        )
        assert verify(clamped, program, domain="exact").status == "passed"


def test_an_infinity_that_the_original_does_not_have_is_a_difference() -> None:
    x = InputSpec("x", (2, 4))
    program = spmd_program(TP2, [x], lambda b: b.call("aten::neg", b.input("x")))
    verdict = verify(plus_infinity, program, domain="exact")
    assert (verdict.status, [f.kind for f in verdict.findings]) == ("refuted", ["wrong-value"])


def test_where_rounding_hides_whether_a_law_holds_nothing_is_refuted() -> None:
    def large(g: Writer, value: fx.Node) -> fx.Node:
        return g("sub.Tensor", g.plus(g.scaled(g.pos, 1e12), value), g.scaled(g.pos, 1e12))

    verdict = judged(
        lambda g: g("exp", large(g, g.y)),
        lambda g: g("pow.Tensor_Scalar", g("exp", g.scaled(g.y, 0.5)), 2),
    )
    assert (verdict.status, [n.reason for n in verdict.notes]) == ("inconclusive", ["exact-aside"])


# ------------------------------------------------------------------------------------------------ rounded literals

ROOT = math.sqrt(2)
#: Sound rewrites that fold literals, and what the note says of one.
FOLDED: dict[str, tuple[Build, Build, str]] = {
    "two factors": (
        lambda g: g.scaled(g.scaled(g.y, 0.1), 0.2), lambda g: g.scaled(g.y, 0.1 * 0.2), "stands for 0.1 · 0.2"
    ),
    "four factors": (
        lambda g: g.scaled(g.scaled(g.scaled(g.scaled(g.y, 0.1), 0.2), 0.3), 0.7),
        lambda g: g.scaled(g.y, 0.1 * 0.2 * 0.3 * 0.7),
        "stands for 0.1 · 0.2 · 0.3 · 0.7",
    ),
    "a divisor": (
        lambda g: g("div.Scalar", g.y, math.pi), lambda g: g.scaled(g.y, 1 / math.pi), "stands for 1 / 3.14159"
    ),
    "a factor and an addend": (
        lambda g: g("add.Scalar", g.scaled(g("add.Scalar", g.y, 1.3), 0.7), 0.2),
        lambda g: g("add.Scalar", g.scaled(g.y, 0.7), 1.3 * 0.7 + 0.2),
        "1.1099999999999999 stands for",
    ),
    "a root and its inverse": (
        lambda g: g.scaled(g.scaled(g.y, ROOT), 1 / ROOT), lambda g: g("clone", g.y), "1.4142135623730951 stands for 1 / 0.70710"
    ),
    "a root squared": (
        lambda g: g.scaled(g.scaled(g.y, ROOT), ROOT), lambda g: g.scaled(g.y, 2.0), "2.0 stands for 1.41421"
    ),
    "a literal within an op": (
        lambda g: g("gelu", g.y),
        lambda g: g.scaled(g("mul.Tensor", g.y, g("add.Scalar", g("erf", g("div.Scalar", g.y, ROOT)), 1)), 0.5),
        "1.4142135623730951 stands for 1 / 0.7071067811865476",
    ),
    "a root spread over two factors": (
        lambda g: g("mm", g("div.Scalar", g.y, math.sqrt(8)), g.w),
        lambda g: g("mm", g.scaled(g.y, 8**-0.25), g.scaled(g.w, 8**-0.25)),
        "2.8284271247461903 stands for 1 /",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_folded_literals_are_noted_and_pass(name: str) -> None:
    before, after, sentence = FOLDED[name]
    verdict = judged(before, after)
    (note,) = verdict.notes
    assert (verdict.status, note.reason) == ("passed", "literal-changed")
    assert sentence in note.detail


def first_explanation(old: float, new: float) -> list[RoundedLiteral]:
    before, after = (program(lambda g, factor=factor: g.scaled(g.y, factor)) for factor in (old, new))
    return next(iter(rounded_literals(before, after, {old}, {new})))


def test_four_units_in_the_last_place_are_rounding_and_five_are_not() -> None:
    assert first_explanation(0.3, 0.3 + 4 * math.ulp(0.3))[0].expression == "0.3"
    assert first_explanation(0.3, 0.3 + 5 * math.ulp(0.3)) == []


def test_numbers_that_cancel_explain_nothing() -> None:
    """(0.3 + 8) − 8 is some units in the last place from 0.3, as is much else."""
    assert abs((0.3 + 8) - 8 - 0.3) > 4 * math.ulp(0.3)
    assert first_explanation(0.3, (0.3 + 8) - 8) == []


def test_an_eps_is_never_rounded() -> None:
    before, after = program(lambda g: g.norm(g.y)), program(lambda g: g.norm(g.y, UP))
    assert not any(rounded_literals(before, after, {1e-6}, {UP}))


# ------------------------------------------------------------------------------------------------- stepping aside


def test_an_op_without_a_meaning_leaves_the_judgement_to_float64() -> None:
    before: Build = lambda g: g("pow.Tensor_Tensor", g.pos, g.pos)  # noqa: E731
    verdict = judged(before, lambda g: g("clone", g("pow.Tensor_Tensor", g.pos, g.pos)))
    (note,) = verdict.notes
    assert (verdict.status, note.reason) == ("passed", "exact-aside")
    assert "no power of two tensors" in note.detail
    refuted = judged(before, lambda g: g.scaled(g("pow.Tensor_Tensor", g.pos, g.pos), 1.01))
    assert refuted.status == "refuted"


def test_an_ill_conditioned_program_is_decided() -> None:
    def cancelling(g: Writer, value: fx.Node) -> fx.Node:
        return g("sub.Tensor", g.plus(g.scaled(g.pos, 1e12), value), g.scaled(g.pos, 1e12))

    before: Build = lambda g: cancelling(g, g.total(g.x))  # noqa: E731
    assert judged(before, lambda g: g.total(g.x), "float64").status == "inconclusive"
    sound = judged(before, lambda g: g.total(g.x))
    assert (sound.status, [n.reason for n in sound.notes]) == ("passed", ["exact-decided"])
    wrong = judged(before, lambda g: cancelling(g, g.scaled(g.total(g.x), 1.0000001)))
    assert [finding.kind for finding in wrong.findings] == ["wrong-value"]


def hand_made(build: Callable[[fx.Graph, fx.Node], Any], module: torch.nn.Module | None = None) -> Program:
    """Both ranks run what is built on x, [2, 4]."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorSpec((2, 4), (4, 1), torch.float32, 0, 0)
    graph.output((build(graph, x),))
    owner = module if module is not None else torch.nn.Module()
    inputs = (InputSpec("x", (2, 4), placements=(("tp", VARYING),)),)
    return Program(TP2, (graph,), (RankBinding(0, {}), RankBinding(0, {})), inputs, modules=(owner,))


def read(factor: float) -> Program:
    """x · factor + shift, where both belong to the graph."""

    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        scaled = g.call_function(aten.mul.Tensor, (x, g.get_attr("factor")))
        return g.call_function(aten.add.Tensor, (scaled, g.get_attr("shift")))

    owner = torch.nn.Module()
    owner.register_buffer("factor", torch.tensor(factor, dtype=torch.float64))
    owner.register_buffer("shift", torch.tensor([0.3, 0.1, 0.7, 1 / 3], dtype=torch.float64))
    return hand_made(build, owner)


def test_attributes_of_graphs_are_read_as_literals() -> None:
    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        shift = g.call_function(aten.div.Tensor, (g.get_attr("tenths"), 10))
        return g.call_function(aten.add.Tensor, (g.call_function(aten.div.Tensor, (x, 10)), shift))

    owner = torch.nn.Module()
    owner.register_buffer("tenths", torch.tensor([3.0, 1.0, 7.0, 10 / 3], dtype=torch.float64))
    assert agrees(Lockstep().compare(read(0.1), hand_made(build, owner), Exact(0)))
    assert not agrees(Lockstep().compare(read(0.1), read(0.1 + 2**-50), Exact(0)))


def test_constants_that_the_original_does_not_have_are_no_ground_for_a_finding() -> None:
    assert new_constant(read(0.1), read(0.1)) is None
    explanation = explain(read(0.1), read(0.1 + 2**-50), 0)
    assert explanation.kind == "aside"
    assert "'factor' holds numbers that the original does not have" in explanation.text


def _foreign(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_what_cannot_be_looked_into_is_left_to_float64() -> None:
    made = hand_made(lambda g, x: g.call_function(_foreign, (x,)))
    with pytest.raises(UnsupportedOp, match="cannot look into it"):
        Lockstep().run(made, domain=Exact(0))


def test_complex_numbers_are_refused() -> None:
    made = hand_made(lambda g, x: g.call_function(aten.complex.default, (x, x)))
    with pytest.raises(UnsupportedOp, match="no complex numbers"):
        Lockstep().run(made, domain=Exact(0))


def test_draws_that_differ_by_chance_are_not_counted() -> None:
    before, after = program(lambda g: g.total(g.x)), program(lambda g: g.scaled(g.total(g.x), 2.0))
    wrong = Lockstep().compare(before, after, Exact(0))
    right = Lockstep().compare(before, before, Exact(1))
    for draws, refuted in (
        ([], False), ([right, right], False), ([wrong, right], False), ([wrong, wrong], True), ([wrong], True),
        ([wrong, right, right, wrong, right, right], False), ([wrong, right, right, wrong, right, wrong], True),
    ):  # fmt: skip
        assert bool(exact_differences(draws, lambda: Explanation("defect"))) is refuted


@pytest.mark.parametrize(("column", "draws", "status"), [(0, 2, "refuted"), (1, 6, "refuted"), (2, 6, "passed")])
def test_more_draws_decide_about_a_defect_that_a_relu_hides_from_some(column: int, draws: int, status: str) -> None:
    """One element differs, where it is positive: half of the draws show it, the first two of column 0 and two of column 2."""

    def element(g: Writer, value: fx.Node) -> fx.Node:
        return g("slice.Tensor", g("relu", value), 1, column, column + 1)

    def row(g: Writer) -> fx.Node:
        return g("slice.Tensor", g.y, 0, 0, 1)

    verdict = judged(lambda g: element(g, row(g)), lambda g: element(g, g("add.Scalar", row(g), 1e-18)))
    assert sum(run.domain.startswith("exact") for run in verdict.runs) == draws
    assert verdict.status == status


def test_residues_of_shards_are_shards_of_residues() -> None:
    spec = InputSpec("x", (4, 6), placements=(("tp", shard(0)),))
    whole = InputSpec("x", (4, 6))
    parts = [spec.values(TP2, rank, 5, Exact(0)) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole.values(TP2, 0, 5, Exact(0)))
    assert not torch.equal(whole.values(TP2, 0, 5, Exact(0)), whole.values(TP2, 0, 5, Exact(1)))
