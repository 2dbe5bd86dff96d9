"""Moves that make inputs smaller: dims that belong together shrink together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tcverify.program import InputSpec, shard
from tcverify.shrink.graph.given_values import clamp_indices, with_shape
from tcverify.shrink.graph.legalize import legalize_edit
from tcverify.shrink.graph.replacements import may_replace
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sketch import Ref, Sketch, replace_steps

#: A dim of an input: its name and the number of the dim.
Axis = tuple[str, int]

#: Which of several dims of a view gives way: both ways are tried.
BOTH_WAYS = ("first", "last")

#: Number of calls beyond which dims of one size are not distinguished: examining the program costs as much as a trial.
MANY = 400

#: Dims beyond which pairs and triples of them are not tried.
SEVERAL = 16


def shrink_sizes(search: SketchSearch) -> None:
    """Shrink the sizes of inputs, each set of dims that belong together to the smallest size that will do."""
    done: set[Axis] = set()
    for spec in list(search.sketch.inputs):
        for axis in range(len(spec.shape)):
            tied = _tied(search, (spec.name, axis)) if (spec.name, axis) not in done else {}
            done.update(tied)
            if tied:
                _shrink(search, tied)


def _shrink(search: SketchSearch, tied: Mapping[Axis, int]) -> None:
    unit = _unit(search.sketch, tied)
    last = {(spec.name, len(spec.shape) - 1) for spec in search.sketch.inputs}
    least = 2 if last & set(tied) else 1  # the norm of a row of one element is its sign
    for target in sorted({1, 2, 3, 4, unit // 2, unit - 1}):
        if least <= target < unit:
            sizes = {axis: factor * target for axis, factor in tied.items()}
            edit = _resized(search.sketch, sizes)
            edits = [
                one
                for one in (edit, clamp_indices(edit, {unit * factor: sizes[axis] for axis, factor in tied.items()}))
                if one is not None
            ]
            if any(search.attempt(*edits, prefer=way) for way in BOTH_WAYS):
                return


def _unit(sketch: Sketch, tied: Mapping[Axis, int]) -> int:
    (name, axis), factor = next(iter(tied.items()))
    return next(spec.shape[axis] for spec in sketch.inputs if spec.name == name) // factor


def _tied(search: SketchSearch, axis: Axis) -> dict[Axis, int]:
    """The dims that change with `axis`, each with its size as a multiple of the common unit; empty when none can change.

    They are found by doubling: sets of dims are tried until one fits together, and then those of it are left out that need
    not follow.
    """
    sizes = {(spec.name, k): size for spec in search.sketch.inputs for k, size in enumerate(spec.shape)}
    size = sizes.get(axis, 0)
    if size < 2:
        return {}
    few = len(search.facts.calls) <= MANY
    tied = next((tied for tied in _sets(axis, sizes, few) if _fits(search, tied, sizes)), [])
    for other in tied[1:] if few else ():
        rest = [key for key in tied if key != other]
        if _fits(search, rest, sizes):
            tied = rest
    return {key: sizes[key] // size for key in tied}


def _sets(axis: Axis, sizes: Mapping[Axis, int], few: bool) -> Iterator[list[Axis]]:
    """Sets of dims, `axis` first, that may be what changes with it: itself, all of its size, all multiples, some of them."""
    size = sizes[axis]
    multiples = [other for other, its in sizes.items() if its and its % size == 0 and other != axis]
    yield [axis]
    yield [axis, *(other for other in multiples if sizes[other] == size)]
    yield [axis, *multiples]
    for count in (1, 2) if few and len(multiples) <= SEVERAL else ():
        for chosen in itertools.combinations(multiples, count):
            yield [axis, *chosen]


def drop_axes(search: SketchSearch) -> None:
    """Drop dims of size 1 of inputs with more than two: of all inputs at once, or of one."""
    names = [spec.name for spec in search.sketch.inputs]
    search.attempt(_squeezed(search.sketch, names))
    for name in names:
        search.attempt(_squeezed(search.sketch, [name]))


def reshape_inputs(search: SketchSearch) -> None:
    """Remove a call that changes the shape of its operand: inputs change shape instead.

    Either those that its operand comes from have the shape that it makes, or those that its result meets have the shape of
    its operand.
    """
    for name in list(search.facts.calls):
        facts = search.facts
        result = facts.types(name) if facts.where(name) else None
        for operand in facts.steps[facts.where(name)[0]][name].reads if result else ():
            before = facts.types(operand)
            if not result or not before or len(set(result)) > 1 or len(set(before)) > 1:
                continue
            (old, dtype), (new, other) = before[0], result[0]
            if old != new and dtype == other and may_replace(facts, search.values, name, operand):
                ways = [(old, new), (new, old)]
                if search.attempt(*(_without_call(facts.sketch, name, operand, *way) for way in ways)):
                    break


def _without_call(sketch: Sketch, name: str, operand: str, old: tuple[int, ...], new: tuple[int, ...]) -> Sketch | None:
    """The sketch with the operand of a call read in its place, and inputs of shape `new` in place of those of shape `old`."""
    inputs = tuple(
        with_shape(spec, new) if spec.shape == old and not _sharded(spec) else spec for spec in sketch.inputs
    )
    return None if inputs == sketch.inputs else replace_steps(replace(sketch, inputs=inputs), {name: Ref(operand)})


def _sharded(spec: InputSpec) -> bool:
    return any(placement.kind == "shard" for _, placement in spec.placements)


def _squeezed(sketch: Sketch, names: Sequence[str]) -> Sketch:
    def change(spec: InputSpec) -> InputSpec:
        if spec.name not in names or len(spec.shape) < 3 or 1 not in spec.shape[:-1]:
            return spec
        axis = spec.shape.index(1)
        placements = []
        for dim, placement in spec.placements:
            if placement.dim == axis:
                return spec
            moves = placement.dim is not None and placement.dim > axis
            placements.append((dim, shard(placement.dim - 1) if moves and placement.dim is not None else placement))
        return replace(spec, shape=(*spec.shape[:axis], *spec.shape[axis + 1 :]), placements=tuple(placements))

    return replace(sketch, inputs=tuple(change(spec) for spec in sketch.inputs))


def _fits(search: SketchSearch, tied: Iterable[Axis], sizes: Mapping[Axis, int]) -> bool:
    edit = _resized(search.sketch, {axis: 2 * sizes[axis] for axis in tied})
    return any(legalize_edit(search.facts, edit, way) is not None for way in BOTH_WAYS)


def _resized(sketch: Sketch, sizes: Mapping[Axis, int]) -> Sketch:
    inputs = tuple(
        with_shape(spec, tuple(sizes.get((spec.name, k), size) for k, size in enumerate(spec.shape)))
        for spec in sketch.inputs
    )
    return replace(sketch, inputs=inputs)


__all__ = ["BOTH_WAYS", "drop_axes", "reshape_inputs", "shrink_sizes"]
