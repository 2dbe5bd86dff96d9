"""Equivalence in the native domain: the rewritten program is about as accurate as the original."""

from __future__ import annotations

import torch

from tcverify.execution import Comparison, Delta
from tcverify.program.finding import Doubt, Finding

#: The rewritten version may have so many times the original's own error …
OWN_FACTOR = 8.0
#: … plus so many units of roundoff of the largest magnitude.
ROUNDOFFS = 16.0


def native_differences(comparison: Comparison) -> list[Finding | Doubt]:
    """Judge one comparison: at most one finding, about the first output that is less accurate than it may be."""
    by_label: dict[str, list[Delta]] = {}
    for delta in comparison.deltas:
        by_label.setdefault(delta.label, []).append(delta)
    doubts: list[Finding | Doubt] = []
    for label, deltas in by_label.items():
        problem = next((d for d in deltas if d.problem is not None), None)
        if problem is not None and not problem.discrete:
            return [_finding(problem, f"{problem.problem}", comparison)]
        if problem is not None or any(d.overflow for d in deltas):
            doubts.append(Doubt("overflow", f"{label} overflows or flips in the program's own dtypes"))
            continue
        unit = max(
            torch.finfo(d.dtype).eps / 2 if d.dtype is not None and d.dtype.is_floating_point else 0 for d in deltas
        )
        scale, own = max(d.scale for d in deltas), max(d.own for d in deltas)
        worst = max(deltas, key=lambda d: d.difference)
        limit = OWN_FACTOR * own + ROUNDOFFS * unit * scale
        if worst.difference > limit:
            detail = (
                f"at {list(worst.worst)} it is {worst.actual:.9g} where float64 gives {worst.expected:.9g}: error "
                f"{worst.difference:.2e}, allowed {limit:.2e} = {OWN_FACTOR:g} × the original's own {own:.2e} + "
                f"{ROUNDOFFS:g} × {unit:.1e} × the scale {scale:.2e}"
            )
            return [_finding(worst, detail, comparison, limit)]
    return doubts


def _finding(delta: Delta, detail: str, comparison: Comparison, limit: float | None = None) -> Finding:
    title = f"{delta.label} is less accurate than rounding explains on rank {delta.rank}"
    if delta.problem is not None:
        title = f"{delta.label} is wrong on rank {delta.rank}"
    data = {
        "label": delta.label, "ranks": [delta.rank], "executor": comparison.executor, "domain": "native",
        "difference": delta.difference, "limit": limit,
    }  # fmt: skip
    kind = "wrong-alias" if delta.alias else "wrong-value"
    return Finding(kind, "equivalence", title, detail, None, delta.rank, data)


__all__ = ["native_differences"]
