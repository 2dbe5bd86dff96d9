"""A custom check: a pass adds no collectives."""

from tcverify import Evidence, Finding, register_check


def no_more_collectives(evidence: Evidence) -> list[Finding]:
    """Refutes a pass after which some rank enters more collectives than before."""
    if not evidence.runs:  # the rewritten program could not run: other checks report it
        return []
    run = evidence.runs[0]  # both versions in lockstep
    for before, after in zip(run.original.ranks, run.rewritten.ranks, strict=True):
        if len(after.calls) > len(before.calls):
            title = f"rank {after.rank} enters {len(after.calls)} collectives, {len(before.calls)} before the pass"
            return [
                Finding("more-collectives", "no-more-collectives", title, node=after.calls[-1].node, rank=after.rank)
            ]
    return []


register_check(
    "no-more-collectives", no_more_collectives, {"more-collectives": "there are more collectives than before"}
)
