"""Asynchronous programs on real process groups: groups that many programs use, whatever became of the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcverify import verify
from tcverify.execution import ProcessGroupPool
from tcverify.program import Program
from tcverify.program.builder import GraphBuilder
from tests.execution.test_asynchrony import (
    BOTH,
    LOCKSTEP,
    TWO,
    N,
    X,
    crossed,
    outputs,
    program,
    start,
    two_graphs,
    wait,
)

Pools = Callable[[int], ProcessGroupPool]


def total(b: GraphBuilder) -> Any:
    return wait(b, start(b, "all_reduce", b.input("x"), "sum", "tp"))


def check_agreement(pool: ProcessGroupPool, p: Program) -> None:
    for mine, theirs in zip(outputs(LOCKSTEP.run(p)), outputs(pool.run(p)), strict=True):
        assert all(torch.allclose(a, b) for a, b in zip(mine, theirs, strict=True))


def test_ranks_that_start_on_two_groups_in_different_orders_do_not_wait_for_each_other() -> None:
    with ProcessGroupPool(2, timeout=20) as pool:  # of its own: the groups must not have been used before
        check_agreement(pool, two_graphs(crossed, BOTH))


def raising(starts: Callable[[int], bool], waits: Callable[[int], bool], raises: Callable[[int], bool]) -> Program:
    """Some ranks start a collective, some raise behind that, some wait."""

    def build(b: GraphBuilder) -> Any:
        x, n = b.input("x"), b.input("n")
        rank = b.representative
        buffer = b.call("aten::clone", x)
        if starts(rank):
            start(b, "all_reduce_", buffer, "sum", "tp")
        rows = b.call("aten::add.Tensor", b.call("aten::select.int", n, 1, 0), 100000)
        found = b.call("aten::index_select", x, 0, rows) if raises(rank) else x
        return (wait(b, buffer) if waits(rank) else buffer), found

    return two_graphs(build, TWO, [X, N])


@pytest.mark.parametrize(
    "broken",
    [
        raising(lambda rank: rank == 0, lambda rank: rank == 0, lambda rank: True),
        raising(lambda rank: True, lambda rank: True, lambda rank: rank == 0),
        raising(lambda rank: rank == 1, lambda rank: True, lambda rank: rank == 0),
    ],
    ids=["none of the others starts", "the others wait", "the others wait for ever"],
)
def test_collectives_that_a_raising_rank_leaves_under_way_do_not_meet_those_of_the_next_program(
    pool: Pools, broken: Program
) -> None:
    p = program(total)
    for _ in range(2):
        error = pool(2).run(broken).error
        assert error is not None
        assert (error.rank, error.error) == (0, LOCKSTEP.run(broken).ranks[0].error)
        check_agreement(pool(2), p)


def test_ranks_that_come_to_their_end_live_on_where_others_raise(pool: Pools) -> None:
    broken = raising(lambda rank: False, lambda rank: False, lambda rank: rank == 0)
    pool(2).start()
    before = pool(2).pids
    for _ in range(3):
        assert pool(2).run(broken).error is not None
        check_agreement(pool(2), program(total))
    assert pool(2).pids == before


def returned_unwaited(b: GraphBuilder) -> Any:
    return start(b, "all_reduce", b.input("x"), "sum", "tp")


def read_too_early(b: GraphBuilder) -> Any:
    under_way = start(b, "all_reduce", b.input("x"), "sum", "tp")
    early = b.call("aten::mul.Tensor", under_way, 1.0)
    return wait(b, under_way), early


@pytest.mark.parametrize("build", [returned_unwaited, read_too_early])
def test_a_race_of_the_original_is_no_divergence(pool: Pools, build: Callable[[GraphBuilder], Any]) -> None:
    verdict = verify(lambda gm: None, program(build), confirm=pool(2))
    assert verdict.status == "inconclusive"
    assert {doubt.reason for doubt in verdict.doubts} == {"ill-typed-program"}
