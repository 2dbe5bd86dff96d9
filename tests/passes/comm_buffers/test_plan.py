"""Places of buffers: apart where they are needed together, aligned, a function of what is wanted."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest

from tcverify.passes import CommBuffers
from tcverify.passes.comm_buffers.plan import BufferPlan, BufferRequest, plan_buffers
from tcverify.program.sharing import _Outline
from tests.support.buffer_programs import clash, drawn


def wanted(count: int, seed: int, longest: int = 12) -> list[BufferRequest]:
    """Intervals of random lengths, in the order of their uses, which is not that of their births."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        birth = draw.randrange(2 * count)
        size = draw.choice((1, 4, 100, 256, 257, 4096, draw.randrange(1, 10_000)))
        found.append(
            BufferRequest(f"n{number}", draw.choice(("tp", "dp")), size, birth, birth + draw.randrange(longest), ("c",))
        )
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("reuse", [True, False])
def test_buffers_that_are_needed_together_lie_apart(seed: int, reuse: bool) -> None:
    alignment = (1, 16, 256, 1000)[seed % 4]
    given = wanted(40, seed)
    plan = plan_buffers(given, alignment, reuse=reuse)
    assert [b.node for b in plan.buffers] == [one.node for one in given]
    assert all(b.offset % alignment == 0 for b in plan.buffers)
    assert not any(clash(first, second) for first, second in combinations(plan.buffers, 2))
    assert plan.nbytes == max(b.offset + b.nbytes for b in plan.buffers)
    assert plan == plan_buffers(given, alignment, reuse=reuse)
    if not reuse:
        ends = [b.offset + b.nbytes for b in plan.buffers]
        assert all(end <= b.offset for end, b in zip(ends, plan.buffers[1:], strict=False))


def test_sharing_saves_memory_and_stays_close_to_what_is_live_at_once() -> None:
    for seed in range(20):
        given = [one for one in wanted(60, seed)]
        shared, apart = plan_buffers(given, 1, reuse=True), plan_buffers(given, 1, reuse=False)
        peak = max(sum(w.nbytes for w in given if w.birth <= t <= w.death) for t in {w.birth for w in given})
        assert peak <= shared.nbytes <= 2 * peak
        assert shared.nbytes < apart.nbytes


def test_the_smallest_gap_is_taken() -> None:
    def one(name: str, size: int, birth: int, death: int) -> BufferRequest:
        return BufferRequest(name, "tp", size, birth, death, ())

    given = [
        one("wide", 300, 0, 1), one("left", 10, 0, 9), one("narrow", 100, 0, 1), one("right", 10, 0, 9),
        one("late", 90, 2, 9), one("later", 300, 2, 9), one("last", 20, 3, 9),
    ]  # fmt: skip
    plan = plan_buffers(given, 1, reuse=True)
    assert [b.offset for b in plan.buffers] == [0, 300, 310, 410, 310, 0, 420]


def test_what_is_needed_last_where_another_is_made_is_needed_together() -> None:
    given = [
        BufferRequest("a", "tp", 8, 0, 5, ()),
        BufferRequest("b", "tp", 8, 5, 9, ()),
        BufferRequest("c", "tp", 8, 6, 9, ()),
    ]
    assert [b.offset for b in plan_buffers(given, 8, reuse=True).buffers] == [0, 8, 0]


def test_ten_thousand_buffers_take_a_second() -> None:
    given = wanted(10_000, seed=1, longest=50)
    before = time.perf_counter()
    plan_buffers(given, 256, reuse=True)
    assert time.perf_counter() - before < 5


def test_a_plan_is_a_table() -> None:
    text = str(plan_buffers([BufferRequest("mm", "tp", 128, 2, 5, ("all_reduce", "all_reduce_1"))], 256, reuse=True))
    assert text.splitlines() == [
        "buffer  group  offset  bytes  live  collectives",
        "mm      tp     0       128    2-5   all_reduce, all_reduce_1",
        "1 buffers in 128 bytes; places are shared",
    ]
    assert str(BufferPlan()).endswith("0 buffers in 0 bytes; every buffer has its own place")


@pytest.mark.parametrize("reuse", [True, False])
def test_ranks_that_meet_in_a_collective_have_its_buffers_at_one_place(reuse: bool) -> None:
    shared = planned = 0
    for program in drawn(20, seed=5):
        done = CommBuffers(reuse=reuse)
        plans = []
        for gm in program.graph_modules():
            done(gm)
            assert not any(clash(a, b) for a, b in combinations(done.plan.buffers, 2))
            plans.append(done.plan)
        planned += any(plan.buffers for plan in plans)
        for dim in program.mesh.dims:
            for group in dim.groups:
                rows = [[b for b in plans[rank].buffers if b.group == dim.name] for rank in group]
                places = [[(b.offset, b.nbytes, len(b.collectives)) for b in row] for row in rows]
                assert all(row == places[0] for row in places)
                shared += len(group) > 1 and bool(places[0])
    assert planned > 8
    assert shared > 8


def test_kinds_of_ranks_are_told_by_what_they_run() -> None:
    """As found without binding a graph to a rank, and as seen on the graphs that passes are given."""
    several = 0
    for program in drawn(20, seed=6):
        outlines = [_Outline(program.graph(rank), {}).structure for rank in range(program.world_size)]
        keys = [(o, *(len(d.group(r)) for d in program.mesh.dims)) for r, o in enumerate(outlines)]
        assert program._kinds == [keys.index(key) for key in keys]
        several += len(set(program._kinds)) > 1
    assert several > 3
