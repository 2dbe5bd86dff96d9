"""Structure: the pass returned a legal FX graph with the original's signature."""

from __future__ import annotations

from tcverify.checks.evidence import Evidence
from tcverify.program.finding import Doubt, Finding

_KINDS = {
    "return": ("malformed-graph", "the pass does not return a graph module"),
    "lint": ("malformed-graph", "the rewritten graph is malformed"),
    "code": ("malformed-graph", "the rewritten graph cannot be compiled"),
    "signature": ("changed-signature", "the rewritten graph has a different signature"),
    "shapes": ("rewritten-raises", "a call of the rewritten graph raises"),
    "nodes": ("changed-nodes", "the pass returns different nodes"),
    "dependency": ("broken-order", "a node precedes one that it depends on"),
    "collective-order": ("reordered-collectives", "collectives are reordered"),
    "opaque-order": ("reordered-collectives", "communication that the compiler does not know is reordered"),
    "peak-memory": ("peak-memory", "peak memory is above what the pass promises"),
    "estimate": ("wrong-estimate", "an estimate is not what it estimates"),
    "comm-buffer": ("buffer-mismatch", "a communication buffer leaves the graph, or differs between ranks"),
}


def check_structure(evidence: Evidence) -> list[Finding | Doubt]:
    """Report the results of lint, code generation and the comparison of signatures."""
    findings: list[Finding | Doubt] = []
    for defect in evidence.pair.defects:
        if defect.aspect in _KINDS:
            kind, what = _KINDS[defect.aspect]
            title = f"{what}: {defect.message}" if defect.aspect == "lint" else what
            findings.append(Finding(kind, "structure", title, defect.message, defect.node, defect.rank))
    return findings
