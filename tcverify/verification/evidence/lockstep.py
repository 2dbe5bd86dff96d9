"""Evidence `lockstep`: both versions, with all ranks in this process."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.execution import Comparison
from tcverify.program import Doubt


def run_lockstep(evidence: Evidence) -> list[Comparison]:
    """Run the rewritten program for comparison with the original's run, unless the pass's process has done so."""
    assert evidence.request is not None
    pair, baseline, lockstep = evidence.pair, evidence.request.baseline, evidence.request.lockstep
    if pair.foreign is not None:
        if pair.foreign.judged is not None:
            return [pair.foreign.judged]
        evidence.doubt(Doubt("unsupported-op", pair.foreign.why))
        return []
    if pair.rewritten is None:
        return []
    after = baseline if pair.rewritten is pair.original else lockstep.run(pair.rewritten, beside=baseline)
    return [lockstep.compare_runs(baseline, after)]
