"""Evidence `second-application`: the program after the pass is applied to it a second time."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.execution import Comparison


def compare_second_application(evidence: Evidence) -> Comparison | None:
    """Compare the original with the program after the second application."""
    assert evidence.request is not None
    pair = evidence.pair
    ran_here = pair.foreign is None and bool(evidence.take("lockstep"))
    if pair.again is None or not ran_here:
        return None
    return evidence.request.lockstep.compare_with(evidence.request.baseline, pair.again)
