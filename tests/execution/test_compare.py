"""Comparing what two programs computed."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tcverify.execution import Delta, RankResult, compare_ranks, digest
from tcverify.execution.compare import overlapping_outputs
from tests import warm

INF, NAN = math.inf, math.nan


def result(*outputs: Any, structure: str = "[*]", inputs: dict[str, torch.Tensor] | None = None) -> RankResult:
    inputs = inputs or {}
    return RankResult(3, list(outputs), structure, list(inputs.values()), list(inputs), bool(inputs))


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def delta(expected: Any, actual: Any) -> Delta:
    """How one output differs."""
    (found,) = compare_ranks(result(expected), result(actual))
    assert found.rank == 3
    assert found.label == "output 0"
    return found


# ------------------------------------------------------------------------------------------------------ values


def test_equal_values_differ_by_zero_and_show_their_scale() -> None:
    found = delta(tensor(1, -4), tensor(1, -4))
    assert (found.difference, found.scale, found.problem, found.overflow) == (0.0, 4.0, None, False)


def test_the_largest_difference_is_shown_with_its_place() -> None:
    found = delta(tensor(1, -4, 2).reshape(1, 3), tensor(1.5, -4, 5).reshape(1, 3))
    assert (found.difference, found.worst, found.expected, found.actual) == (3.0, (0, 2), 2.0, 5.0)
    assert found.scale == 4.0


def test_empty_tensors_are_equal() -> None:
    found = delta(torch.zeros(2, 0), torch.zeros(2, 0))
    assert (found.difference, found.problem) == (0.0, None)


def test_scalar_tensors_are_compared() -> None:
    assert delta(torch.tensor(1.0), torch.tensor(1.25)).difference == 0.25


# ------------------------------------------------------------------------------------------------------ not finite


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_same_value_that_is_not_finite_is_equal(value: float) -> None:
    found = delta(tensor(1, value, 3), tensor(1, value, 3.5))
    assert found.problem is None
    assert not found.overflow
    assert (found.difference, found.scale, found.worst) == (0.5, 3.0, (2,))


@pytest.mark.parametrize(
    ("expected", "actual"), [(1.0, NAN), (NAN, 1.0), (INF, -INF), (INF, NAN), (NAN, INF), (INF, 1.0)]
)
def test_another_pattern_of_nan_and_inf_is_a_problem(expected: float, actual: float) -> None:
    found = delta(tensor(7, expected), tensor(7, actual))
    assert found.problem == f"at [1] it is {actual} instead of {expected}"
    assert not found.overflow


def test_an_infinity_in_place_of_a_finite_value_is_overflow() -> None:
    found = delta(tensor(1, 1e300), tensor(1, INF))
    assert found.overflow
    assert found.problem is None


def test_overflow_beside_a_nan_is_a_problem() -> None:
    found = delta(tensor(1, 1), tensor(INF, NAN))
    assert not found.overflow
    assert found.problem == "at [0] it is inf instead of 1.0"


def test_values_whose_difference_overflows_are_not_equal() -> None:
    found = delta(tensor(1.5e308), tensor(-1.5e308))
    assert found.difference == INF


# ------------------------------------------------------------------------------------------------------ other types


def test_another_shape_is_a_problem() -> None:
    assert delta(torch.zeros(2, 3), torch.zeros(3, 2)).problem == "it has shape [3, 2] instead of [2, 3]"


def test_another_dtype_is_a_problem() -> None:
    found = delta(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
    assert found.problem == "it has dtype torch.bool instead of torch.int64"


def test_integers_are_compared_exactly() -> None:
    found = delta(torch.tensor([1, 2**60]), torch.tensor([1, 2**60 + 1]))
    assert found.problem == f"at [1] it is {2**60 + 1} instead of {2**60}"
    assert delta(torch.tensor([1, 2]), torch.tensor([1, 2])).problem is None


def test_booleans_are_compared_exactly() -> None:
    assert delta(torch.tensor(True), torch.tensor(False)).problem == "at [] it is False instead of True"


@pytest.mark.parametrize(("expected", "actual"), [(1, 2), (1, 1.0), (1, True), (None, 0), ("a", "b")])
def test_scalars_are_compared_with_their_type(expected: Any, actual: Any) -> None:
    assert delta(expected, actual).problem == f"it is {actual!r} instead of {expected!r}"


@pytest.mark.parametrize("value", [1, 2.5, None, True, "a", INF, NAN])
def test_equal_scalars_are_equal(value: Any) -> None:
    assert delta(value, value).problem is None


def test_a_nan_scalar_of_another_run_is_the_same_nan() -> None:
    assert delta(float("nan"), float("nan")).problem is None


def test_a_scalar_is_no_tensor() -> None:
    assert delta(torch.zeros(2, 3), 0.0).problem == "it is 0.0 instead of a tensor of shape [2, 3]"
    assert delta(None, torch.zeros(2)).problem == "it is a tensor of shape [2] instead of None"


# ------------------------------------------------------------------------------------------------------ structure


@pytest.mark.parametrize(
    "rewritten",
    [result(tensor(1)), result(tensor(1), tensor(2), structure="(*, *)")],
    ids=["fewer", "otherwise nested"],
)
def test_other_outputs_are_one_problem(rewritten: RankResult) -> None:
    (found,) = compare_ranks(result(tensor(1), tensor(2)), rewritten)
    assert found.label == "the outputs"
    assert found.problem is not None
    assert found.problem.startswith("the original returns [*], the rewritten program ")


def test_every_output_is_compared() -> None:
    found = compare_ranks(result(tensor(1), tensor(2)), result(tensor(1), tensor(4)))
    assert [(d.label, d.difference) for d in found] == [("output 0", 0.0), ("output 1", 2.0)]


def test_inputs_are_compared_after_the_run() -> None:
    before, after = result(inputs={"x": tensor(1)}), result(inputs={"x": tensor(3)})
    (found,) = compare_ranks(before, after)
    assert (found.label, found.difference) == ("input 'x' after the run", 2.0)


# ------------------------------------------------------------------------------------------------------ storage


def test_a_rewrite_that_splits_shared_outputs_is_seen() -> None:
    shared = tensor(1, 2)
    found = compare_ranks(result(shared, shared[:1]), result(shared, shared[:1].clone()))
    (alias,) = [d for d in found if d.alias]
    assert alias.label == "output 1"
    assert alias.problem == "it shares memory with output 0 in the original, with no earlier output after the pass"


def test_a_rewrite_that_joins_outputs_is_seen() -> None:
    one, shared = tensor(1, 2), tensor(1, 2)
    found = compare_ranks(result(one, one.clone()), result(shared, shared))
    assert [d.label for d in found if d.alias] == ["output 1"]


def test_parts_that_lie_side_by_side_are_like_tensors_of_their_own() -> None:
    """Gradients in a bucket, one behind the other or as columns: a write into one does not show in the other."""
    rows, columns = tensor(1, 2, 3, 4).split(2), torch.arange(8.0).view(2, 4).split(2, 1)
    apart = [part.clone() for part in (*rows, *columns)]
    assert not any(d.alias for d in compare_ranks(result(*rows, *columns), result(*apart)))


def test_outputs_are_told_with_all_that_they_overlap() -> None:
    base = torch.arange(8, dtype=torch.float64)
    outputs = (base[:4], base[4:], base[3:5], base[::2], base[1::2], base[:0], 7, base[5:].view(torch.int32)[2:])
    assert overlapping_outputs(result(*outputs)) == [[], [], [0, 1], [0, 1, 2], [0, 1, 2], [], [], [1, 3, 4]]
    assert overlapping_outputs(result(base.expand(3, 8), base[7:])) == [[], [0]]
    gaps = base.as_strided((2, 2), (0, 3))  # elements 0 and 3, twice each
    assert overlapping_outputs(result(gaps, base[1:3], base[3:])) == [[], [], [0]]
    found = compare_ranks(result(*outputs), result(*outputs[:2], base[3:5].clone(), *outputs[3:]))
    (alias,) = [d for d in found if d.alias]
    assert alias.problem == "it shares memory with outputs 0, 1 in the original, with no earlier output after the pass"


def test_outputs_that_share_storage_in_both_are_equal() -> None:
    one, other = tensor(1, 2), tensor(1, 2)
    assert not any(d.alias for d in compare_ranks(result(one, 5, one[1:]), result(other, 5, other[1:])))


def test_equal_scalars_share_nothing() -> None:
    assert not any(d.alias for d in compare_ranks(result(1, 1), result(1, 1)))


# ------------------------------------------------------------------------------------------------------ digest


def test_a_digest_is_equal_in_another_process() -> None:
    code = (
        "import torch; from tcverify.execution import digest\n"
        "print(digest([torch.arange(6.0, dtype=torch.float64), torch.tensor([True, False])]))"
    )
    ended, said, errors = warm.run("-c", code, cwd=Path.cwd(), env=os.environ)
    assert ended == 0, errors
    here = digest([torch.arange(6.0, dtype=torch.float64), torch.tensor([True, False])])
    assert said.strip() == str(here)


def test_a_digest_sums_magnitudes() -> None:
    assert [magnitude for _, magnitude in digest([tensor(1, -2), torch.tensor([3, 4])])] == [3.0, 7.0]


def test_a_digest_sees_sign_order_and_value() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(40, generator=generator, dtype=torch.float64)
    whole = digest([value])
    assert digest([value.clone()]) == whole
    assert digest([value.flip(0)]) != whole
    assert digest([-value]) != whole
    changed = value.clone()
    changed[7] += 1e-9
    assert digest([changed]) != whole


def test_a_digest_reads_values_and_not_strides() -> None:
    value = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    assert digest([value.t().contiguous().t()]) == digest([value])


def test_what_is_no_tensor_has_an_empty_digest() -> None:
    assert digest([None, 3, torch.zeros(0)]) == [[0.0, 0.0]] * 3


def test_outputs_without_elements_share_nothing() -> None:
    """A pass may write into a part of a value in place; where that part is empty, nobody can tell."""
    one, other = torch.zeros(2), torch.zeros(2)
    assert not any(d.alias for d in compare_ranks(result(one, one[2:]), result(other, torch.zeros(0))))
    assert any(d.alias for d in compare_ranks(result(one, one[1:]), result(other, torch.zeros(1))))
