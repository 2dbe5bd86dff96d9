"""Order: asynchronous collectives are waited for, no node conflicts with them before that, and promises about order hold.

Races with collectives in flight refute any pass, and so does an op with a side effect that is missing or runs more
often. The rest has to be promised: `Contract.order` (nodes and all dependencies among them stay),
`Contract.collective_order`. Edges that nodes declare (`meta["after"]`) must hold in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from tcverify.checks.evidence import Evidence
from tcverify.checks.ordering.accesses import Accesses, distinct_pairs, traits_of
from tcverify.checks.ordering.asynchrony import Asynchrony, Hazard, TransferInFlight, asynchrony_of
from tcverify.checks.ordering.collective_calls import changed_effects, reordered_collectives
from tcverify.checks.ordering.permutation import broken_edge, changed_nodes
from tcverify.program import Program
from tcverify.program.finding import Doubt, Finding

CHECK = "order"


def check_order(evidence: Evidence) -> list[Finding | Doubt]:
    """Report races with collectives in flight, waits that are missing or too early, and broken promises about order.

    One finding per kind: the first on the lowest rank. Defects of the original are not the fault of the pass.
    """
    original, rewritten = evidence.pair.original, evidence.pair.rewritten
    if rewritten is None or rewritten is original:
        return []
    promises = evidence.contract.order or evidence.contract.collective_order
    traits = [traits_of(graph) for graph in rewritten.graphs]
    found: dict[str, Finding] = {}
    effects = None if evidence.contract.collective_order else changed_effects(original, rewritten)
    if effects is not None:
        found[effects.kind] = effects
    if not promises and not any(graph.starts or graph.declares for graph in traits):
        return list(found.values())
    for rank, before, after in distinct_pairs(original, rewritten):
        for finding in _asynchrony(before, after, rank):
            found.setdefault(finding.kind, finding)
    promised: list[Callable[[Program, Program], Finding | None]] = []
    if evidence.contract.order:
        promised.append(changed_nodes)
    if evidence.contract.collective_order:
        promised.append(reordered_collectives)
    for judge in promised:
        broken = judge(original, rewritten)
        if broken is not None:
            found.setdefault(broken.kind, broken)
    for rank, before, after in distinct_pairs(original, rewritten):
        whole = evidence.contract.order and "changed-nodes" not in found
        edge = broken_edge(before, after, rank, whole=whole, starts=evidence.contract.collective_order)
        if edge is not None:
            found.setdefault(edge.kind, edge)
            break
    return list(found.values())


def _asynchrony(before: Accesses, after: Accesses, rank: int) -> Iterator[Finding]:
    """What is wrong with the waits of a rank's graph, and was not wrong before."""
    now = asynchrony_of(after)
    if not now.hazards and not now.lost:
        return
    then = asynchrony_of(before)
    known = {_named(before, hazard) for hazard in then.hazards}
    hazards = [hazard for hazard in now.hazards if _named(after, hazard) not in known]
    for hazard in hazards:
        host = after.steps[hazard.flight.start].op.startswith("host_ir::")  # a missing wait is reported separately
        if hazard.flight not in now.lost or (hazard.racing == "input" and not host):
            yield _race(after, now, hazard, rank)
            break
    yield from _lost(before, then, after, now, hazards, rank)


def _named(of: Accesses, hazard: Hazard) -> tuple[str, str, str, str]:
    steps = of.steps
    return steps[hazard.flight.start].name, steps[hazard.node].name, hazard.access, hazard.racing


