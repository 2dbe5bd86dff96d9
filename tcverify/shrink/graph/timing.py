"""Moves that simplify a program's timing: its costs and its stream settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tcverify.cost import MIN_COST_S, load_device_profile, node_cost
from tcverify.errors import TcverifyError
from tcverify.program import Program, StreamSettings
from tcverify.shrink.graph.search import PLAIN_COSTS, SketchSearch
from tcverify.shrink.graph.sketch import Sketch, SketchStep

SHORT, LONG = PLAIN_COSTS


def simplify_timing(search: SketchSearch) -> None:
    """Do without costs and settings, or else make them equal on all ranks, then one after the other plain."""
    if search.attempt(_without(search.sketch)):
        return
    search.attempt(_as_on_first_graph(search.sketch))
    _do_without_device(search)
    for change in (
        lambda s: StreamSettings(device=s.device),
        lambda s: StreamSettings(device=s.device, sync_overhead_s=SHORT),
        lambda s: replace(s, sync_overhead_s=0.0),
        lambda s: replace(s, sync_overhead_s=SHORT),
        lambda s: replace(s, device=None),
        lambda s: replace(s, compute=(0,)),
        lambda s: replace(s, comm=(1,)),
        lambda s: replace(s, compute=s.compute[:1]),
        lambda s: replace(s, comm=s.comm[:1]),
    ):
        search.attempt(_with_settings(search.sketch, change))
    _make_costs_plain(search)


def _make_costs_plain(search: SketchSearch) -> None:
    """All costs short, or all long; else as many as can be, and of the rest one digit."""

    def costed(*plain: float) -> list[str]:
        found = [s.name for g in search.sketch.graphs for s in g if s.meta.get("cost_s", SHORT) not in (SHORT, *plain)]
        return list(dict.fromkeys(found))

    search.attempt(*(_with_cost(search.sketch, costed(), lambda _, cost=cost: cost) for cost in PLAIN_COSTS))  # type: ignore[misc]
    changes: list[Callable[[float], float]] = [
        _nearest,
        lambda _: SHORT,
        lambda _: LONG,
        lambda cost: float(f"{cost:.0e}"),
    ]
    for change in changes:
        search.in_chunks(costed(LONG), lambda names, change=change: _with_cost(search.sketch, names, change))  # type: ignore[misc]
    search.in_chunks(costed(), lambda names: _with_cost(search.sketch, names, lambda _: SHORT))


def _nearest(cost: float) -> float:
    return SHORT if cost**2 < SHORT * LONG else LONG


def _mapped(sketch: Sketch, change: Callable[[SketchStep], SketchStep]) -> Sketch:
    return replace(sketch, graphs=tuple(tuple(change(step) for step in graph) for graph in sketch.graphs))


def _costing(step: SketchStep, cost: Any) -> SketchStep:
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


def _with_cost(sketch: Sketch, names: Collection[str], change: Callable[[float], float]) -> Sketch:
    """Another cost for these steps, on all ranks, made from the one that they have."""

    def changed(step: SketchStep) -> SketchStep:
        if step.name not in names or "cost_s" not in step.meta:
            return step
        return _costing(step, change(step.meta["cost_s"]))

    return _mapped(sketch, changed)


# -------------------------------------------------------------------------------------------------------------- device


def _do_without_device(search: SketchSearch) -> None:
    """Say what ops cost where a device is named to estimate it for: ten microseconds each, or what the estimate is."""
    streams = search.sketch.streams
    if streams is None or streams.device is None:
        return
    plain = replace(search.sketch, streams=replace(streams, device=None))
    search.attempt(
        plain,
        with_costs(plain, lambda _: LONG),
        _with_estimates(plain, search.program, streams.device),
    )


def with_costs(sketch: Sketch, cost: Callable[[SketchStep], float]) -> Sketch:
    """The sketch with a cost for every call that may take time."""
    return _mapped(sketch, lambda step: _costing(step, cost(step)) if step.calls and not step.selects else step)


def _with_estimates(sketch: Sketch, program: Program, name: str) -> Sketch | None:
    try:
        profile = load_device_profile(name)
        estimates: list[Mapping[str, float | None]] = []
        for number, graph in enumerate(program.graphs):
            constants = next((b.constants for b in program.ranks if b.graph == number), {})
            calls = [node for node in graph.nodes if node.op == "call_function"]
            estimates.append({node.name: node_cost(node, profile, constants) for node in calls})
    except TcverifyError:
        return None  # no such device, or an op that no estimate can be made for
    known = iter(estimates)

    def costed() -> Iterator[tuple[SketchStep, ...]]:
        for graph in sketch.graphs:
            costs = next(known)
            yield tuple(
                _costing(step, costs.get(step.name) or MIN_COST_S) if step.calls and not step.selects else step
                for step in graph
            )

    return replace(sketch, graphs=tuple(costed()))


__all__ = ["LONG", "SHORT", "simplify_timing", "with_costs"]
