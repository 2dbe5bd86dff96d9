"""Evidence `timings`: the program with asynchronous collectives that read and write at other times."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.execution import Extreme, run_at_extremes


def run_extremes(evidence: Evidence) -> list[Extreme]:
    """Run the rewritten program at the extremes of asynchrony."""
    assert evidence.request is not None
    if evidence.rewritten is None:
        return []
    request = evidence.request
    return run_at_extremes(request.baseline, evidence.rewritten, request.lockstep, deep=request.deep)
