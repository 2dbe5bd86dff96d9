"""One module per oracle. A check is a function of `Evidence` that returns findings and doubts: data, never exceptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcverify.checks.collectives import check_collectives
from tcverify.checks.equivalence import check_equivalence
from tcverify.checks.evidence import Evidence
from tcverify.checks.happens_before import check_happens_before
from tcverify.checks.host_program import check_host_program
from tcverify.checks.interleavings import check_interleavings
from tcverify.checks.memory import check_memory
from tcverify.checks.metadata import check_metadata
from tcverify.checks.order import check_order
from tcverify.checks.purity import check_purity
from tcverify.checks.schedule import check_schedule
from tcverify.checks.structure import check_structure
from tcverify.program.finding import Doubt, Finding, Note, Said

Check = Callable[[Evidence], Sequence[Said]]

#: All checks by name, in the order in which they run.
CHECKS: dict[str, Check] = {
    "structure": check_structure,
    "metadata": check_metadata,
    "collectives": check_collectives,
    "happens-before": check_happens_before,
    "host-program": check_host_program,
    "order": check_order,
    "memory": check_memory,
    "interleavings": check_interleavings,
    "schedule": check_schedule,
    "equivalence": check_equivalence,
    "purity": check_purity,
}


def register_check(name: str, check: Check) -> None:
    """Add a check of your own; it runs after the others, and `--checks` can name it.

    Example:
        >>> def no_all_to_all(evidence):
        ...     graphs = evidence.pair.rewritten.graphs if evidence.pair.rewritten else ()
        ...     bad = [n.name for g in graphs for n in g.nodes if "all_to_all" in str(n.target)]
        ...     return [Finding("all-to-all", "no_all_to_all", f"'{bad[0]}' is slow here", node=bad[0])] if bad else []
        >>> register_check("no_all_to_all", no_all_to_all)
    """
    CHECKS[name] = check


def apply_checks(names: list[str], evidence: Evidence, doubts: list[Doubt], notes: list[Note]) -> list[Finding]:
    """Apply checks by name and return their findings.

    Args:
        doubts, notes: what else they say is added here, each once.
    """
    findings = []
    for name in names:
        for found in CHECKS[name](evidence):
            if isinstance(found, Finding):
                findings.append(found)
            elif isinstance(found, Doubt):
                doubts += [found] if found not in doubts else []
            elif found not in notes:
                notes.append(found)
    return findings


__all__ = ["CHECKS", "Check", "Evidence", "apply_checks", "register_check"]
