"""Moves on the dims of a placed program's tensors: dims of size 1 go, and layouts that divide nothing say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tcverify.ops import Layout
from tcverify.ops.dialects.multidevice import REDUCE
from tcverify.ops.leaves import leaves
from tcverify.program import PlacedInput, PlacedPlan, PlacedStep
from tcverify.shrink.global_view.search import PlacedSearch


def drop_axes(search: PlacedSearch) -> None:
    """Drop dims of size 1 of all inputs that have such a dim at one place, and in what is made of them."""
    for axis in reversed(range(max(len(spec.shape) for spec in search.plan.inputs))):
        search.attempt(_without_axis(search.plan, axis))


def shard_less(search: PlacedSearch) -> None:
    """Let tensors be whole: those on meshes of one rank, and inputs and results of sets that only sets and reductions read.

    Or let these be divided on an earlier dim.
    """
    search.attempt(_relaid(search.plan, lambda layout: layout if layout.is_sharded else Layout.replicated(layout.mesh)))
    for name in [spec.name for spec in search.plan.inputs] + [step.name for step in search.plan.steps if step.reshards]:
        users = [step for step in search.plan.steps if name in step.reads]
        if name not in search.tensors or not all(step.reshards for step in users):
            continue
        layout = search.tensors[name].layout
        plainer = [Layout.replicated(layout.mesh)]
        plainer += [Layout.sharded(layout.mesh, 0)] if layout.mesh.ndim == 1 and layout.sharding[0] else []
        search.attempt(*(_laid(search.plan, name, new) for new in plainer if new != layout))


def _relaid(plan: PlacedPlan, change: Callable[[Layout], Layout]) -> PlacedPlan:
    """The plan with the layouts of all tensors changed."""
    return replace(
        plan,
        inputs=tuple(replace(spec, layout=change(spec.layout)) for spec in plan.inputs),
        steps=tuple(replace(step, layout=change(step.layout)) for step in plan.steps),
    )


def _laid(plan: PlacedPlan, name: str, layout: Layout) -> PlacedPlan:
    """The plan with the layout of one tensor changed."""
    inputs = tuple(replace(spec, layout=layout) if spec.name == name else spec for spec in plan.inputs)
    steps = tuple(replace(step, layout=layout) if step.name == name else step for step in plan.steps)
    return replace(plan, inputs=inputs, steps=steps)


def _without_axis(plan: PlacedPlan, axis: int) -> PlacedPlan | None:
    """The plan without a dim of its inputs; None if a step uses dims in a way that is not supported here."""
    places: dict[str, int | None] = {}
    inputs: list[PlacedInput] = []
    for spec in plan.inputs:
        goes = len(spec.shape) > max(axis, 1) and spec.shape[axis] == 1
        places[spec.name] = axis if goes else None
        shape = spec.shape[:axis] + spec.shape[axis + 1 :] if goes else spec.shape
        inputs.append(replace(spec, shape=shape, layout=_lower(spec.layout, axis) if goes else spec.layout))
    steps: list[PlacedStep] = []
    for step in plan.steps:
        found = {places[name] for name in step.reads} - {None}
        at = next(iter(found), None)
        places[step.name] = at
        if at is None:
            steps.append(step)
            continue
        args = step.args
        if step.op == REDUCE:
            x, dim, reduction = args
            if dim == at:
                return None
            places[step.name] = at - 1 if dim < at else at
            args = x, dim - 1 if dim > at else dim, reduction
        elif not step.reshards and _says_numbers(step):
            return None
        now = places[step.name]
        if now is None or len(found) > 1 or step.stream_axis == now:
            return None
        stream_axis = (
            step.stream_axis - 1 if step.stream_axis is not None and step.stream_axis > now else step.stream_axis
        )
        steps.append(replace(step, args=args, layout=_lower(step.layout, now), stream_axis=stream_axis))
    return replace(plan, inputs=tuple(inputs), steps=tuple(steps))


def _lower(layout: Layout, axis: int) -> Layout:
    """The layout of a tensor that has one dim fewer."""
    return Layout(layout.mesh, tuple(None if s is None or s == axis else s - (s > axis) for s in layout.sharding))


def _says_numbers(step: PlacedStep) -> bool:
    """Whether integers, which may be dims, are among its arguments."""
    return any(type(value) is int for value in leaves((step.args, step.kwargs), int))


__all__ = ["drop_axes", "shard_less"]
