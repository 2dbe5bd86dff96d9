"""The graph reducer: the smallest program that still shows what is looked for.

Hypothesis minimises the choices that a program is drawn from, not the program. The reducer edits the graph itself: it knows
nothing of passes or verdicts, only a predicate over programs. See `reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tcverify.program import Program
from tcverify.shrink.global_view.reducer import reduce_placed
from tcverify.shrink.graph.async_moves import (
    bypass_collectives,
    drop_declared_order,
    drop_transfers,
    narrow_coalesced,
    run_one_graph,
    write_into_new,
)
from tcverify.shrink.graph.boundaries import drop_outputs, end_earlier, return_operands, start_later
from tcverify.shrink.graph.meshes import shrink_mesh
from tcverify.shrink.graph.moves import bypass, bypass_many, drop_inputs, merge_inputs, read_earlier
from tcverify.shrink.graph.rescheduling import bypass_rescheduled
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.simplification import simplify
from tcverify.shrink.graph.sizes import drop_axes, reshape_inputs, shrink_sizes
from tcverify.shrink.graph.timing import simplify_timing
from tcverify.shrink.graph.windows import cut_down
from tcverify.shrink.greedy import OutOfTime, descend

#: What is tried, again and again until none of it helps; the largest steps first.
MOVES: tuple[Callable[[SketchSearch], None], ...] = (
    end_earlier,
    drop_outputs,
    start_later,
    drop_transfers,
    run_one_graph,
    shrink_mesh,
    bypass_collectives,
    narrow_coalesced,
    write_into_new,
    bypass_many,
    bypass,
    reshape_inputs,
    return_operands,
    drop_outputs,
    drop_inputs,
    merge_inputs,
    read_earlier,
    shrink_sizes,
    drop_axes,
    drop_declared_order,
    simplify_timing,
    simplify,
    bypass_rescheduled,
)


#: Ways around a call that are tried where a few nodes more do no harm.
FEW_WAYS = 2

#: What makes a program much smaller in few trials, and leaves its mesh: for a program that is only to show what a pass does.
COARSE: tuple[Callable[[SketchSearch], None], ...] = (
    end_earlier,
    drop_outputs,
    start_later,
    drop_transfers,
    run_one_graph,
    bypass_collectives,
    narrow_coalesced,
    write_into_new,
    bypass_many,
    partial(bypass, most=FEW_WAYS),
    drop_inputs,
    merge_inputs,
    shrink_sizes,
    drop_axes,
)


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a reduction came to.

    Attributes:
        program: the smallest program found.
        cut: whether the deadline ended it before all moves had been tried on that program.
        trials: how many programs the predicate was asked about.
    """

    program: Program
    cut: bool
    trials: int


def reduce(
    program: Program,
    shows: Callable[[Program], bool],
    deadline: float | None = None,
    suspects: Sequence[str] = (),
    moves: Sequence[Callable[[SketchSearch], None]] = MOVES,
) -> Reduction:
    """Make a program smaller as long as `shows` holds, until no move makes it smaller.

    Large programs are cut first (see `cut_down`), so that moves are tried on a window of them. Moves drop outputs, nodes, inputs,
    ranks and mesh dims, shrink sizes, and make values, placements, dtypes, constants and costs plain. A replacement of a value
    has its shape and dtype and is equal on all ranks on which the value was. Correct metadata is renewed, missing
    or wrong metadata stays so. Deterministic if `shows` is.

    Args:
        program: one for which `shows` holds; any program, whatever its graphs hold.
        shows: a predicate; it is also called for programs that do not run, and must reject them.
        deadline: on the monotonic clock; `shows` is not called after it.
        suspects: names of nodes of the program near which `shows` finds what it looks for, the likeliest first (see
            `suspects_of`); they save trials where the program is large.
        moves: the moves to try.
    """
    placed = reduce_placed(program, shows, deadline)
    if placed is not None:
        return Reduction(*placed)
    search = SketchSearch(program, shows, deadline)
    try:
        cut_down(search, suspects)
        descend(search, moves)
    except OutOfTime:
        return Reduction(search.program, True, search.trials)
    return Reduction(search.program, False, search.trials)


__all__ = ["COARSE", "Reduction", "reduce"]
