"""Reads the plan of a program whose tensors carry layouts back from the graphs of its ranks."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import Layout, qualified_name
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.program import PlacedInput, PlacedPlan, PlacedStep, Program, RankConstant, Use
from tcverify.program.graph import constant_value

_Item = TypeVar("_Item", bound=Hashable)


class _NoPlan(Exception):
    """The program does more than a plan says."""


def plan_of(program: Program) -> PlacedPlan | None:
    """The plan of which the program is built, or None where it is not built of one, as far as can be told.

    Nodes of one name are one op. A plan does not contain costs, stream settings and wrong metadata: the caller has
    to check whether it builds the same program.
    """
    first = [next(iter(graph.nodes)) for graph in program.graphs]
    if program.modules or not any(node.op == "placeholder" and "layout" in node.meta for node in first):
        return None
    try:
        return _read(program)
    except (_NoPlan, ProgramError):
        return None


def _read(program: Program) -> PlacedPlan:
    inputs: dict[str, dict[int, Layout]] = {}
    steps: dict[str, dict[int, PlacedStep]] = {}
    orders: list[list[str]] = []
    results: list[list[tuple[str, int]]] = []
    for rank, binding in enumerate(program.ranks):
        order: list[str] = []
        for node in program.graphs[binding.graph].nodes:
            if node.op == "placeholder":
                inputs.setdefault(node.name, {})[rank] = _layout(node)
            elif node.op == "output":
                results.append(_occurrences(node.args[0] if node.args else ()))
            else:
                steps.setdefault(node.name, {})[rank] = _step(node, binding.constants)
                order.append(node.name)
        orders.append(order)
    specs = {spec.name: spec for spec in program.inputs}
    given = tuple(
        PlacedInput(name, specs[name].shape, _everywhere(inputs[name]), specs[name].dtype, specs[name].recipe)
        for name in specs
        if name in inputs
    )
    called = tuple(_one(name, steps[name]) for name in merge_orders(orders))
    outputs = tuple(name for name, _ in merge_orders(results))
    return PlacedPlan(program.world_size, given, called, outputs, program.seed, program.labels)


def _layout(node: fx.Node) -> Layout:
    text = node.meta.get("layout")
    if not isinstance(text, str):
        raise _NoPlan
    return Layout.parse(text)


def _step(node: fx.Node, constants: Any) -> PlacedStep:
    """What one rank knows of a step."""

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Use(value.name)
        return constant_value(value, constants) if isinstance(value, RankConstant) else value

    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        raise _NoPlan
    op = qualified_name(node.target)
    args: tuple[Any, ...] = tuple(map_aggregate(list(node.args), leaf))
    kwargs = dict(map_aggregate(node.kwargs, leaf))
    axis = node.meta.get("stream_axis")
    if op == SET and len(args) == 6:
        return PlacedStep(node.name, op, args[:1], Layout.parse(str(args[2])), stream_axis=axis)
    if op == REDUCE and len(args) == 8:
        return PlacedStep(node.name, op, args[:3], Layout.parse(str(args[4])), stream_axis=axis)
    if op in (SET, REDUCE):
        raise _NoPlan
    return PlacedStep(node.name, op, args, _layout(node), kwargs, axis)


def _everywhere(found: dict[int, Layout]) -> Layout:
    """The layout of an input, if just the ranks of its mesh have it."""
    layout = next(iter(found.values()))
    if set(found) != set(layout.mesh.ranks) or any(other != layout for other in found.values()):
        raise _NoPlan
    return layout


def _one(name: str, found: dict[int, PlacedStep]) -> PlacedStep:
    """The step of which all ranks know a part."""
    step = next((s for s in found.values() if s.reads), None)
    if step is None:
        raise _NoPlan
    if step.reshards:
        others = [s for s in found.values() if s.args[0] is not None]
        if any((s.args, s.layout) != (step.args, step.layout) for s in others):
            raise _NoPlan
        axes = [s.stream_axis for rank, s in found.items() if rank in step.layout.mesh]
        if any(axis != axes[0] for axis in axes):
            raise _NoPlan
        return PlacedStep(name, step.op, step.args, step.layout, stream_axis=axes[0] if axes else None)
    if set(found) != set(step.layout.mesh.ranks) or any(other != step for other in found.values()):
        raise _NoPlan
    return step


def _occurrences(result: Any) -> list[tuple[str, int]]:
    """The names of what a rank returns, each with how often it has come before."""
    if not isinstance(result, (tuple, list)) or not all(isinstance(value, fx.Node) for value in result):
        raise _NoPlan
    counts: dict[str, int] = {}
    found = []
    for node in result:
        counts[node.name] = counts.get(node.name, -1) + 1
        found.append((node.name, counts[node.name]))
    return found


def merge_orders(orders: Sequence[Sequence[_Item]]) -> list[_Item]:
    """All items in an order that agrees with all given orders. Raises if there is none."""
    numbers: dict[_Item, int] = {}
    later: dict[_Item, list[_Item]] = {}
    waits: dict[_Item, int] = {}
    for order in orders:
        for i, item in enumerate(order):
            numbers.setdefault(item, len(numbers))
            waits.setdefault(item, 0)
            if i:
                later.setdefault(order[i - 1], []).append(item)
                waits[item] += 1
    ready = [(numbers[item], item) for item, count in waits.items() if count == 0]
    heapq.heapify(ready)
    found: list[_Item] = []
    while ready:
        _, item = heapq.heappop(ready)
        found.append(item)
        for other in later.get(item, ()):
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, (numbers[other], other))
    if len(found) < len(numbers):
        raise _NoPlan
    return found


__all__ = ["merge_orders", "plan_of"]
