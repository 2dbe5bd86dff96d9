"""Equivalence: on every rank, the rewritten program computes what the original computes."""

from __future__ import annotations

import math
from collections.abc import Callable

from tcverify.checks.evidence import Evidence
from tcverify.checks.values.arena import arena_findings
from tcverify.checks.values.exact import agrees, exact_differences
from tcverify.checks.values.native import native_differences
from tcverify.checks.values.precision import note_coarser_dtype
from tcverify.execution import Comparison, Delta
from tcverify.program.finding import Doubt, Finding, Note, Said

#: A difference above PROBE_FACTOR · probe + FLOOR · scale is refuted.
PROBE_FACTOR = 16.0
FLOOR = 2.0**-46
#: Outputs whose probe exceeds this share of their scale are too ill-conditioned to judge, unless it is no larger share of the
#: difference either: where values cancel, the scale is next to nothing.
CONDITIONING = 1e-6


def check_equivalence(evidence: Evidence) -> list[Said]:
    """Compare outputs, mutated inputs and overlaps of outputs in memory, on every rank, in all executors and domains that ran.

    In float64 a difference counts if it exceeds the changes of the original itself under tiny perturbations; in the
    native domain, if the rewritten program's error exceeds what rounding explains; in the exact domain always, if that domain
    is applicable: see semantics, "Number domains". If float64 cannot judge, the exact domain does. Programs with
    communication buffers must compute the same with these in an arena. If a difference depends on a law of an op of
    which only the signature is known, it is a doubt.
    """
    found = _judged(evidence)
    wrong = [one for one in found if isinstance(one, Finding) and one.kind == "wrong-value"]
    needed = evidence.law(evidence.pair.rewritten) if wrong and evidence.pair.rewritten is not None else None
    return found if needed is None else [*(one for one in found if one not in wrong), needed]


def _judged(evidence: Evidence) -> list[Said]:
    found: list[Said] = []
    exact = [c for c in evidence.runs if c.domain.startswith("exact") and c.original.finished]
    for comparison in evidence.runs:
        if comparison.domain.startswith("exact"):
            continue
        if not comparison.original.finished:
            continue
        failed = comparison.rewritten.error
        if failed is not None and failed.error is not None:
            title = f"the rewritten program raises on rank {failed.rank}: {failed.error}"
            data = {} if comparison.domain == "float64" else {"domain": comparison.domain}
            error = failed.error
            found.append(
                Finding("rewritten-raises", "equivalence", title, error.message, error.node, failed.rank, data)
            )
        elif comparison.domain == "native":
            found += native_differences(comparison, evidence.noise, evidence.range_used)
        else:
            found += differences(comparison, evidence.probe)
        if found:
            break
    if not any(isinstance(one, Finding) for one in found):
        found += arena_findings(evidence)
    if any(isinstance(one, Finding) for one in found):
        return found
    pair = evidence.pair
    if pair.changed and pair.rewritten is not None and all(c.domain != "native" for c in evidence.runs):
        note = note_coarser_dtype(pair.original, pair.rewritten)
        found += [note] if note is not None else []
    if evidence.aside and evidence.request is not None and evidence.request.domain == "exact":
        return [*found, Note("exact-aside", evidence.aside)]
    if exact and all(c.rewritten.finished and agrees(c) for c in exact):
        return [_decided(one) if isinstance(one, Doubt) and one.reason == "ill-conditioned" else one for one in found]
    return found + exact_differences(exact, evidence.explain)


def _decided(doubt: Doubt) -> Note:
    return Note("exact-decided", f"{doubt.detail}, but the versions agree in the exact domain")


def differences(comparison: Comparison, probe: Callable[[], dict[str, float]]) -> list[Finding | Doubt]:
    """Judge the deltas of one comparison: at most one finding per kind, about the first output that shows it."""
    findings: dict[str, Finding] = {}
    doubts: dict[str, Doubt] = {}
    limits: dict[str, float] | None = None
    for label, all_deltas in _by_label(comparison.deltas).items():
        shared = next((d for d in all_deltas if d.alias), None)
        if shared is not None:
            findings.setdefault("wrong-alias", _finding("wrong-alias", shared, f"{shared.problem}", comparison))
        deltas = [d for d in all_deltas if not d.alias]
        problem = next((d for d in deltas if d.problem is not None), None)
        if problem is not None:
            if all(d.discrete for d in deltas if d.problem is not None):
                limits = probe() if limits is None else limits
                if math.isinf(limits.get(label, 0.0)):
                    sentence = f"{label} flips under perturbations of 2⁻⁵¹"
                    doubts.setdefault("ill-conditioned", Doubt("ill-conditioned", sentence))
                    continue
            findings.setdefault("wrong-value", _finding("wrong-value", problem, f"{problem.problem}", comparison))
            continue
        if not deltas:
            continue
        if any(d.overflow for d in deltas):
            doubts.setdefault("overflow", Doubt("overflow", f"{label} overflows after the pass"))
        scale = max(d.scale for d in deltas)
        worst = max(deltas, key=lambda d: d.difference)
        if worst.difference <= FLOOR * scale:
            continue
        if limits is None:
            limits = probe()
        noise = limits.get(label, 0.0)
        if math.isinf(noise) or noise > CONDITIONING * max(scale, worst.difference):
            sentence = f"{label} changes by {noise:.1e} of {scale:.1e} under perturbations of 2⁻⁵¹"
            doubts.setdefault("ill-conditioned", Doubt("ill-conditioned", sentence))
        elif not worst.difference <= PROBE_FACTOR * noise + FLOOR * scale:
            findings.setdefault("wrong-value", _finding("wrong-value", worst, _sizes(worst, scale, noise), comparison))
    found = sorted(findings.values(), key=lambda finding: finding.kind == "wrong-alias")  # values first
    return [*found, *(doubts.values() if not findings else ())]


def _by_label(deltas: list[Delta]) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {}
    for delta in deltas:
        found.setdefault(delta.label, []).append(delta)
    return found


def _sizes(delta: Delta, scale: float, noise: float) -> str:
    ratio = f", {delta.difference / noise:.1e} times the rounding error" if noise and math.isfinite(noise) else ""
    return (
        f"at {list(delta.worst)} it is {delta.actual:.9g} instead of {delta.expected:.9g} "
        f"(difference {delta.difference:.2e}, scale {scale:.2e}{ratio})"
    )


def _finding(kind: str, delta: Delta, detail: str, comparison: Comparison) -> Finding:
    ranks = sorted({d.rank for d in comparison.deltas if d.label == delta.label and (d.problem or d.difference)})
    where = f"rank {delta.rank}" if len(ranks) < 2 else f"ranks {', '.join(map(str, ranks[:8]))}"
    what = "shares memory differently" if kind == "wrong-alias" else "is wrong"
    title = f"{delta.label} {what} on {where}"
    data = {
        "label": delta.label,
        "ranks": ranks,
        "executor": comparison.executor,
        "difference": delta.difference if math.isfinite(delta.difference) else None,
    }
    return Finding(kind, "equivalence", title, detail, None, delta.rank, data)
