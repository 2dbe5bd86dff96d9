"""The reducer on what programs say about time."""

from __future__ import annotations

from dataclasses import replace

from tcverify.program import Program, StreamSettings
from tcverify.shrink import reduce
from tcverify.strategies.timing import FIELDS, Timing, with_timing
from tests.support.programs import reduce_then_norm


def drawn(**fields: object) -> Program:
    """A small program with costs."""
    choices = {"known": "all", "spread": "wide", "streams": ((3,), (5, 6)), "overhead": 3.7e-6, "seed": 7, **fields}
    return with_timing(
        reduce_then_norm(), Timing(**{name: choices.get(name, table[0]) for name, table in FIELDS.items()})
    )  # type: ignore[arg-type]


def cost(program: Program, name: str, rank: int = 0) -> float | None:
    return next((n.meta.get("cost_s") for n in program.graph(rank).nodes if n.name == name), None)


def test_time_that_does_not_matter_goes() -> None:
    reduced = reduce(drawn(skew="independent"), lambda p: p.size >= 1).program
    assert reduced.streams is None
    assert len(reduced.graphs) == 1
    assert all("cost_s" not in node.meta for node in reduced.graphs[0].nodes)


def test_costs_that_matter_become_plain() -> None:
    def slow(program: Program) -> bool:
        return (cost(program, "all_reduce") or 0.0) > 4e-6

    reduced = reduce(drawn(balance=8.0), slow).program
    assert reduced.size == 1
    assert cost(reduced, "all_reduce") == 1e-5
    assert reduced.streams in (None, StreamSettings())


def test_settings_that_matter_stay() -> None:
    def other_streams(program: Program) -> bool:
        return program.streams is not None and len(program.streams.comm) == 2

    reduced = reduce(drawn(), other_streams).program
    assert reduced.streams == StreamSettings((0,), (5, 6))


def test_costs_that_differ_between_ranks_stay_where_they_matter() -> None:
    def differ(program: Program) -> bool:
        return cost(program, "all_reduce", 0) != cost(program, "all_reduce", 1)

    reduced = reduce(drawn(skew="independent"), differ).program
    assert len(reduced.graphs) == 2
    assert {cost(reduced, "all_reduce", rank) for rank in (0, 1)} <= {1e-6, 1e-5, None}


def test_settings_survive_other_moves() -> None:
    program = replace(drawn(), streams=StreamSettings(sync_overhead_s=1e-6))
    reduced = reduce(program, lambda p: p.streams is not None and p.streams.sync_overhead_s > 0).program
    assert (reduced.size, reduced.streams) == (0, StreamSettings(sync_overhead_s=1e-6))
