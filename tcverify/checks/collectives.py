"""Collectives: the calls of every rank match those of its peers, and no rank waits forever."""

from __future__ import annotations

from tcverify.checks.evidence import Evidence
from tcverify.checks.host_ir.collective_matching import streams_meet
from tcverify.execution import Run
from tcverify.program.finding import Doubt, Finding


def check_collectives(evidence: Evidence) -> list[Finding | Doubt]:
    """Report deadlocks, with their cycle, and collectives on which members disagree, as modelled by lockstep.

    There, hosts block at waits. A deadlock of host IR that would not occur on streams is a doubt.
    """
    rewritten = evidence.pair.rewritten
    for comparison in evidence.runs:
        finding = _judge(comparison.rewritten)
        if finding is not None and finding.kind == "deadlock" and rewritten is not None and streams_meet(rewritten):
            first = finding.detail.splitlines()[0]
            sentence = f"hosts that block at waits wait forever ({first}); streams would continue, but it was not run on streams"
            return [Doubt("unsupported-op", sentence)]
        if finding is not None:
            return [finding]
    return []


def _judge(run: Run) -> Finding | None:
    if run.mismatch is not None:
        sentence, calls = run.mismatch
        lines = [f"rank {rank}: {call.node}: {call.collective}" for rank, call in sorted(calls.items())]
        rank, call = next(iter(sorted(calls.items())))
        return Finding(
            "collective-mismatch", "collectives", f"ranks disagree: {sentence}", "\n".join(lines), call.node, rank
        )
    if run.hang is not None:
        first = run.hang.waits[0]
        waits = [str(wait) for wait in run.hang.waits]
        if run.hang.cycle:
            title = f"deadlock among ranks {', '.join(str(w.rank) for w in run.hang.waits)}"
        else:
            title = f"rank {first.rank} waits forever for rank {run.hang.finished}"
            waits.append(f"rank {run.hang.finished} has finished without joining")
        data = {"waits": [{"rank": w.rank, "node": w.call.node, "text": str(w)} for w in run.hang.waits]}
        return Finding("deadlock", "collectives", title, "\n".join(waits), first.call.node, first.rank, data)
    return None
