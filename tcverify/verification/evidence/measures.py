"""Evidence on the original alone: `conditioning`, `rounding`, `op-laws`. All are costly, and seldom asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

from tcverify.checks import Evidence
from tcverify.checks.values.op_laws import law_needed
from tcverify.execution import Noise, rounding_noise
from tcverify.program import Doubt, Program


def conditioning(evidence: Evidence) -> dict[str, float]:
    """By how much outputs change when what is computed on the way changes a little, by label."""
    assert evidence.request is not None
    return evidence.request.lockstep.probe(evidence.pair.original, evidence.request.baseline)


def rounding(evidence: Evidence) -> Mapping[str, Noise]:
    """What rounding to the program's own dtypes makes of outputs, by label."""
    assert evidence.request is not None
    return rounding_noise(evidence.pair.original, evidence.request.baseline)


def op_laws(evidence: Evidence) -> Callable[[Program], Doubt | None]:
    """On which law of an op it depends whether a rewritten program is equal to the original."""
    return cache(partial(law_needed, evidence.pair.original))