def _race(of: Accesses, asynchrony: Asynchrony, hazard: Hazard, rank: int) -> Finding:
    start, node = of.steps[hazard.flight.start].name, of.steps[hazard.node].name
    value = of.value(hazard.storage)
    landed = asynchrony.landed.get(hazard.flight)
    wait = of.steps[landed].name if landed is not None else None
    who = _who(of, hazard)
    if hazard.racing == "completion":
        what = f"the result of '{start}'" if value == start else f"'{value}', which '{start}' writes,"
        title = f"{who} {hazard.access} {what} before the collective has finished"
        missing = f"'{start}' writes it at any time until"
    else:
        title = f"{who} {hazard.access} '{value}' while '{start}' may still read it"
        missing = f"'{start}' reads it at any time until"
    until = (
        f"the first wait for its result, '{wait}', which comes later" if wait is not None else "the end: no node waits"
    )
    lines = [
        f"{missing} {until}",
        _between(of, hazard.flight.start, hazard.node, landed),
        f"missing: '{wait or 'a wait'}' before '{node}'",
    ]
    data = {
        "racing": hazard.racing, "access": hazard.access, "first": start, "second": node, "value": value, "wait": wait,
    }  # fmt: skip
    return Finding("async-race", CHECK, title, "\n".join(lines), node, rank, data)


def _who(of: Accesses, hazard: Hazard) -> str:
    step = of.steps[hazard.node]
    return "the caller" if step.op == "output" else f"'{step.name}'"


def _between(of: Accesses, *indices: int | None) -> str:
    """The nodes that a finding is about, in graph order, with the number of nodes between them."""
    shown = sorted({index for index in indices if index is not None})
    parts = [of.steps[shown[0]].name]
    for earlier, later in pairwise(shown):
        gap = later - earlier - 1
        parts.append(f"… {gap} more …" if gap else "")
        parts.append(of.steps[later].name)
    return "graph order: " + ", ".join(part for part in parts if part)


def _lost(
    before: Accesses, then: Asynchrony, after: Accesses, now: Asynchrony, hazards: list[Hazard], rank: int
) -> Iterator[Finding]:
    """Starts without a wait: it is missing, or precedes the start."""
    if not now.lost:
        return
    waited = {(before.steps[f.start].name, f.number): before.steps[wait].name for f, wait in then.landed.items()}
    read: dict[TransferInFlight, Hazard] = {}
    for hazard in hazards:
        if hazard.racing == "completion":
            read.setdefault(hazard.flight, hazard)
    was_lost = {before.steps[flight.start].name for flight in then.lost}
    was_idle = {before.steps[index].name for index in then.idle}
    early: dict[int, int] = {}  # storage -> the last wait that had nothing to wait for
    for index, storages in now.idle.items():
        if after.steps[index].name not in was_idle:
            early.update(dict.fromkeys(storages, index))
    told = set()
    for flight, storages in now.lost.items():
        start = after.steps[flight.start].name
        wait = waited.get((start, flight.number))
        reader = read.get(flight)
        host = after.steps[flight.start].op.startswith("host_ir::")
        if wait is None and reader is None and (not host or start in was_lost):
            continue
        ahead = [early[s] for s in storages if s in early and early[s] < flight.start]
        kind = "wait-before-start" if ahead else "missing-wait"
        if kind in told:
            continue
        told.add(kind)
        data = {"first": start, "second": after.steps[reader.node].name if reader is not None else None, "wait": wait}
        lines = []
        if wait is not None:
            lines.append(f"in the original, '{wait}' waits for it")
        if reader is not None:
            lines.append(f"{_who(after, reader)} {reader.access} it, whether the collective has finished or not")
        if ahead:
            name = data["wait"] = after.steps[ahead[0]].name
            title = f"'{name}' precedes '{start}', which it should wait for, and waits for nothing"
            lines.append(_between(after, ahead[0], flight.start, reader.node if reader is not None else None))
            yield Finding(kind, CHECK, title, "\n".join(lines), name, rank, data)
        else:
            title = f"no node waits for '{start}'" + (", whose result is used" if reader is not None else "")
            lines.append(f"missing: a wait for '{start}'" + ("" if reader is None else " before its first use"))
            yield Finding(kind, CHECK, title, "\n".join(lines), start, rank, data)


__all__ = ["check_order"]
