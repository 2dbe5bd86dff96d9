"""Orders, clocks and list scheduling on bare ops, without a graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from torch import fx

from tcverify.passes.multistream.graph import NotLowered, OrderEdge, WorkOp, predecessors
from tcverify.passes.multistream.schedule import (
    StreamClocks,
    critical_path,
    list_schedule,
    rank_order,
    start_order,
    upward_ranks,
)

NODE = fx.Graph().placeholder("x")
COMPUTE, COMM, FUSED = ("compute",), ("comm",), ("compute", "comm")


def op(
    index: int, cost_s: float, resources: tuple[str, ...] = COMPUTE, carriers: tuple[fx.Node, ...] = (NODE,)
) -> WorkOp:
    return WorkOp(index, NODE, cost_s, resources, (), (), (), None, carriers)


def random_ops(seed: int, count: int = 30) -> tuple[list[WorkOp], list[tuple[int, ...]]]:
    chance = random.Random(seed)
    costs = [1e-6, 1e-6, 5e-6, chance.uniform(1e-6, 1e-4)] + ([1e9] if seed % 4 == 0 else [])
    kinds = [COMPUTE, COMPUTE, COMM, FUSED]
    work = [op(i, chance.choice(costs), chance.choice(kinds)) for i in range(count)]
    edges = [OrderEdge(a, b, "RAW") for a, b in itertools.combinations(range(count), 2) if chance.random() < 2 / count]
    collectives = [o.index for o in work if o.communicates]
    edges += [OrderEdge(a, b, "collective") for a, b in itertools.pairwise(collectives)]
    return work, predecessors(count, edges)


def streams(o: WorkOp, placed: object) -> Sequence[int]:
    return (7, 2) if o.resources == COMM else (0, 3)


def busy(o: WorkOp) -> Sequence[str]:
    return o.resources


# ------------------------------------------------------------------------------------------------------------- orders


def test_ranks_count_costs_and_overheads_to_the_end() -> None:
    work = [op(0, 1.0), op(1, 2.0, COMM), op(2, 4.0), op(3, 8.0)]
    before = [(), (0,), (0,), (1, 2)]
    assert upward_ranks(work, before, 0.5) == [1.0 + 0.5 + 4.0 + 0.5 + 8.0, 2.0 + 0.5 + 8.0, 4.0 + 0.5 + 8.0, 8.0]
    assert [o.index for o in rank_order(work, upward_ranks(work, before, 0.5))] == [0, 2, 1, 3]
    assert critical_path(work, before) == 13.0


@pytest.mark.parametrize("seed", range(40))
def test_orders_follow_every_edge(seed: int) -> None:
    """Also where costs are so large that others vanish beside them."""
    work, before = random_ops(seed)
    ranks = upward_ranks(work, before, 2e-6)
    for order in (rank_order(work, ranks), start_order(work, before, ranks, 2e-6)):
        assert sorted(o.index for o in order) == list(range(len(work)))
        position = {o.index: number for number, o in enumerate(order)}
        assert all(position[first] < position[second] for second, firsts in enumerate(before) for first in firsts)


def test_work_that_can_start_goes_before_work_that_waits() -> None:
    work = [op(0, 30.0, COMM), op(1, 10.0), op(2, 10.0), op(3, 10.0)]
    before = [(), (0,), (), (2,)]
    ranks = upward_ranks(work, before, 0.0)
    assert [o.index for o in start_order(work, before, ranks, 0.0)] == [0, 2, 3, 1]
    assert list_schedule(work, before, streams, busy, 0.0).makespan_s == 60.0
    assert list_schedule(start_order(work, before, ranks, 0.0), before, streams, busy, 0.0).makespan_s == 40.0


# ------------------------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("seed", range(40))
def test_tokens_make_sure_of_every_edge_and_none_can_be_spared(seed: int) -> None:
    chance = random.Random(seed)
    work, before = random_ops(seed)
    clocks = StreamClocks(len(work))
    done: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for o in work:
        stream = chance.randrange(3)
        tokens = clocks.missing(stream, sorted(before[o.index], reverse=True))
        behind = done[last[stream]] if stream in last else set()

        def known(chosen: Sequence[int], behind: set[int] = behind) -> set[int]:
            return behind.union(*(done[token] for token in chosen))

        assert set(before[o.index]) <= known(tokens)
        for spared in tokens:
            assert not set(before[o.index]) <= known([token for token in tokens if token != spared])
        clocks.issue(o.index, stream, tokens)
        done[o.index] = known(tokens) | {o.index}
        last[stream] = o.index


# ----------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("seed", range(40))
def test_nothing_overlaps_what_it_may_not(seed: int) -> None:
    work, before = random_ops(seed)
    made = list_schedule(rank_order(work, upward_ranks(work, before, 1e-6)), before, streams, busy, 1e-6)
    placed = {p.op.index: p for p in made.placed}
    for first, second in itertools.combinations(made.placed, 2):
        if first.stream == second.stream or set(first.op.resources) & set(second.op.resources):
            assert first.end_s <= second.start_s
    for second, firsts in enumerate(before):
        for first in firsts:
            overhead = 1e-6 if placed[first].stream != placed[second].stream else 0.0
            assert placed[first].end_s + overhead <= placed[second].start_s
    assert made.critical_path_s <= made.makespan_s == max(p.end_s for p in made.placed)


def test_an_op_that_cannot_wait_runs_where_it_need_not() -> None:
    work = [op(0, 5.0, COMM), op(1, 1.0, COMPUTE, carriers=())]
    made = list_schedule(work, [(), (0,)], lambda o, placed: (3, 7) if o.resources == COMPUTE else (7,), busy, 0.0)
    assert made.placed[1].stream == 7
    with pytest.raises(NotLowered, match="could wait"):
        list_schedule(work, [(), (0,)], lambda o, placed: (3,) if o.resources == COMPUTE else (7,), busy, 0.0)


def test_the_output_waits_for_streams_other_than_the_main_one() -> None:
    work = [op(0, 5.0, COMM), op(1, 1.0), op(2, 1.0, COMM)]
    made = list_schedule(work, [(), (), (0,)], streams, busy, 0.0, join=(0, 1, 2))
    assert made.join == (2,)
