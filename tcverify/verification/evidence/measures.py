"""Evidence on programs alone: `conditioning`, `rounding`, `range`, `op-laws`. All are costly and rarely needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

from tcverify.checks import Evidence
from tcverify.checks.values.op_laws import law_needed
from tcverify.execution import Noise, range_used, rounding_noise
from tcverify.program import Doubt, Program


def conditioning(evidence: Evidence) -> dict[str, float]:
    """By how much outputs change under tiny perturbations of intermediate results, by label."""
    assert evidence.request is not None
    return evidence.request.lockstep.probe(evidence.pair.original, evidence.request.baseline)


def rounding(evidence: Evidence) -> Mapping[str, Noise]:
    """The effect on outputs of rounding to the program's own dtypes, by label."""
    assert evidence.request is not None
    return rounding_noise(evidence.pair.original, evidence.request.baseline)


def largest_range(evidence: Evidence) -> float:
    """The largest share of the range of its dtype that a value of either version uses."""
    versions = (evidence.pair.original, evidence.pair.rewritten)
    return max(range_used(one) for one in versions if one is not None)


def op_laws(evidence: Evidence) -> Callable[[Program], Doubt | None]:
    """The law of an op on which the equality of the rewritten program and the original depends."""
    return cache(partial(law_needed, evidence.pair.original))
