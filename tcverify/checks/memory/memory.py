"""Memory: peaks stay within the promised bound, explicit frees are safe, and communication buffers do not collide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tcverify.checks.evidence import Evidence
from tcverify.checks.memory.buffers import buffer_findings
from tcverify.checks.memory.liveness import Peak, find_unsized_value, peak_of
from tcverify.checks.ordering.accesses import Accesses, AccessStep, distinct_pairs, traits_of
from tcverify.program.finding import Doubt, Finding

CHECK = "memory"

#: Number of values that a detail lists at a peak.
_MOST_VALUES = 6


def check_memory(evidence: Evidence) -> list[Finding | Doubt]:
    """Report peaks above the promised bound, bad frees, leaks, and communication buffers that collide or do not fit.

    One finding per kind: the first on the lowest rank. Defects of the original are not the fault of the pass.
    """
    original, rewritten = evidence.pair.original, evidence.pair.rewritten
    if rewritten is None or rewritten is original:
        return []
    found: dict[str, Finding] = {}
    doubts: list[Finding | Doubt] = []
    budget = evidence.contract.memory_budget
    traits = [traits_of(graph) for graph in (*original.graphs, *rewritten.graphs)]
    frees_all = evidence.contract.deallocation
    if budget is None and not frees_all and not any(graph.frees or graph.buffers for graph in traits):
        return []
    for rank, before, after in distinct_pairs(original, rewritten):
        if budget is not None:
            unknown = find_unsized_value(before) or find_unsized_value(after)
            finding = _peak(peak_of(before), peak_of(after), budget, rank)
            if unknown is not None and not doubts:
                sentence = f"the size of '{unknown}' is unknown, so peak memory cannot be compared"
                doubts.append(Doubt("unsupported-op", sentence))
            elif finding is not None and unknown is None:
                found.setdefault(finding.kind, finding)
        for finding in _frees(before, after, rank):
            found.setdefault(finding.kind, finding)
        kept = _kept(after, rank) if frees_all else None
        if kept is not None:
            found.setdefault(kept.kind, kept)
    if not any(graph.buffers for graph in traits):
        return [*found.values()] or doubts
    known = {(f.kind, f.rank, f.title) for f in buffer_findings(original)}
    for finding in buffer_findings(rewritten):
        if (finding.kind, finding.rank, finding.title) not in known:
            found.setdefault(finding.kind, finding)
    return [*found.values()] or doubts


def _peak(before: Peak, after: Peak, budget: float, rank: int) -> Finding | None:
    if after.nbytes <= before.nbytes * (1 + budget) * (1 + 1e-12):
        return None
    title = f"peak memory is {in_bytes(after.nbytes)} at '{after.node}', {in_bytes(before.nbytes)} before the pass"
    promise = "not to let it grow" if budget == 0 else f"to let it grow by at most {100 * budget:.6g} %"
    live = [f"'{name}' {in_bytes(nbytes)}" for name, nbytes in after.live[:_MOST_VALUES]]
    if len(after.live) > _MOST_VALUES:
        live.append(f"{len(after.live) - _MOST_VALUES} more")
    lines = [
        f"the pass promises {promise}",
        f"live at '{after.node}': {', '.join(live)}",
        f"before, the peak was at '{before.node}'",
    ]
    data = {
        "before_bytes": before.nbytes, "after_bytes": after.nbytes, "budget": budget, "node_before": before.node,
    }  # fmt: skip
    return Finding("peak-memory", CHECK, title, "\n".join(lines), after.node, rank, data)


def in_bytes(number: int) -> str:
    """A size in bytes, and in the largest binary unit that it reaches."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number} bytes ({number / 1024**power:.4g} {unit})"
    return f"{number} bytes"


# --------------------------------------------------------------------------------------------------------------- frees


@dataclass(slots=True)
class _Freeing:
    """What a graph does with explicit frees.

    Attributes:
        used: (node, its access, value, the node that freed it), for values used after a free.
        twice: (node, value, the node that freed it first), for double frees.
        freed: value → the node that freed it, for values that are free at the end.
        storages: the same by storage, since several results of one op share a name.
        allocates: values whose first explicit event allocates.
    """

    used: list[tuple[str, str, str, str]] = field(default_factory=list)
    twice: list[tuple[str, str, str]] = field(default_factory=list)
    freed: dict[str, str] = field(default_factory=dict)
    storages: dict[int, str] = field(default_factory=dict)
    allocates: set[str] = field(default_factory=set)


