"""Interleavings: what the streams of a lowered program do in other orders, and what happens-before says, agree.

What an order shows, happens-before must have found: always. What happens-before finds, an order must show: where every pair of
ops was inverted that some order inverts. A disagreement means that one of the two is wrong, which is no fault of the pass.
"""

from __future__ import annotations

from tcverify.checks.evidence import Evidence
from tcverify.checks.happens_before import check_happens_before
from tcverify.execution import Exploration
from tcverify.program.finding import Doubt, Finding

CHECK = "interleavings"

#: What an order shows of a race, and of collectives that nothing orders.
_SHOWN = {"race": ("RAW", "WAR", "WAW", "output"), "unordered-collectives": ("collective-order",)}


def check_interleavings(evidence: Evidence) -> list[Finding | Doubt]:
    """Compare what was observed in the orders that were played with the findings of happens-before."""
    exploration = evidence.exploration
    if exploration is None:
        return []
    static = check_happens_before(evidence)
    if any(isinstance(found, Doubt) for found in static):  # it does not know what some op reads
        return []
    kinds = {found.kind for found in static if isinstance(found, Finding)}
    if exploration.observations and not kinds:
        return [_unfounded(exploration)]
    if exploration.complete and not exploration.settled and kinds <= _SHOWN.keys():
        for found in static:
            if isinstance(found, Finding) and exploration.shown(_SHOWN[found.kind]) is None:
                return [_unseen(exploration, found)]
    return []


def _unfounded(exploration: Exploration) -> Finding:
    seen = exploration.observations[0]
    events = [str(event) for event in seen.events]
    data = {"order": seen.order, "events": events, "observed": seen.kind}
    title = f"an order of the streams goes wrong, in which happens-before finds nothing: {seen.text}"
    return Finding("executor-divergence", CHECK, title, "\n".join(events), seen.node, seen.rank, data)


def _unseen(exploration: Exploration, found: Finding) -> Finding:
    title = f"none of {len(exploration.orders)} orders of the streams shows what happens-before finds: {found.title}"
    return Finding("executor-divergence", CHECK, title, found.detail, found.node, found.rank)


__all__ = ["check_interleavings"]
