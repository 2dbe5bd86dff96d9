"""The verdict on a pass, from the verdicts on its programs."""

from __future__ import annotations

from collections.abc import Collection

from tcverify.campaign.events import CampaignVerdict, Statistics
from tcverify.program import Contract

#: The largest share of inconclusive programs with which a pass passes.
MOST_INCONCLUSIVE = 0.2

#: What helps where programs are inconclusive, by the reason of their doubts.
REMEDIES = {
    "unsupported-op": "declare the op: tcverify.register_dialect, or --op-law for a row-wise, pointwise or linear one",
    "ill-conditioned": "judge values exactly: --domain exact",
    "overflow": "judge values exactly: --domain exact",
    "executor-failed": "see what this machine can run with `tcverify doctor`, or judge in lockstep alone: --confirm none",
    "not-judged": "choose the check that is missing: --checks",
    "not-portable": "give the pass as a module and an attribute, and its ops as registered ops",
    "law-needed": "declare the law of the op: --op-law",
    "placement-needed": "state which inputs are equal on the ranks: --placement",
    "pass-memory": "give the pass more memory, or look for what it keeps between programs",
}

#: Reasons that leave a verdict as it is: programs that do not run themselves, which the search may make, and programs that the
#: pass says are none of its business.
_ASIDE = ("ill-typed-program", "declined")


def judge_campaign(
    counts: Statistics, counterexamples: int, contract: Contract, decided: str = ""
) -> tuple[CampaignVerdict, str]:
    """Return the verdict of a campaign, and the reason if the pass neither passed nor is refuted.

    Args:
        counterexamples: how many it has found.
        contract: what the pass promises.
        decided: the condition that kept the pass from changing anything, if it is known.
    """
    if counterexamples or counts.refuted:
        return "refuted", ""
    if counts.passed == 0:
        known = [("with known findings", counts.known)] if counts.known else []
        reason = ", ".join(f"{n} {r}" for r, n in [*counts.doubts.most_common(), *known]) or "no program was verified"
        return "nothing tested", f"no program passed ({reason})"
    if counts.changed == 0 and not contract.identity:
        return "nothing tested", f"the pass changed none of {counts.programs} programs{decided and f': {decided}'}"
    unsure = counts.inconclusive - sum(counts.doubts[reason] for reason in _ASIDE)
    if unsure > MOST_INCONCLUSIVE * counts.programs:
        reason, number = next(one for one in counts.doubts.most_common() if one[0] not in _ASIDE)
        share = f"{100 * unsure / counts.programs:.0f} % of the programs are inconclusive"
        remedy = REMEDIES.get(reason, "")
        return "inconclusive", f"{share}, {number} of them by {reason}{remedy and f'; {remedy}'}"
    return "passed", ""


def tolerated(failing: Collection[str]) -> set[CampaignVerdict]:
    """The verdicts that do not fail a run.

    Args:
        failing: conditions of `--fail-on`. With "refuted" among them, only these fail a run; else all verdicts but passed do.
    """
    found: set[CampaignVerdict] = {"passed"}
    if "refuted" in failing:
        found.add("inconclusive")
        if "vacuity" not in failing:
            found.add("nothing tested")
    return found


__all__ = ["judge_campaign", "tolerated"]
