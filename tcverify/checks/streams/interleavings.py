"""Interleavings: happens-before agrees with runs of a lowered program in other stream orders; and results do not depend
on when asynchronous collectives read and write.

Every defect that an order shows must be found by happens-before. Every defect that happens-before finds must be shown by
an order, if all pairs of ops were tried in both orders. A disagreement is a bug of tcverify, and not the fault of the pass.
"""

from __future__ import annotations

from collections.abc import Callable

from tcverify.checks.evidence import Evidence
from tcverify.checks.streams.happens_before import find_order_violations
from tcverify.checks.values.equivalence import differences
from tcverify.execution import Comparison, Exploration, Extreme, Timing, overlapped_starts, run_at_extreme
from tcverify.execution.asynchrony import Moment
from tcverify.program import Program
from tcverify.program.finding import Doubt, Finding

CHECK = "interleavings"

#: Ways in which an order shows a race, or unordered collectives.
_SHOWN = {"race": ("RAW", "WAR", "WAW", "output"), "unordered-collectives": ("collective-order",)}


def check_interleavings(evidence: Evidence) -> list[Finding | Doubt]:
    """Judge observations under other orders and timings.

    Orders of streams are compared with the findings of happens-before. A program whose outputs depend on when its collectives
    read and write between their starts and their waits has a race.
    """
    raced = _raced(evidence)
    if raced is not None:
        return [raced]
    exploration = evidence.exploration
    if exploration is None:
        return []
    static = find_order_violations(evidence, everything=True)
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


def _raced(evidence: Evidence) -> Finding | Doubt | None:
    """The first extreme with values that differ from the original's, if the rewritten program itself agrees with it."""
    request, rewritten = evidence.request, evidence.rewritten
    if request is None or rewritten is None or not overlapped_starts(rewritten):
        return None
    if _judged(evidence.runs[0], evidence):
        return None

    def played(program: Program, words: str, timing: Moment | Timing) -> Extreme:
        return run_at_extreme(request.baseline, program, request.lockstep, words, timing)

    for extreme in evidence.extremes:
        seen = _judged(extreme.comparison, evidence)
        if not seen:
            continue
        if _judged(played(evidence.pair.original, extreme.words, extreme.timing).comparison, evidence):
            return Doubt("ill-typed-program", f"the original itself computes something else when {extreme.words}")
        node, extreme, finding = _to_blame(evidence, played) or (None, extreme, seen[0])
        title = f"{finding.title} when {extreme.words}"
        data = {**finding.data, "timing": extreme.words}
        detail = f"{finding.detail}\n{_UNWRITTEN}" if "it is nan instead of" in finding.detail else finding.detail
        return Finding("async-race", CHECK, title, detail, node, finding.rank, data)
    return None


#: Words for one collective at an extreme.
_WORDS: dict[Moment, str] = {
    "apart": "reads where it starts and writes as late as it may",
    "wait": "reads and writes as late as it may",
}


def _to_blame(
    evidence: Evidence, played: Callable[[Program, str, Moment | Timing], Extreme]
) -> tuple[str, Extreme, Finding] | None:
    """The first start whose collective alone makes the difference, if one does."""
    program = evidence.pair.rewritten or evidence.pair.original
    for start in overlapped_starts(program)[:MOST_STARTS]:
        for timing, words in _WORDS.items():
            extreme = played(program, f"'{start}' {words}", _only(start, timing))
            seen = _judged(extreme.comparison, evidence)
            if seen:
                return start, extreme, seen[0]
    return None


def _only(node: str, timing: Moment) -> Timing:
    return lambda rank, start: timing if start == node else "issue"


_UNWRITTEN = "(nan marks memory that a collective has not written yet)"

#: Largest number of starts that are tried one by one to find the one to blame.
MOST_STARTS = 64


def _judged(comparison: Comparison, evidence: Evidence) -> list[Finding]:
    run = comparison.rewritten
    if run.error is not None and run.error.error is not None:
        failed = run.error.error
        title = f"rank {run.error.rank} raises: {failed}"
        return [Finding("rewritten-raises", CHECK, title, failed.message, failed.node, run.error.rank)]
    if not run.finished:
        return [Finding("deadlock", CHECK, f"ranks wait forever ({run.why})")]
    return [found for found in differences(comparison, evidence.probe) if isinstance(found, Finding)]


def _unfounded(exploration: Exploration) -> Finding:
    seen = exploration.observations[0]
    events = [str(event) for event in seen.events]
    data = {"order": seen.order, "events": events, "observed": seen.kind}
    title = f"an order of the streams fails, although happens-before finds nothing: {seen.text}"
    return Finding("executor-divergence", CHECK, title, "\n".join(events), seen.node, seen.rank, data)


def _unseen(exploration: Exploration, found: Finding) -> Finding:
    title = f"none of {len(exploration.orders)} orders of the streams shows what happens-before finds: {found.title}"
    return Finding("executor-divergence", CHECK, title, found.detail, found.node, found.rank)


__all__ = ["check_interleavings"]
