"""The verdict on a pass, from the verdicts on its programs."""

from __future__ import annotations

from tcverify.campaign.events import CampaignVerdict, Statistics
from tcverify.program import Contract


def judge_campaign(counts: Statistics, counterexamples: int, contract: Contract) -> tuple[CampaignVerdict, str]:
    """Return the verdict of a campaign, and why nothing was tested where that is the verdict.

    Args:
        counterexamples: how many it has found.
        contract: what the pass promises.
    """
    if counterexamples or counts.refuted:
        return "refuted", ""
    if counts.passed == 0:
        known = [("with known findings", counts.known)] if counts.known else []
        reason = ", ".join(f"{n} {r}" for r, n in [*counts.doubts.most_common(), *known]) or "no program was verified"
        return "nothing tested", f"no program passed ({reason})"
    if counts.changed == 0 and not contract.identity:
        return "nothing tested", f"the pass changed none of {counts.programs} programs"
    return "passed", ""


__all__ = ["judge_campaign"]
