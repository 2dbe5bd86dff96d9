"""The native domain: what rounding explains, what it does not, and how both are measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import Verdict, verify
from tcverify.checks.values.native import LARGEST, RANGE, RMS, OutputErrors, errors_of, native_differences
from tcverify.domains import NATIVE
from tcverify.execution import (
    Comparison,
    Delta,
    Lockstep,
    Noise,
    ProcessGroupPool,
    RankResult,
    pooled_rms,
    range_used,
    rounding_noise,
)
from tcverify.execution.compare import compare_native
from tcverify.explain.diagnosis import diagnose
from tcverify.program import (
    VARYING,
    Finding,
    GraphBuilder,
    InputSpec,
    Mesh,
    PlacedBuilder,
    Program,
    Recipe,
    spmd_program,
)
from tests.mutants.rounding import PLANTED, SHOWING, SOUND, long_program
from tests.ops.test_quantised import program as quantised_program

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TP2 = Mesh.grid({"tp": 2})
LOCKSTEP = Lockstep()

Build = Callable[[GraphBuilder, fx.Node], Any]


def program(build: Build, dtype: torch.dtype = BF16, shape: tuple[int, ...] = (8, 16), **recipe: Any) -> Program:
    x = InputSpec("x", shape, dtype, (("tp", VARYING),), Recipe(**recipe))
    return spmd_program(TP2, [x], lambda b: build(b, b.input("x")))


def noise(made: Program) -> Noise:
    return rounding_noise(made, LOCKSTEP.run(made))["output 0"]


def native(pass_: Any, made: Program, **options: Any) -> Verdict:
    return verify(pass_, made, domain="native", checks=["equivalence"], **options)


# ----------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_noise_of_a_sum_is_the_roundoff_of_its_dtype(dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps / 2
    found = noise(program(lambda b, x: b.call("aten::add.Tensor", x, x), dtype, kind="constant", scale=1.0))
    assert found.largest == pytest.approx(2 * unit, rel=1e-3)
    assert found.rms == pytest.approx(2 * unit, rel=1e-3)


def test_what_moves_values_makes_no_noise() -> None:
    def moves(b: GraphBuilder, x: fx.Node) -> Any:
        whole = b.call("tensor_cast::all_gather", b.call("aten::view", x, [16, 8]), 0, b.rank, b.group("tp"))
        return b.call("aten::clone", b.call("tensor_cast::_internal_copy_region", whole, 0))

    assert noise(program(moves)) == Noise(0.0, 0.0)


def test_noise_of_a_product_in_float32_grows_as_the_root_of_its_length() -> None:
    def product(inner: int) -> float:
        w = InputSpec("w", (inner, 8), F32, recipe=Recipe(scale=inner**-0.5))
        x = InputSpec("x", (8, inner), F32)
        made = spmd_program(TP2, [x, w], lambda b: b.call("aten::mm", b.input("x"), b.input("w")))
        return noise(made).rms

    assert 4 < product(1024) / product(16) < 16  # √(1024 / 16) = 8


def test_noise_of_a_product_in_bf16_is_that_of_its_result_since_kernels_sum_in_float32() -> None:
    made = long_program(BF16, 1024, 16, 0)
    product = spmd_program(TP2, made.inputs, lambda b: b.call("aten::mm", *[b.input(s.name) for s in made.inputs][:2]))
    found, scale = noise(product), float(LOCKSTEP.run(product).ranks[0].outputs[0].square().mean().sqrt())
    assert found.rms == pytest.approx(2**-8 * scale, rel=0.1)


def test_each_rank_of_a_sum_adds_to_the_noise() -> None:
    def reduced(ranks: int) -> float:
        mesh = Mesh.grid({"tp": ranks})
        x = InputSpec("x", (64,), BF16, recipe=Recipe("constant", 1.0))
        made = spmd_program(mesh, [x], lambda b: b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp")))
        return noise(made).rms / ranks / 2**-8

    assert reduced(2) == pytest.approx(1 + math.sqrt(1), rel=1e-2)
    assert reduced(5) == pytest.approx(1 + math.sqrt(4), rel=1e-2)


@pytest.mark.parametrize("layout", ["[0, 1] shard(0)", "[0, 1] replicated"])
def test_each_addend_of_a_reduction_of_placed_parts_adds_to_the_noise_wherever_it_lies(layout: str) -> None:
    def reduced(addends: int, reduce_op: str) -> Noise:
        b = PlacedBuilder(2)
        x = b.input("x", (addends, 64), layout, F32, Recipe("constant", 1.0))
        return noise(b.build(b.reduce(x, 0, "[0, 1] replicated", reduce_op)))

    unit = torch.finfo(F32).eps / 2
    assert reduced(10, "sum").rms == pytest.approx(10 * unit * (1 + math.sqrt(9)), rel=1e-3)
    assert reduced(26, "avg").rms == pytest.approx(unit * (1 + math.sqrt(25)), rel=1e-3)
    assert reduced(26, "max").rms == pytest.approx(unit, rel=1e-3)


def test_what_a_fused_op_computes_inside_may_be_rounded() -> None:
    x, residual = InputSpec("x", (4, 8), BF16), InputSpec("r", (4, 8), BF16, recipe=Recipe(scale=64.0))

    def cancels(b: GraphBuilder) -> Any:
        """x + r − r, of which the norm reads x as far as it is left."""
        a, r, gain = b.input("x"), b.input("r"), b.input("gain")
        both = b.call("aten::add.Tensor", a, r)
        return b.call("tensor_cast::add_rms_norm", both, b.call("aten::neg", r), gain, 1e-6)

    gain = InputSpec("gain", (8,), BF16, recipe=Recipe("constant", 1.0))
    found = noise(spmd_program(TP2, [x, residual, gain], cancels))
    assert found.rms > 10 * 2**-8


def test_values_that_are_written_in_place_make_noise_once_and_stay_aliases() -> None:
    def writes(b: GraphBuilder, x: fx.Node) -> Any:
        fresh = b.call("aten::clone", x)
        first = b.call("aten::view", fresh, [16, 8])
        b.call("aten::mul_.Tensor", fresh, 3.0)
        return first, fresh

    made = program(writes, kind="constant", scale=1.0)
    found = rounding_noise(made, LOCKSTEP.run(made))
    assert found["output 0"] == found["output 1"]
    assert found["output 0"].rms == pytest.approx(3 * 2**-8, rel=1e-3)


def test_ops_that_return_nothing_have_no_noise() -> None:
    def frees(b: GraphBuilder, x: fx.Node) -> Any:
        b.call("inductor::resize_storage_bytes_", b.call("aten::clone", x), 0)
        return b.call("aten::mul.Tensor", x, 3.0)

    made = program(frees, kind="constant", scale=1.0)
    assert noise(made).rms == pytest.approx(3 * 2**-8, rel=1e-3)


def test_noise_is_the_same_every_time() -> None:
    made = long_program(BF16, 16, 8, 0)
    assert rounding_noise(made, LOCKSTEP.run(made)) == rounding_noise(made, LOCKSTEP.run(made))


def test_a_discrete_value_that_rounding_flips_has_noise_without_bounds() -> None:
    def argmax(b: GraphBuilder, x: fx.Node) -> Any:
        return b.call("aten::argmax", b.call("aten::mul.Tensor", x, 1.5), 1)

    assert noise(program(argmax, kind="constant", scale=1.0)).largest == math.inf


def test_the_original_s_own_error_is_a_fraction_of_the_noise() -> None:
    """What limits rest on: real rounding has a root mean square of 0.41 of its bound, and there are several roundings."""
    for dtype in (BF16, F16, F32):
        for inner, hidden in ((16, 64), (512, 16)):
            made = long_program(dtype, inner, hidden, 3)
            comparison = LOCKSTEP.compare(made, made, NATIVE)
            found = rounding_noise(made, LOCKSTEP.run(made))
            for label in ("output 0", "output 1"):
                own = pooled_rms([(d.own_rms, d.elements) for d in comparison.deltas if d.label == label])
                assert 0.02 < own / found[label].rms < 0.5, (dtype, inner, label)


# ----------------------------------------------------------------------------------------------------------- comparisons


def result(*values: Any, inputs: Mapping[str, torch.Tensor] | None = None) -> RankResult:
    made = RankResult(0, list(values), "*")
    made.inputs, made.input_names = list((inputs or {}).values()), list(inputs or {})
    return made


def wide(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def half(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=F16)


def test_errors_are_distances_from_the_original_in_float64() -> None:
    (delta,) = compare_native(result(wide(1, 2, 3, 4)), result(half(1, 2, 3, 4.5)), result(half(1, 2, 3.25, 3)))
    assert (delta.own, delta.own_rms) == (0.5, 0.25)
    assert (delta.difference, delta.rms) == (1.0, pytest.approx(math.sqrt((0.25**2 + 1) / 4)))
    assert (delta.worst, delta.expected, delta.actual) == ((3,), 4.0, 3.0)
    assert (delta.scale, delta.elements, delta.dtype, delta.equal) == (4.0, 4, F16, False)


def test_equal_numbers_are_said_to_be_equal() -> None:
    (delta,) = compare_native(result(wide(1, math.nan)), result(half(2, math.nan)), result(half(2, math.nan)))
    assert delta.equal


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_new_out_of_range_is_overflow(value: float) -> None:
    (delta,) = compare_native(result(wide(1, 70000)), result(half(1, 2)), result(half(1, value)))
    assert delta.overflow
    assert delta.elements == 1
    assert delta.undefined == ("at [1] it is nan where float64 gives 70000" if math.isnan(value) else "")


def test_where_the_original_is_out_of_range_nothing_is_compared() -> None:
    (delta,) = compare_native(result(wide(1, 70000)), result(half(1, math.inf)), result(half(1, 9)))
    assert (delta.overflow, delta.problem, delta.difference, delta.elements) == (False, None, 0.0, 1)


def test_outputs_of_8_bits_can_be_compared() -> None:
    number = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    (delta,) = compare_native(result(wide(1, 2.1)), result(number), result(number))
    assert delta.own == pytest.approx(0.1)


def test_discrete_values_say_whether_the_original_is_sure_of_them() -> None:
    one, two = torch.tensor([1]), torch.tensor([2])
    (sure,) = compare_native(result(one), result(one), result(two))
    (unsure,) = compare_native(result(two), result(one), result(two))
    assert (sure.discrete, sure.unstable, unsure.unstable) == (True, False, True)


def test_outputs_that_come_to_share_storage_are_seen_in_the_native_domain_too() -> None:
    one = half(1)
    deltas = compare_native(result(wide(1), wide(1)), result(half(1), half(1)), result(one, one))
    assert [d.alias for d in deltas if d.problem] == [True]
    assert native_differences(_compared(deltas), dict, never)[0].kind == "wrong-alias"  # type: ignore[union-attr]


def test_the_root_mean_square_of_several_tensors() -> None:
    assert pooled_rms([(3.0, 2), (0.0, 2)]) == pytest.approx(math.sqrt(4.5))
    assert pooled_rms([(1e200, 1), (1e200, 3)]) == pytest.approx(1e200)
    assert pooled_rms([]) == 0.0


# ---------------------------------------------------------------------------------------------------------------- limits


def _compared(deltas: list[Delta]) -> Comparison:
    run = LOCKSTEP.run(program(lambda b, x: x))
    return Comparison("lockstep", run, run, deltas)


def _delta(rms: float, largest: float, own: float = 0.0, elements: int = 10**6, rank: int = 0) -> Delta:
    return Delta(
        rank, "output 0", largest, 1.0, (0,), 0.0, largest, rms=rms, elements=elements, own=own, own_rms=own, dtype=BF16
    )


def never() -> Any:
    raise AssertionError("measured")


def judged(delta: Delta, found: Noise, used: float = 0.0) -> Any:
    said = native_differences(_compared([delta]), lambda: {"output 0": found}, lambda: used)
    return said[0] if said else None


def test_limits_are_multiples_of_the_noise() -> None:
    expected = Noise(largest=1.0, rms=0.25)
    assert judged(_delta(0.25 * RMS, LARGEST), expected) is None
    over = judged(_delta(0.25 * RMS * 1.1, LARGEST), expected)
    assert (over.kind, over.data["measure"]) == ("wrong-value", "root mean square")
    assert judged(_delta(0.25 * RMS, LARGEST * 1.1), expected).data["measure"] == "largest"


def test_the_original_s_own_error_widens_the_limits() -> None:
    assert judged(_delta(0.9, 0.9, own=0.5), Noise(0.1, 0.1)) is not None
    assert judged(_delta(0.9, 0.9, own=0.8), Noise(0.1, 0.1)) is None


def test_few_elements_have_wider_limits() -> None:
    assert judged(_delta(1.5, 1.5, elements=4), Noise(1.0, 1.0)) is None
    assert judged(_delta(1.5, 1.5, elements=400), Noise(1.0, 1.0)) is not None


def test_noise_is_measured_only_where_the_rewritten_version_is_worse() -> None:
    assert native_differences(_compared([_delta(1.1, 1.1, own=1.0)]), never, never) == []
    same = _delta(3.0, 3.0, own=1.0)
    same.equal = True
    assert native_differences(_compared([same]), never, never) == []


def test_a_finding_says_its_limit_and_where_it_comes_from() -> None:
    delta = _delta(3.0, 5.0, own=0.5, rank=1)
    finding = judged(delta, Noise(1.0, 1.0))
    assert finding.title == "output 0 is less accurate than rounding explains on rank 1"
    assert "in bfloat16, the root mean square of the errors of its 1000000 elements is 3.00e+00" in finding.detail
    assert "3 times its limit 1.00e+00" in finding.detail
    assert "noise that rounding explains (1.00e+00) and the original's own error (5.00e-01)" in finding.detail
    assert "worst at [0] on rank 1: 5 where float64 gives 0" in finding.detail
    data = json.loads(json.dumps(finding.data))
    assert (data["error"], data["noise"], data["own"], data["domain"]) == (3.0, 1.0, 0.5, "native")
    assert data["limit"] == pytest.approx(data["factor"])


def test_an_error_where_rounding_explains_none_is_refuted() -> None:
    finding = judged(_delta(1e-9, 1e-9), Noise(0.0, 0.0))
    assert finding.kind == "wrong-value"
    assert "where its limit is 0" in finding.detail
    json.dumps(finding.data, allow_nan=False)


def test_errors_use_the_measure_nearer_to_its_limit() -> None:
    found = errors_of([_delta(0.1, 1.9), _delta(0.1, 0.1, rank=1)], Noise(1.0, 1.0))
    assert found.measure == "largest"
    assert found.share == pytest.approx(1.9 / LARGEST, rel=1e-2)
    assert OutputErrors("largest", 0.0, 0.0, 0.0, 2.0).share == 0.0


def test_a_discrete_value_is_refuted_only_if_rounding_does_not_flip_it() -> None:
    def flipped(unstable: bool, largest: float) -> Any:
        delta = Delta(0, "output 0", problem="at [0] it is 1 instead of 2", discrete=True, unstable=unstable)
        return judged(delta, Noise(largest, 0.0))

    assert isinstance(flipped(False, 0.0), Finding)
    assert flipped(True, 0.0).reason == "ill-conditioned"
    assert flipped(False, math.inf).reason == "ill-conditioned"


# --------------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("name", PLANTED)
def test_planted_losses_of_precision_are_refuted(name: str) -> None:
    verdict = native(PLANTED[name], long_program(*SHOWING[name], seed=1))
    assert [f.kind for f in verdict.findings] == ["wrong-value"]
    assert verdict.findings[0].data["domain"] == "native"
    assert verdict.findings[0].data["error"] > verdict.findings[0].data["limit"]


@pytest.mark.parametrize("name", PLANTED)
def test_float64_sees_none_of_them(name: str) -> None:
    assert verify(PLANTED[name], long_program(*SHOWING[name], seed=1), checks=["equivalence"]).status == "passed"


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("name", SOUND)
def test_sound_rewrites_pass(name: str, dtype: torch.dtype) -> None:
    for inner, hidden in ((64, 32), (256, 8)):
        verdict = native(SOUND[name], long_program(dtype, inner, hidden, 2))
        assert verdict.status == "passed", verdict.findings or verdict.doubts


@pytest.mark.parametrize("name", ["static_quant_linear", "static_quant_linear_int4", "fp8_linear", "mxfp4_linear"])
def test_quantised_linears_run_in_their_own_dtypes(name: str) -> None:
    made = quantised_program(name, fused=True)
    verdict = native(SOUND["unfused sums"], made)
    assert verdict.status == "passed"
    assert verdict.changed
    run = LOCKSTEP.run(made, domain=NATIVE)
    assert run.ranks[0].outputs[0].dtype is BF16


def multiplied(*factors: float) -> Callable[[fx.GraphModule], None]:
    """A pass that multiplies the sum by each of the factors, whose product is 1."""

    def rewrite(gm: fx.GraphModule) -> None:
        total = next(n for n in gm.graph.nodes if n.name == "mul")
        users, last = list(total.users), total
        for factor in factors:
            with gm.graph.inserting_after(last):
                made = gm.graph.call_function(torch.ops.aten.mul.Tensor, (last, factor))
            made.meta["val"] = torch.empty_like(total.meta["val"])
            last = made
        for user in users:
            user.replace_input_with(total, last)
        gm.recompile()

    return rewrite


def constant(dtype: torch.dtype, scale: float) -> Program:
    return program(lambda b, x: b.call("aten::mul.Tensor", x, 1.0), dtype, kind="constant", scale=scale)


def test_new_overflow_of_a_narrow_dtype_is_inconclusive() -> None:
    assert native(multiplied(32768.0, 1 / 32768.0), constant(F16, 4.0)).doubts[0].reason == "overflow"
    assert native(multiplied(1024.0, 1 / 1024.0), constant(F16, 4.0)).status == "passed"
    assert native(multiplied(32768.0, 1 / 32768.0), constant(BF16, 4.0)).status == "passed"


def put(build: Callable[[fx.Graph, fx.Node], fx.Node]) -> Callable[[fx.GraphModule], None]:
    """A pass that replaces the product by what is built of it."""

    def rewrite(gm: fx.GraphModule) -> None:
        product = next(n for n in gm.graph.nodes if n.name == "mul")
        users = list(product.users)
        with gm.graph.inserting_before(users[0]):
            made = build(gm.graph, product)
        for user in users:
            user.replace_input_with(product, made)
        gm.recompile()

    return rewrite


def over_underflow(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """x · (2⁻⁴⁰x / 2⁻⁴⁰x)."""
    small = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0**-40))
    one = graph.call_function(torch.ops.aten.div.Tensor, (small, small))
    return graph.call_function(torch.ops.aten.mul.Tensor, (x, one))


def minus_overflow(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """x + (32768·x − 32768·x)."""
    large = graph.call_function(torch.ops.aten.mul.Tensor, (x, 32768.0))
    nothing = graph.call_function(torch.ops.aten.sub.Tensor, (large, large))
    return graph.call_function(torch.ops.aten.add.Tensor, (x, nothing))


def test_a_new_nan_that_no_overflow_explains_is_refuted() -> None:
    (finding,) = native(put(over_underflow), constant(F16, 4.0)).findings
    assert finding.kind == "wrong-value"
    assert (finding.data["domain"], finding.detail) == ("native", "at [0, 0] it is nan where float64 gives 4")
    assert native(put(over_underflow), constant(BF16, 4.0)).status == "passed"


def test_a_nan_of_an_overflow_is_inconclusive() -> None:
    verdict = native(put(minus_overflow), constant(F16, 4.0))
    assert (verdict.status, [doubt.reason for doubt in verdict.doubts]) == ("inconclusive", ["overflow"])
    assert native(put(over_underflow), constant(F16, 100.0)).doubts[0].reason == "overflow"
    assert native(put(minus_overflow), constant(BF16, 4.0)).status == "passed"


def test_a_nan_that_rounding_explains_is_inconclusive() -> None:
    nan = Delta(0, "output 0", overflow=True, undefined="at [0] it is nan where float64 gives 1e-09")
    assert judged(nan, Noise(0.0, 0.0)).kind == "wrong-value"
    assert judged(nan, Noise(math.inf, 0.0)).reason == "ill-conditioned"
    assert judged(nan, Noise(0.0, 0.0), used=RANGE).reason == "overflow"


def test_the_range_used_is_that_of_any_value() -> None:
    def by(factor: float) -> Program:
        return program(
            lambda b, x: b.call("aten::mul.Tensor", b.call("aten::mul.Tensor", x, factor), 1 / factor),
            F16, kind="constant", scale=4.0,
        )  # fmt: skip

    assert range_used(by(0.5)) == pytest.approx(4 / 65504)  # of the input
    assert range_used(by(2.0)) == pytest.approx(8 / 65504)
    assert range_used(by(32768.0)) == math.inf


def test_what_underflows_is_a_loss_of_precision() -> None:
    made = program(lambda b, x: b.call("aten::mul.Tensor", x, 1.0), F16)
    (finding,) = native(multiplied(2.0**-20, 2.0**20), made).findings
    assert finding.data["error"] > 10 * finding.data["limit"]


def test_a_pipeline_names_the_stage_that_loses_precision() -> None:
    made = long_program(F32, 64, 32, 0)

    def loses(gm: fx.GraphModule) -> None:
        PLANTED["a sum over ranks of float32 is sent in bf16"](gm)

    def halves(gm: fx.GraphModule) -> None:
        SOUND["products in halves"](gm)

    for stages in ([loses, halves], [halves, loses]):
        (finding,) = native(stages, made).findings
        assert finding.data["stage"].endswith("loses")


def test_process_groups_judge_by_the_same_limits(pool: Callable[[int], ProcessGroupPool]) -> None:
    made = long_program(BF16, 64, 32, 0)
    sound = native(SOUND["products in halves"], made, confirm=pool(2))
    assert sound.status == "passed"
    assert sound.executors == ["lockstep", "gloo"]
    name = "a residual of bf16 is kept in fp8"
    there = native(PLANTED[name], made, confirm=pool(2), always_confirm=True).runs[-1]
    assert there.executor == "gloo"
    (finding,) = native_differences(there, lambda: rounding_noise(made, LOCKSTEP.run(made)), never)
    assert isinstance(finding, Finding)
    assert finding.data["executor"] == "gloo"


def test_a_finding_of_a_program_with_8_bit_values_is_explained() -> None:
    inputs = [
        InputSpec("x", (4, 8), BF16, (("tp", VARYING),)),
        InputSpec("w", (8, 4), torch.float8_e4m3fn),
        InputSpec("scale", (1,), recipe=Recipe("norm_weight")),
    ]

    def build(b: GraphBuilder) -> Any:
        x, w, scale = [b.input(one.name) for one in inputs]
        narrow = b.call("aten::_to_copy", x, dtype=torch.float8_e4m3fn)
        return b.call("tensor_cast::fp8_linear", narrow, w, scale, scale, None, BF16), b.call("aten::add.Tensor", x, x)

    made = spmd_program(TP2, inputs, build)
    verdict = native(PLANTED["a residual of bf16 is kept in fp8"], made)
    (finding,) = verdict.findings
    found = diagnose(made, verdict.pair.rewritten, finding)
    assert found.first is not None
    assert "to_copy" in found.first.node


def test_an_error_that_few_elements_make_up_scatters_as_theirs() -> None:
    """Of 400 elements of one kind a root mean square hardly scatters; of one that is far more sensitive it does."""
    error = _delta(1.5, 1.5, elements=400)
    assert judged(error, Noise(1.0, 1.0, scatter=0.04)) is not None
    assert judged(error, Noise(1.0, 1.0, scatter=0.7)) is None
    assert judged(_delta(9.0, 9.0, elements=400), Noise(1.0, 1.0, scatter=0.7)) is not None
