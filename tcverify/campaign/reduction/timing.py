"""Moves that make what a program says about time plainer: its costs and its stream settings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from tcverify.campaign.reduction.search import PLAIN_COSTS, Search
from tcverify.campaign.reduction.sketch import Sketch, Step
from tcverify.program import StreamSettings


def simplify_timing(search: Search) -> None:
    """Do without costs and settings, or else make them equal on all ranks, then one after the other plain."""
    if search.attempt(_without(search.sketch)):
        return
    search.attempt(_as_on_first_graph(search.sketch))
    for change in (
        lambda s: StreamSettings(device=s.device),
        lambda s: replace(s, sync_overhead_s=0.0),
        lambda s: replace(s, sync_overhead_s=PLAIN_COSTS[0]),
        lambda s: replace(s, device=None),
        lambda s: replace(s, compute=(0,)),
        lambda s: replace(s, comm=(1,)),
        lambda s: replace(s, compute=s.compute[:1]),
        lambda s: replace(s, comm=s.comm[:1]),
    ):
        search.attempt(_with_settings(search.sketch, change))
    for cost in (None, *PLAIN_COSTS):
        search.in_chunks(_costed(search.sketch), lambda names, cost=cost: _with_cost(search.sketch, names, cost))  # type: ignore[misc]


def _costed(sketch: Sketch) -> list[str]:
    """The steps whose cost is none of the plain ones."""
    found = [s.name for g in sketch.graphs for s in g if s.meta.get("cost_s", PLAIN_COSTS[0]) not in PLAIN_COSTS]
    return list(dict.fromkeys(found))


def _mapped(sketch: Sketch, change: Callable[[Step], Step]) -> Sketch:
    return replace(sketch, graphs=tuple(tuple(change(step) for step in graph) for graph in sketch.graphs))


def _costing(step: Step, cost: Any) -> Step:
    """The step with another cost, or without one."""
    meta = {key: value for key, value in step.meta.items() if key != "cost_s"}
    return replace(step, meta=meta if cost is None else {**meta, "cost_s": cost})


def _without(sketch: Sketch) -> Sketch:
    return replace(_mapped(sketch, lambda step: _costing(step, None)), streams=None)


def _as_on_first_graph(sketch: Sketch) -> Sketch:
    """The costs of the first graph for the steps of that name in all others."""
    first = {step.name: step.meta.get("cost_s") for step in sketch.graphs[0]}
    return _mapped(sketch, lambda step: _costing(step, first[step.name]) if step.name in first else step)


def _with_settings(sketch: Sketch, change: Callable[[StreamSettings], StreamSettings]) -> Sketch | None:
    return None if sketch.streams is None else replace(sketch, streams=change(sketch.streams))


def _with_cost(sketch: Sketch, names: Collection[str], cost: float | None) -> Sketch:
    """Another cost for these steps, on all ranks; None: for each the plain one that is nearer."""
    short, long = PLAIN_COSTS

    def change(step: Step) -> Step:
        if step.name not in names or "cost_s" not in step.meta:
            return step
        nearer = short if step.meta["cost_s"] ** 2 < short * long else long
        return _costing(step, nearer if cost is None else cost)

    return _mapped(sketch, change)


__all__ = ["simplify_timing"]
