"""The kinds of evidence by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcverify.registry.registry import Registry

#: What takes each kind of evidence: a function of `Evidence`, called when a check first asks for the kind.
EVIDENCE: Registry[Callable[..., Any]] = Registry(
    {
        "lockstep": "tcverify.verification.evidence.lockstep:take",
        "domain": "tcverify.verification.evidence.domain:take",
        "second-application": "tcverify.verification.evidence.second_application:take",
        "stream-orders": "tcverify.verification.evidence.stream_orders:take",
        "timings": "tcverify.verification.evidence.timings:take",
        "arena": "tcverify.verification.evidence.arena:take",
        "exact-difference": "tcverify.verification.evidence.exact_difference:take",
        "conditioning": "tcverify.verification.evidence.measures:conditioning",
        "rounding": "tcverify.verification.evidence.measures:rounding",
        "op-laws": "tcverify.verification.evidence.measures:op_laws",
    }
)

__all__ = ["EVIDENCE"]
