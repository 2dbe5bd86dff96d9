"""Reduces programs whose tensors carry layouts, whose graphs differ from rank to rank, by way of their plans."""

from __future__ import annotations

from collections.abc import Callable

from tcverify.errors import TcverifyError
from tcverify.ops.shapes import ShapeError
from tcverify.program import Program
from tcverify.shrink.global_view.axes import drop_axes, shard_less
from tcverify.shrink.global_view.meshes import shrink_meshes
from tcverify.shrink.global_view.moves import (
    bypass,
    drop_outputs,
    end_earlier,
    join_sets,
    merge_inputs,
    shrink_sizes,
    simplify,
    start_later,
)
from tcverify.shrink.global_view.reading import plan_of
from tcverify.shrink.global_view.search import PlacedSearch
from tcverify.shrink.greedy import OutOfTime, descend

#: What is tried, again and again until none of it helps; the largest steps first.
PLACED_MOVES: tuple[Callable[[PlacedSearch], None], ...] = (
    end_earlier,
    drop_outputs,
    start_later,
    bypass,
    join_sets,
    shrink_meshes,
    merge_inputs,
    shrink_sizes,
    shard_less,
    drop_axes,
    simplify,
)


def reduce_placed(
    program: Program, shows: Callable[[Program], bool], deadline: float | None
) -> tuple[Program, bool, int] | None:
    """Make a program smaller by way of its plan. Arguments as of `reduce`.

    Returns:
        The program, whether the deadline ended it, and the number of trials; None where the program has no plan, or what the
        plan makes does not show what is looked for.
    """
    plan = plan_of(program)
    if plan is None:
        return None
    try:
        search = PlacedSearch(plan, shows, deadline)
    except (TcverifyError, ShapeError):
        return None
    try:
        if not search.ask(search.program):
            return None
    except OutOfTime:
        return program, True, 0
    try:
        descend(search, PLACED_MOVES)
    except OutOfTime:
        return search.program, True, search.trials
    return search.program, False, search.trials


__all__ = ["PLACED_MOVES", "reduce_placed"]
