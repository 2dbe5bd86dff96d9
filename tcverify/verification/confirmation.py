"""Confirmation: programs that lockstep does not refute run on another executor, and the two must agree."""

from __future__ import annotations

from collections.abc import Callable

from tcverify.application import Pair
from tcverify.checks import Evidence, apply_checks
from tcverify.checks.evidence import doubt_of_error
from tcverify.checks.values.exact import agrees, filter_differing_draws
from tcverify.domains import FLOAT64, NATIVE, Domain, domain_of
from tcverify.errors import ExecutorError, ProgramError, UnsupportedOp
from tcverify.execution import WORDS, Comparison, Executor, Lockstep, Run, digest, overlapped_starts
from tcverify.program import Doubt, Finding, Note

#: Largest difference between lockstep and a process group, relative to the sum of magnitudes, beyond the probe.
DIVERGENCE = 2.0**-40


def confirming_domain(evidence: Evidence, findings: list[Finding], notes: list[Note]) -> Domain:
    """The domain in which the confirming executor runs: the requested one, if it can judge the program.

    Findings in float64 are confirmed in float64: other domains may not show them, or show another kind of finding.
    """
    if any(f.check == "equivalence" and f.domain == FLOAT64.name for f in findings):
        return FLOAT64
    for run in evidence.runs:
        if run.domain == "native":
            return NATIVE
    draws = [run for run in evidence.runs if run.domain.startswith("exact")]
    if draws and not any(n.reason in ("exact-aside", "literal-changed") for n in notes):
        # the first draw with the same result as all of them together
        chosen = filter_differing_draws(draws) or [run for run in draws if agrees(run)]
        return domain_of(chosen[0].domain)
    return FLOAT64


def worth_confirming(evidence: Evidence, findings: list[Finding], always: bool) -> bool:
    """Whether to run the process group: never for a program that would hang there, and for refuted programs only on request."""
    pair = evidence.pair
    if pair.rewritten is None or pair.foreign is not None or not evidence.runs:
        return False
    rewritten = evidence.runs[0].rewritten
    if rewritten.hang is not None or rewritten.mismatch is not None:
        return False
    return always or not findings


def start_confirmation(
    confirm: Executor, pair: Pair, domain: Domain, doubts: list[Doubt]
) -> Callable[[], Comparison] | None:
    """Start the confirming executor on both versions; None if it cannot run them."""
    if pair.rewritten is None:
        return None
    try:
        return confirm.start_comparison(pair.original, pair.rewritten, domain)
    except (UnsupportedOp, ExecutorError, ProgramError) as error:
        doubts.append(doubt_of_error(error))
    return None


def judge_confirmation(
    compare: Callable[[], Comparison],
    evidence: Evidence,
    findings: list[Finding],
    doubts: list[Doubt],
    notes: list[Note],
    checks: list[str],
) -> list[Finding]:
    """Judge the observations of the confirming executor; disagreement with lockstep is a separate finding."""
    pair = evidence.pair
    try:
        comparison = compare()
    except (UnsupportedOp, ExecutorError, ProgramError) as error:
        doubts.append(doubt_of_error(error))
        return findings
    name = comparison.executor
    alone = Evidence(pair, evidence.contract, taken={"lockstep": [comparison]}, measured=evidence)
    baseline = _counterpart(evidence.runs, comparison)
    evidence.taken["confirmation"] = [comparison]
    if not comparison.original.finished:
        title = f"the original runs in lockstep, but not on {name}: {comparison.original.why}"
        return [*findings, Finding("executor-divergence", "equivalence", title)]
    seen = apply_checks([c for c in checks if c in ("collectives", "equivalence")], alone, doubts, notes)
    kinds, there = {f.kind for f in findings if f.check == "equivalence"}, {f.kind for f in seen}
    if comparison.domain == "native":  # rounding may differ: near the limit, only one may see it
        findings = findings or seen
    elif any(f.kind == "async-race" for f in findings):
        pass  # which value a race shows depends on when collectives read and write, and so on the executor
    elif kinds != there and "equivalence" in checks:
        detail = f"lockstep: {', '.join(sorted(kinds)) or 'passed'}\n{name}: {', '.join(sorted(there)) or 'passed'}"
        detail += "".join(f"\n{f.title}: {f.detail}" for f in seen)
        title = f"lockstep and {name} disagree about the rewritten program"
        findings = [*findings, Finding("executor-divergence", "equivalence", title, detail)]
    original = comparison.reference or comparison.original
    disagreement = _divergence(baseline, original, evidence)
    if disagreement is not None and _explained_by_timing(baseline, original, evidence):
        doubts.append(Doubt("ill-typed-program", "the original itself computes something else when " + WORDS["apart"]))
    elif disagreement is not None:
        findings = [*findings, Finding("executor-divergence", "equivalence", disagreement)]
    return findings


def _explained_by_timing(baseline: Run, other: Run, evidence: Evidence) -> bool:
    """Whether the original has a race: lockstep agrees if its collectives read and write when those of a process group do."""
    program = evidence.pair.original
    if not overlapped_starts(program):
        return False
    apart = Lockstep().run(program, domain=domain_of(baseline.domain), timing="apart")
    return apart.finished and _divergence(apart, other, evidence) is None


def _counterpart(runs: list[Comparison], comparison: Comparison) -> Run:
    """The run of the original in lockstep with which another executor must agree."""
    exact = next((run for run in runs if run.domain == comparison.domain and run.domain.startswith("exact")), None)
    return (exact or runs[0]).original


def _divergence(lockstep: Run, other: Run, evidence: Evidence) -> str | None:
    """Compare the original's outputs in lockstep with their digests from another executor."""
    probe: dict[str, float] | None = None
    for mine, theirs in zip(lockstep.ranks, other.ranks, strict=True):
        if not theirs.digest:
            continue
        for i, ((a, size), (b, _)) in enumerate(zip(digest(mine.outputs), theirs.digest, strict=True)):
            if abs(a - b) <= DIVERGENCE * size or a == b or a != a:
                continue
            probe = evidence.probe() if probe is None else probe
            elements = mine.outputs[i].numel()
            if not abs(a - b) <= DIVERGENCE * size + 16 * elements * probe.get(f"output {i}", 0.0):
                return f"output {i} of the original on rank {mine.rank} is not the same in lockstep and on {other.executor}"
    return None


__all__ = [
    "confirming_domain",
    "doubt_of_error",
    "judge_confirmation",
    "start_confirmation",
    "worth_confirming",
]
