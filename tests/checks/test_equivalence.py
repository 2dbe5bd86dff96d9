"""How differences of outputs are judged in float64, on deltas written by hand."""

from __future__ import annotations

import math

import pytest

from tcverify.checks.values.equivalence import FLOOR, PROBE_FACTOR, differences
from tcverify.execution import Comparison, Delta, Run
from tcverify.program.finding import Doubt, Finding

NOISE = 1e-14


def judged(*deltas: Delta, noise: float = NOISE) -> list[Finding | Doubt]:
    comparison = Comparison("lockstep", Run("lockstep", []), Run("lockstep", []))
    comparison.deltas += deltas
    return differences(comparison, lambda: {"output 0": noise})


def delta(difference: float, rank: int = 0, scale: float = 1.0) -> Delta:
    return Delta(rank, "output 0", difference=difference, scale=scale, worst=(0,))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_difference_counts_beyond_a_multiple_of_what_the_original_shows(scale: float) -> None:
    limit = PROBE_FACTOR * NOISE + FLOOR * scale
    assert judged(delta(0.99 * limit, scale=scale)) == []
    (found,) = judged(delta(1.01 * limit, scale=scale))
    assert isinstance(found, Finding)
    assert (found.kind, found.title) == ("wrong-value", "output 0 is wrong on rank 0")


def test_the_rank_that_differs_most_decides() -> None:
    (found,) = judged(delta(1e-15), delta(1e-3, rank=1), delta(1e-6, rank=2))
    assert isinstance(found, Finding)
    assert (found.rank, found.data["ranks"]) == (1, [0, 1, 2])


def test_what_the_original_itself_loses_is_not_judged() -> None:
    (found,) = judged(delta(1e-3), noise=1e-4)
    assert isinstance(found, Doubt)
    assert found.reason == "ill-conditioned"


@pytest.mark.parametrize(("difference", "kind"), [(1.0, "wrong-value"), (1e-12, "ill-conditioned")])
def test_where_values_cancel_a_difference_far_beyond_rounding_counts(difference: float, kind: str) -> None:
    (found,) = judged(delta(difference, scale=0.0), noise=1e-16)
    assert (found.reason if isinstance(found, Doubt) else found.kind) == kind


@pytest.mark.parametrize("flips", [False, True])
def test_another_integer_counts_unless_perturbations_flip_it(flips: bool) -> None:
    other = Delta(0, "output 0", problem="at [0] it is 1 instead of 0", discrete=True)
    (found,) = judged(other, noise=math.inf if flips else 0.0)
    assert (found.reason if isinstance(found, Doubt) else found.kind) == ("ill-conditioned" if flips else "wrong-value")


@pytest.mark.parametrize(("difference", "kinds"), [(0.0, ["wrong-alias"]), (1e-3, ["wrong-value", "wrong-alias"])])
def test_an_output_may_share_storage_differently_and_be_wrong_besides(difference: float, kinds: list[str]) -> None:
    shared = Delta(0, "output 0", problem="it shares memory with output 1 after the pass", alias=True)
    found = judged(delta(difference), shared)
    assert [one.kind for one in found if isinstance(one, Finding)] == kinds
