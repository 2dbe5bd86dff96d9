"""Evidence `exact-difference`: why versions differ in the exact domain although they agree in float64."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.checks.values.exact import agrees
from tcverify.execution import Explanation, explain


def explain_difference(evidence: Evidence) -> Explanation | None:
    """Explain the first draw of the exact domain in which the versions differ."""
    original, rewritten = evidence.pair.original, evidence.rewritten
    exact = [comparison for comparison in evidence.runs if comparison.domain.startswith("exact")]
    if rewritten is None or not exact:
        return None
    draw = next((draw for draw, comparison in enumerate(exact) if not agrees(comparison)), 0)
    return explain(original, rewritten, draw)
