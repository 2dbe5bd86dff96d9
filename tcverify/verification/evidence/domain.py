"""Evidence `domain`: both versions in the requested number domain, in addition to float64."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.checks.evidence import DomainRuns
from tcverify.checks.values.exact import agrees
from tcverify.domains import DRAWS, MORE_DRAWS, NATIVE, Exact
from tcverify.errors import UnsupportedOp
from tcverify.execution import Comparison, Lockstep, Run
from tcverify.program import Doubt, Program

_LOCKSTEP = Lockstep()

_NOT_HERE = "only the pass's process can hold the rewritten graph, and it ran there in float64 alone"


def run_in_domain(evidence: Evidence) -> DomainRuns:
    """Run both versions, which have run in float64, in another domain as well."""
    assert evidence.request is not None
    request, pair = evidence.request, evidence.pair
    if request.domain == "float64" or not pair.changed:
        return DomainRuns()
    if "equivalence" not in request.checks:
        return DomainRuns(aside="the check 'equivalence', the only one that uses it, was not selected")
    if pair.foreign is not None:
        return DomainRuns(aside=_NOT_HERE)
    if evidence.rewritten is None:
        return DomainRuns()
    if request.domain == "native":
        return _native(evidence, evidence.rewritten, request.baseline)
    try:
        return _exact(pair.original, evidence.rewritten)
    except UnsupportedOp as error:
        return DomainRuns(aside=error.message)


def _native(evidence: Evidence, rewritten: Program, baseline: Run) -> DomainRuns:
    before = _LOCKSTEP.run(evidence.pair.original, domain=NATIVE)
    if not before.finished:
        evidence.doubt(Doubt("unsupported-op", f"in its own dtypes the original does not run: {before.why}"))
        return DomainRuns()
    return DomainRuns([_LOCKSTEP.compare_runs(before, _LOCKSTEP.run(rewritten, domain=NATIVE), baseline)])


def _exact(original: Program, rewritten: Program) -> DomainRuns:
    runs: list[Comparison] = []
    for draw in range(MORE_DRAWS):
        if draw >= DRAWS and len({agrees(comparison) for comparison in runs}) == 1:
            break  # otherwise further draws decide
        comparison = _LOCKSTEP.compare(original, rewritten, Exact(draw))
        if not (comparison.original.finished and comparison.rewritten.finished):
            why = comparison.rewritten.why if comparison.original.finished else comparison.original.why
            return DomainRuns(aside=f"it does not terminate in the exact domain: {why}")
        runs.append(comparison)
    return DomainRuns(runs)
