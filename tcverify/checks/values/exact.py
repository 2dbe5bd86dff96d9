"""Equivalence in the exact domain: both versions compute the same residues."""

from __future__ import annotations

from collections.abc import Callable

from tcverify.execution import Comparison, Delta, Explanation
from tcverify.program.finding import Finding, Note

#: Number of draws that do not differ by chance.
NOT_BY_CHANCE = 3


def agrees(comparison: Comparison) -> bool:
    """Whether both versions computed the same residues on every rank."""
    return not any(_differs(delta) for delta in comparison.deltas)


def _differs(delta: Delta) -> bool:
    """Nothing overflows in the field: an infinity that the original does not have is a different value."""
    return bool(delta.difference) or delta.problem is not None or delta.overflow


def filter_differing_draws(comparisons: list[Comparison]) -> list[Comparison]:
    """Return the draws in which the versions differ, unless these are so few that it may be chance.

    A single draw may differ by chance, if a divisor or an argument of max happens to be 0; and it may agree
    despite a defect, if a relu hides it. So if two draws disagree, more are made.
    """
    found = [comparison for comparison in comparisons if not agrees(comparison)]
    return found if len(found) >= min(len(comparisons), NOT_BY_CHANCE) else []


def exact_differences(comparisons: list[Comparison], explain: Callable[[], Explanation]) -> list[Finding | Note]:
    """Judge the draws of the exact domain, if float64 shows no difference.

    Args:
        comparisons: one per draw, from one executor.
        explain: returns why the versions differ; costly.
    """
    counted = filter_differing_draws(comparisons)
    if not counted:
        return []
    why = explain()
    if why.kind == "literal":
        return [Note("literal-changed", why.text)]
    if why.kind == "aside":
        return [Note("exact-aside", why.text)]
    first = counted[0]
    delta = next(d for d in first.deltas if _differs(d))
    ranks = sorted({d.rank for d in first.deltas if d.label == delta.label and _differs(d)})
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
    draws = f"in {len(counted)} of {len(comparisons)} draws" if len(comparisons) > 1 else "in one draw"
    detail = (
        f"{_difference(delta)}; the versions differ {draws} of the exact domain, by less than the precision of float64"
    )
    data = {"label": delta.label, "ranks": ranks, "executor": first.executor, "domain": "exact", "difference": None}
    title = f"{delta.label} is wrong on {where}, beyond the precision of float64"
    return [Finding("wrong-value", "equivalence", title, detail, None, delta.rank, data)]


def _difference(delta: Delta) -> str:
    if delta.problem is not None:
        return delta.problem
    if not delta.difference:
        return "it is infinite where the original's is not"
    return f"at {list(delta.worst)} it is {delta.actual:.0f} instead of {delta.expected:.0f} (mod 1048573)"


__all__ = ["agrees", "exact_differences", "filter_differing_draws"]
