"""Moves that make a placed program smaller: on all ranks at once, since a plan is one for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tcverify.ops.dialects.multidevice import REDUCE
from tcverify.program import Placed, PlacedInput, PlacedPlan, PlacedStep, Recipe
from tcverify.shrink.global_view.search import PlacedSearch, as_input

#: A dim of an input: its name and the number of the dim.
Axis = tuple[str, int]

#: Steps beyond which not every one is tried by itself: each trial costs as much as the program is long.
MANY = 400

#: Dims of inputs beyond which pairs of them are not tried.
SEVERAL = 24


# --------------------------------------------------------------------------------------------------------------- steps


def end_earlier(search: PlacedSearch) -> None:
    """Leave out the last steps: as many as can be, by halving; then return one value alone."""
    low, high = 0, len(search.plan.steps)
    plan = search.plan
    while low < high:
        middle = (low + high) // 2
        if search.attempt(_ended(plan, middle)):
            high = middle
        else:
            low = middle + 1
    for step in list(search.plan.steps)[:MANY]:
        if any(step.name == other.name for other in search.plan.steps):
            search.attempt(replace(search.plan, outputs=(step.name,)))


def _ended(plan: PlacedPlan, count: int) -> PlacedPlan:
    """The first steps, which return unused values."""
    steps = plan.steps[:count]
    kept = {step.name for step in steps} | {spec.name for spec in plan.inputs}
    read = {name for step in steps for name in step.reads}
    outputs = [name for name in plan.outputs if name in kept]
    outputs += [step.name for step in steps if step.name not in read and step.name not in outputs]
    return replace(plan, steps=steps, outputs=tuple(outputs) or (plan.inputs[0].name,))


def drop_outputs(search: PlacedSearch) -> None:
    """Return fewer values: of halves, then of ever smaller parts."""
    size = (len(search.plan.outputs) + 1) // 2
    while size:
        start = 0
        while start < len(search.plan.outputs):
            rest = search.plan.outputs[:start] + search.plan.outputs[start + size :]
            if not search.attempt(replace(search.plan, outputs=rest)):
                start += size
        size //= 2


def start_later(search: PlacedSearch) -> None:
    """Begin with inputs in place of what the first steps make: as many as can be, by halving; then of single steps."""
    low, high = 0, len(search.plan.steps)
    plan, tensors = search.plan, search.tensors
    while low < high:
        middle = (low + high + 1) // 2
        if search.attempt(_given(plan, tensors, [step.name for step in plan.steps[:middle]])):
            low = middle
        else:
            high = middle - 1
    for step in reversed(search.plan.steps[-MANY:]):
        if any(step.name == other.name for other in search.plan.steps):
            search.attempt(_given(search.plan, search.tensors, [step.name]))


def _given(plan: PlacedPlan, tensors: Mapping[str, Placed], names: Sequence[str]) -> PlacedPlan:
    """The plan with inputs in place of these steps."""
    gone = set(names)
    steps = tuple(step for step in plan.steps if step.name not in gone)
    wanted = {name for step in steps for name in step.reads} | set(plan.outputs)
    taken = {spec.name for spec in plan.inputs}
    fresh = (f"x{n}" for n in itertools.count() if f"x{n}" not in taken)
    renamed = {name: next(fresh) for name in names if name in wanted}
    like = plan.inputs[0] if plan.inputs else None
    added = [as_input(new, tensors[old], like) for old, new in renamed.items()]
    return replace(
        plan,
        inputs=(*plan.inputs, *added),
        steps=tuple(step.reading(renamed) for step in steps),
        outputs=tuple(renamed.get(name, name) for name in plan.outputs),
    )


def bypass(search: PlacedSearch) -> None:
    """Read an operand, or another earlier value that lies alike, in place of a step."""
    for step in reversed(search.plan.steps[-MANY:]):
        if any(step.name == other.name for other in search.plan.steps):
            search.attempt(*(_without(search.plan, step, other) for other in _alike(search, step.name)))


def _alike(search: PlacedSearch, name: str) -> Iterator[str]:
    """Earlier values of one shape, dtype and layout, the nearest first, and not many."""
    made = search.tensors[name]
    before = [spec.name for spec in search.plan.inputs]
    before += [step.name for step in itertools.takewhile(lambda s: s.name != name, search.plan.steps)]
    fits = (
        other
        for other in reversed(before)
        if (search.tensors[other].shape, search.tensors[other].layout, search.tensors[other].dtype)
        == (made.shape, made.layout, made.dtype)
    )
    yield from itertools.islice(fits, 3)


def _without(plan: PlacedPlan, step: PlacedStep, by: str) -> PlacedPlan:
    instead = {step.name: by}
    return replace(
        plan,
        steps=tuple(other.reading(instead) for other in plan.steps if other.name != step.name),
        outputs=tuple(dict.fromkeys(instead.get(name, name) for name in plan.outputs)),
    )


def join_sets(search: PlacedSearch) -> None:
    """Of two sets, or a set and a reduction, in a row do without the first."""
    for step in reversed(search.plan.steps[-MANY:]):
        by_name = {other.name: other for other in search.plan.steps}
        operand = by_name.get(step.reads[0]) if step.name in by_name else None
        if step.reshards and operand is not None and operand.reshards and operand.op != REDUCE:
            new = step.reading({operand.name: operand.reads[0]})
            steps = tuple(new if other.name == step.name else other for other in search.plan.steps)
            search.attempt(replace(search.plan, steps=steps))


# -------------------------------------------------------------------------------------------------------------- inputs


def merge_inputs(search: PlacedSearch) -> None:
    """Let inputs that lie alike be one."""
    for spec in reversed(search.plan.inputs):
        known = {other.name: other for other in search.plan.inputs}
        for other in search.plan.inputs:
            if spec.name in known and other != spec and replace(other, name=spec.name) == spec:
                steps = tuple(step.reading({spec.name: other.name}) for step in search.plan.steps)
                outputs = tuple(
                    dict.fromkeys(other.name if name == spec.name else name for name in search.plan.outputs)
                )
                if search.attempt(replace(search.plan, steps=steps, outputs=outputs)):
                    break


def shrink_sizes(search: PlacedSearch) -> None:
    """Shrink the sizes of inputs: all of one size together, single dims, and pairs of them."""
    axes = [(spec.name, dim) for spec in search.plan.inputs for dim in range(len(spec.shape))]
    for size in sorted(set(_sizes(search.plan).values()), reverse=True):
        _shrink(search, [axis for axis, its in _sizes(search.plan).items() if its == size])
    for axis in axes:
        _shrink(search, [axis])
    for pair in itertools.combinations(axes, 2) if len(axes) <= SEVERAL else ():
        _shrink(search, pair)


def _sizes(plan: PlacedPlan) -> dict[Axis, int]:
    return {(spec.name, dim): size for spec in plan.inputs for dim, size in enumerate(spec.shape)}


def _shrink(search: PlacedSearch, axes: Sequence[Axis]) -> None:
    """Bring dims of one size to a smaller one."""
    found = {size for axis, size in _sizes(search.plan).items() if axis in axes}
    if len(found) == 1:
        (size,) = found
        search.attempt(*(_resized(search.plan, dict.fromkeys(axes, target)) for target in _smaller(search, size)))


def _smaller(search: PlacedSearch, size: int) -> list[int]:
    """Sizes to try, the smallest first."""
    parts = {n for layout in search.plan.inputs for n in layout.layout.mesh.shape}
    tried = {1, 2, 3, 4, *parts, *(2 * n for n in parts), size // 2}
    return sorted(target for target in tried if 0 < target < size)


def _resized(plan: PlacedPlan, sizes: Mapping[Axis, int]) -> PlacedPlan:
    def shape(spec: PlacedInput) -> tuple[int, ...]:
        return tuple(sizes.get((spec.name, dim), size) for dim, size in enumerate(spec.shape))

    return replace(plan, inputs=tuple(replace(spec, shape=shape(spec)) for spec in plan.inputs))


# ------------------------------------------------------------------------------------------------------------- details


def simplify(search: PlacedSearch) -> None:
    """Simplify the rest: stream axes, dtypes, recipes, reductions, and the seed."""
    plan = search.plan
    search.attempt(replace(plan, steps=tuple(replace(step, stream_axis=None) for step in plan.steps)))
    for name in [step.name for step in search.plan.steps[:MANY]]:
        search.attempt(_changed(search.plan, name, lambda step: replace(step, stream_axis=None)))
        search.attempt(_changed(search.plan, name, _summing))
    plain = [replace(spec, dtype=torch.float32, recipe=Recipe()) for spec in search.plan.inputs]
    search.attempt(replace(search.plan, inputs=tuple(plain)))
    search.attempt(replace(search.plan, inputs=tuple(replace(spec, recipe=Recipe()) for spec in search.plan.inputs)))
    search.attempt(*(replace(search.plan, seed=seed) for seed in (0, 1) if seed < search.plan.seed))


def _changed(plan: PlacedPlan, name: str, change: Callable[[PlacedStep], PlacedStep]) -> PlacedPlan:
    return replace(plan, steps=tuple(change(step) if step.name == name else step for step in plan.steps))


def _summing(step: PlacedStep) -> PlacedStep:
    return replace(step, args=(*step.args[:2], "sum")) if step.op == REDUCE else step


__all__ = [
    "MANY", "bypass", "drop_outputs", "end_earlier", "join_sets", "merge_inputs", "shrink_sizes", "simplify", "start_later",
]  # fmt: skip