def _freeing(of: Accesses) -> _Freeing:
    found = _Freeing()
    freed: dict[int, str] = {}
    seen: set[int] = set()
    for step in of.steps:
        for access, storage in _uses(step):
            if storage in freed and step.op != "output":
                found.used.append((step.name, access, of.value(storage), freed[storage]))
        for storage, size in step.resized.items():
            if size == 0 and storage in freed:
                found.twice.append((step.name, of.value(storage), freed[storage]))
            elif size == 0:
                freed[storage] = step.name
            else:
                freed.pop(storage, None)
                if storage not in seen:
                    found.allocates.add(of.value(storage))
            seen.add(storage)
    found.storages = freed
    found.freed = {of.value(storage): node for storage, node in freed.items()}
    return found


def _uses(step: AccessStep) -> Iterator[tuple[str, int]]:
    reads = dict.fromkeys((*step.reads, *(s for t in step.transfers for s in t.source)))
    writes = dict.fromkeys((*step.writes, *(s for t in step.transfers for s in t.target if s in step.touches)))
    yield from (("reads", storage) for storage in reads if storage not in writes)
    yield from (("writes into", storage) for storage in writes)


def _frees(before: Accesses, after: Accesses, rank: int) -> Iterator[Finding]:
    then = _freeing(before)
    now = then if before is after else _freeing(after)
    for node, access, value, by in now.used:
        if not any(used[:3] == (node, access, value) for used in then.used):
            title = f"'{node}' {access} '{value}' after '{by}' has freed it"
            yield Finding("use-after-free", CHECK, title, "", node, rank, {"first": by, "second": node, "value": value})
            break
    known = {node for node, _, _ in then.twice}
    for node, value, by in now.twice:
        if node not in known:
            title = f"'{node}' frees '{value}', which '{by}' has freed already"
            yield Finding("double-free", CHECK, title, "", node, rank, {"first": by, "second": node, "value": value})
            break
    for storage, by in now.storages.items():
        value = after.value(storage)
        if value in then.freed:
            continue
        data = {"first": by, "value": value}
        if storage in after.outputs:
            title = f"'{by}' frees '{value}', which the graph returns"
            yield Finding("freed-output", CHECK, title, "", by, rank, data)
        elif storage in after.inputs:
            title = f"'{by}' frees input '{value}', which belongs to the caller"
            yield Finding("freed-input", CHECK, title, "", by, rank, data)
    yield from _leak(then, after, now, rank)


def _leak(then: _Freeing, after: Accesses, now: _Freeing, rank: int) -> Iterator[Finding]:
    """A storage that was free at the end of the original, and is now used and never freed."""
    missing = {value: by for value, by in then.freed.items() if value not in now.freed}
    if not missing:
        return
    storages = {after.value(s): s for step in after.steps for s in step.holds if after.value(s) in missing}
    used = {s for step in after.steps if step.op != "output" for _, s in _uses(step)}
    used.update(s for step in after.steps for s, size in step.resized.items() if size != 0)
    inputs = set(after.inputs.values())
    for value, by in missing.items():
        held = value in inputs and value not in then.allocates
        if value in storages and (held or storages[value] in used):
            title = f"'{value}' is never freed; in the original, '{by}' frees it"
            yield Finding("leak", CHECK, title, "", value, rank, {"first": by, "value": value})
            return


def _kept(after: Accesses, rank: int) -> Finding | None:
    """The first value that the graph creates and neither frees nor returns, if the pass promises to free all of them. Tensors
    without elements take no memory."""
    freed = {storage for step in after.steps for storage in step.frees}
    spared = freed | set(after.inputs) | set(after.outputs)
    kept = [s for step in after.steps for s in step.holds if s not in spared and after.nbytes.get(s, 0)]
    if not kept:
        return None
    storage = kept[0]
    value = after.value(storage)
    uses = [step.name for step in after.steps if storage in step.touches]
    last = f"'{uses[-1]}' uses it last" if uses else "it is never used"
    others = len(set(kept)) - 1
    lines = ["the pass promises that the graph frees all its allocations except outputs", last]
    lines += (
        [f"{others} more value{'s' * (others > 1)} of the graph {'are' if others > 1 else 'is'} never freed"]
        if others
        else []
    )
    title = f"'{value}' is never freed: {in_bytes(after.nbytes[storage])}"
    return Finding(
        "leak", CHECK, title, "\n".join(lines), value, rank, {"value": value, "nbytes": after.nbytes[storage]}
    )


__all__ = ["check_memory", "in_bytes"]
