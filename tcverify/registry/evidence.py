"""The kinds of evidence by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcverify.registry.registry import Registry

#: Provider of each kind of evidence: a function of `Evidence`, called when a check first asks for the kind.
EVIDENCE: Registry[Callable[..., Any]] = Registry(
    {
        "lockstep": "tcverify.verification.evidence.lockstep:run_lockstep",
        "domain": "tcverify.verification.evidence.domain:run_in_domain",
        "second-application": "tcverify.verification.evidence.second_application:compare_second_application",
        "stream-orders": "tcverify.verification.evidence.stream_orders:explore_streams",
        "timings": "tcverify.verification.evidence.timings:run_extremes",
        "arena": "tcverify.verification.evidence.arena:run_arena",
        "exact-difference": "tcverify.verification.evidence.exact_difference:explain_difference",
        "conditioning": "tcverify.verification.evidence.measures:conditioning",
        "rounding": "tcverify.verification.evidence.measures:rounding",
        "range": "tcverify.verification.evidence.measures:largest_range",
        "op-laws": "tcverify.verification.evidence.measures:op_laws",
    }
)

__all__ = ["EVIDENCE"]
