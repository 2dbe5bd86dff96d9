"""What belongs together in asynchronous programs: a start, the results that are selected from it, and the waits for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tcverify.ops import lookup, mutated
from tcverify.ops.op import Phase
from tcverify.program.specs import storages_of
from tcverify.shrink.graph.sketch import Ref, SketchStep
from tcverify.shrink.graph.step_facts import Facts


def phase_of(step: SketchStep) -> Phase | None:
    """The phase of the op that a step calls, if any."""
    return lookup(step.target).phase if step.op == "call_function" else None


def starts(facts: Facts) -> list[str]:
    """The names of all starts, in order, each once."""
    found = (step.name for graph in facts.sketch.graphs for step in graph if phase_of(step) == "start")
    return list(dict.fromkeys(found))


def waits_for(facts: Facts, name: str) -> list[str]:
    """The waits for what a step makes, or for the storage that it begins to write into, in order."""
    found: dict[str, None] = {}
    for i in facts.where(name):
        real = facts.typings[i].real
        own = set(storages_of(real.get(name)))
        begun = facts.positions[i][name]
        for step in facts.sketch.graphs[i][begun + 1 :]:
            if phase_of(step) == "wait" and not own.isdisjoint(storages_of(real.get(step.name))):
                found[step.name] = None
    return list(found)


def waits_of(facts: Facts, names: Collection[str]) -> list[str]:
    """What has to be added to these steps of the first graph so that all that they start is waited for."""
    inside = set(names)
    real = facts.typings[0].real
    graph = facts.sketch.graphs[0]
    own = set().union(
        *(storages_of(real.get(s.name)) for s in graph if s.name in inside and phase_of(s) == "start"), set()
    )
    added = []
    for step in graph:
        if step.name in inside or not step.calls or own.isdisjoint(storages_of(real.get(step.name))):
            continue
        if (not step.effect or phase_of(step) == "wait") and all(read in inside for read in step.reads):
            inside.add(step.name)
            added.append(step.name)
    return added


def count_untidy(facts: Facts) -> int:
    """How often a program accesses what is in flight, and how many starts have no wait.

    Only well-ordered programs refute passes. So an edit must not introduce new conflicts.
    """
    return sum(_untidy(facts, i) for i in range(len(facts.sketch.graphs)))


def _untidy(facts: Facts, number: int) -> int:
    real = facts.typings[number].real
    under_way: dict[str, tuple[set[int], set[int]]] = {}
    count = 0
    for step in facts.sketch.graphs[number]:
        phase = phase_of(step)
        if not under_way and phase != "start":
            continue
        own = set(storages_of(real.get(step.name)))
        read = set().union(*(storages_of(real.get(name)) for name in step.reads), set())
        if phase == "wait":
            under_way = {s: (r, left) for s, (r, w) in under_way.items() if (left := w - own)}
            continue
        written = _written(step, real)
        touches = (read | written) if written or not own or not own <= read or phase == "start" else set()
        count += any(touches & writes or written & reads for reads, writes in under_way.values())
        if phase == "start":
            under_way[step.name] = set() if lookup(step.target).copies else read, own | written
    return count + len(under_way)


def _written(step: SketchStep, real: Mapping[str, Any]) -> set[int]:
    """The storages that a call writes into."""
    written = mutated(step.target, step.args, step.kwargs, Ref) if step.op == "call_function" else []
    return {storage for ref in written for storage in storages_of(real.get(ref.name))}


__all__ = ["count_untidy", "phase_of", "starts", "waits_for", "waits_of"]
