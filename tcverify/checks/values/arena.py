"""Arena, a part of check `equivalence`: values in communication buffers equal those outside of them, in every iteration."""

from __future__ import annotations

from tcverify.checks.evidence import Evidence
from tcverify.execution import Comparison
from tcverify.program.finding import Finding

CHECK = "equivalence"

#: Differences between runs of one program that result from addresses: kernels sum in another order if memory is
#: aligned differently. Relative to the largest magnitude of an output.
NOISE = 2.0**-30


def arena_findings(evidence: Evidence) -> list[Finding]:
    """Report a failure in the arena: at most one finding, which names the buffer that is overwritten first."""
    run = evidence.arena
    if run is None:
        return []
    seen = [(i, *found) for i, c in enumerate(run.comparisons) if (found := _difference(c)) is not None]
    shown = [f"iteration {i + 1}: {sentence}" for i, sentence, _ in seen]
    if run.clobbers:
        first = run.clobbers[0]
        written, lost = first.places
        places = [f"'{first.node}' has bytes {written[0]} to {written[1]}, '{first.lost}' bytes {lost[0]} to {lost[1]}"]
        others = [str(clobber) for clobber in run.clobbers[1:4]]
        data = {"iteration": first.iteration, "buffer": first.lost, "overwritten_by": first.node}
        title = f"a communication buffer is overwritten too early: {first}"
        return [
            Finding("arena-mismatch", CHECK, title, "\n".join([*places, *others, *shown]), first.node, first.rank, data)
        ]
    if seen:
        iteration, sentence, rank = seen[0]
        title = (
            f"with its buffers in an arena the program computes something else in iteration {iteration + 1}: {sentence}"
        )
        return [Finding("arena-mismatch", CHECK, title, "\n".join(shown[1:]), None, rank, {"iteration": iteration})]
    return []


def _difference(comparison: Comparison) -> tuple[str, int | None] | None:
    """How a run in the arena differs from one outside of it, in one sentence, and on which rank."""
    if not comparison.rewritten.finished:
        failed = comparison.rewritten.error
        return comparison.rewritten.why, failed.rank if failed is not None else None
    for delta in comparison.deltas:
        if delta.problem is not None:
            return f"{delta.label} on rank {delta.rank}: {delta.problem}", delta.rank
        if delta.overflow or delta.difference > NOISE * delta.scale:
            sentence = f"{delta.label} on rank {delta.rank} is {delta.actual:.9g} instead of {delta.expected:.9g}"
            return sentence, delta.rank
    return None


__all__ = ["arena_findings"]
