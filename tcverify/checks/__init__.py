"""One module per oracle. A check is a function of `Evidence` that returns findings and doubts: data, never exceptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tcverify.checks.evidence import Evidence, EvidenceRequest
from tcverify.errors import UsageError
from tcverify.program.finding import KINDS, Doubt, Finding, Note, Said
from tcverify.registry import checks as named
from tcverify.registry.evidence import EVIDENCE
from tcverify.registry.extensions import require_new
from tcverify.registry.references import last_frame
from tcverify.registry.registry import Registry

Check = Callable[[Evidence], Sequence[Said]]

#: All checks by name, in the order in which they run.
CHECKS: Registry[Check] = named.CHECKS
CHECKS.load()  # processes forked from one that verifies have all checks

#: Names of the checks that extensions registered: exceptions in them are not errors of tcverify.
_OWN: set[str] = set()


def register_check(name: str, check: Check, kinds: Mapping[str, str] | None = None) -> None:
    """Register a check. It runs after the others on every program; `--checks` can name it.

    Args:
        name: lower-case words joined by hyphens or underscores. An earlier registration of this name is replaced.
        check: takes `Evidence` (the program before and after the pass, its executions, the contract) and returns findings.
        kinds: description of each kind of finding, by kind: the headline of reports.

    Raises:
        UsageError: the name is taken or cannot be one, or the check cannot be called.

    Example:
        >>> def no_all_to_all(evidence):
        ...     graphs = evidence.pair.rewritten.graphs if evidence.pair.rewritten else ()
        ...     bad = [n.name for g in graphs for n in g.nodes if "all_to_all" in str(n.target)]
        ...     return [Finding("all-to-all", "no_all_to_all", f"'{bad[0]}' is slow here", node=bad[0])] if bad else []
        >>> register_check("no_all_to_all", no_all_to_all, {"all-to-all": "the pass makes an all_to_all"})
    """
    require_new("check", name, [known for known in CHECKS if known not in _OWN])
    if not callable(check):
        raise UsageError(f"check '{name}' is a {type(check).__name__}, which cannot be called", _PROTOCOL)
    for kind, meaning in (kinds or {}).items():
        if KINDS.get(kind, meaning) != meaning:
            raise UsageError(
                f"check '{name}': the kind '{kind}' exists already: \"{KINDS[kind]}\"",
                "choose another name for the kind",
            )
    KINDS.update(kinds or {})
    CHECKS[name] = check
    _OWN.add(name)


def register_evidence(kind: str, provider: Callable[[Evidence], Any]) -> None:
    """Register a kind of evidence for your checks: `evidence.take(kind)` returns it.

    Args:
        kind: lower-case words joined by hyphens or underscores. An earlier registration of this name is replaced.
        provider: takes `Evidence` and returns anything. It is called when a check first asks for the kind, once per program.
            `evidence.request` has the original's run, and the executor with the settings of that run.

    Raises:
        UsageError: the name is taken or cannot be one, or the provider cannot be called.

    Example:
        >>> register_evidence("sizes", lambda evidence: [len(g.nodes) for g in evidence.pair.rewritten.graphs])
    """
    require_new("kind of evidence", kind, [known for known in EVIDENCE if known not in _OWN_EVIDENCE])
    if not callable(provider):
        raise UsageError(
            f"the provider of '{kind}' is a {type(provider).__name__}, which cannot be called",
            "a provider takes tcverify.Evidence and returns what checks get from evidence.take",
        )
    EVIDENCE[kind] = provider
    _OWN_EVIDENCE.add(kind)


#: Kinds of evidence that extensions registered.
_OWN_EVIDENCE: set[str] = set()

_PROTOCOL = "a check takes tcverify.Evidence and returns a list of tcverify.Finding, empty if nothing is wrong"


def _own_findings(name: str, evidence: Evidence) -> Sequence[Said]:
    """Run a user's check. Raises `UsageError`, with the location, if it raises or returns anything but findings."""
    try:
        found = list(CHECKS[name](evidence))
    except Exception as error:
        raise UsageError(f"check '{name}' fails: {last_frame(error)}", _PROTOCOL) from error
    for one in found:
        if not isinstance(one, (Finding, Doubt, Note)):
            raise UsageError(f"check '{name}' returned {one!r:.80}, which is not a finding", _PROTOCOL)
    return found


def apply_checks(names: list[str], evidence: Evidence, doubts: list[Doubt], notes: list[Note]) -> list[Finding]:
    """Apply checks by name and return their findings.

    Args:
        doubts, notes: lists to which the checks' doubts and notes are added, each once.

    Raises:
        UsageError: a check of the user's raises, or returns something else.
    """
    findings = []
    for name in names:
        for found in _own_findings(name, evidence) if name in _OWN else CHECKS[name](evidence):
            if isinstance(found, Finding):
                findings.append(found)
            elif isinstance(found, Doubt):
                doubts += [found] if found not in doubts else []
            elif found not in notes:
                notes.append(found)
    return findings


__all__ = ["CHECKS", "Check", "Evidence", "EvidenceRequest", "apply_checks", "register_check", "register_evidence"]
