"""Drawn programs: what the iterative passes promise, judged by oracles that share nothing with them."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcverify.passes.overlap import (
    IterativePass,
    ReorderCommunicationPreservingPeakMemory,
    SinkWaitsIterative,
    comm_graph,
    is_valid_order,
)
from tcverify.program import Program
from tcverify.strategies.functional.programs import decode_functional
from tcverify.verification.verifier import verify
from tests.sizes import by_night
from tests.support.large_functional import large_functional_program
from tests.support.overlap_orders import plain_levels, plain_makespan
from tests.support.overlap_programs import GRID, TP2, US, drawn, names

SMALL = st.binary(min_size=75, max_size=75)
KINDS = [ReorderCommunicationPreservingPeakMemory, SinkWaitsIterative]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"memory_budget": 0.3},
    {"memory_budget": 5, "group_with_collectives": False},
    {"memory_budget": 5, "extra_comm_comp_overlap": 0, "limit": 2},
    {"memory_budget": 5, "use_runtime_estimates": False},
]


def keeps_its_promises(kind: type[IterativePass], options: dict[str, Any], program: Program, caplog: Any) -> bool:
    """Assert what the contract says; returns whether anything moved."""
    gm = program.graph_module(0)
    found, before = comm_graph(gm.graph), list(gm.graph.nodes)
    pass_ = kind(check_memory=True, **options)
    with caplog.at_level(logging.WARNING, "tcverify.passes"):
        pass_(gm)
    assert not caplog.records  # no order had to be given up
    gm.graph.lint()
    after = list(gm.graph.nodes)
    assert is_valid_order(found, after)
    original = program.graphs[program.ranks[0].graph]
    peaks = [max(plain_levels(original, [node.name for node in order])) for order in (before, after)]
    assert pass_.contract.memory_budget is not None
    assert peaks[1] <= peaks[0] * (1 + pass_.contract.memory_budget)
    if pass_.contract.overlap:
        exposed = [plain_makespan(order)[1] for order in (before, after)]
        assert exposed[1] <= exposed[0] + 1e-12
        rows = pass_.statistics
        assert all(row.initial_exposed_s is not None and row.final_exposed_s is not None for row in rows)
    return before != after


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@given(SMALL, st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_promises_are_kept(kind: type[IterativePass], options: dict[str, Any], data: bytes, seed: int) -> None:
    program, _ = drawn(data)
    rng = random.Random(seed)
    for node in program.graphs[0].nodes:
        if node.op == "call_function":
            node.meta["cost_s"] = rng.choice([0, 0.05, 1, 2.5, 7, 30.1]) * US
    keeps_its_promises(kind, options, program, _Records())


class _Records:
    """Catches what is logged: a fixture lives longer than one example."""

    def __init__(self) -> None:
        self.records: list[logging.LogRecord] = []

    def at_level(self, level: int, name: str) -> _Records:
        self._handler, self._logger = logging.Handler(level), logging.getLogger(name)
        self._handler.emit = self.records.append  # type: ignore[method-assign]
        return self

    def __enter__(self) -> None:
        self._logger.addHandler(self._handler)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self._handler)


@pytest.mark.parametrize("kind", KINDS)
def test_functional_programs_keep_their_meaning_and_most_are_moved(kind: type[IterativePass]) -> None:
    rng = random.Random(3)
    moved = 0
    count = by_night(24, 9)
    for number in range(count):
        program = decode_functional(GRID if number % 2 else TP2, rng.randbytes(500))
        verdict = verify(kind(check_memory=True, memory_budget=0.1 * (number % 3)), program)
        assert verdict.status == "passed", verdict.findings or verdict.doubts
        moved += verdict.changed
    assert moved >= 2 / 3 * count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timed", [True, False])
def test_large_graphs_take_seconds(kind: type[IterativePass], timed: bool) -> None:
    gm = large_functional_program(GRID, 2000, 1).graph_module(0)
    before = names(gm.graph)
    pass_ = kind(memory_budget=10, use_runtime_estimates=timed)
    pass_(gm)
    assert names(gm.graph) != before
    assert len(pass_.statistics) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_chain_is_no_problem(kind: type[IterativePass]) -> None:
    def build(b: Any) -> Any:
        value, done = b["y"], b.wait(b.start(b["x"], cost=1000))
        for _ in range(by_night(5000, 1500)):
            value = b.relu(value, cost=1)
        other = b["w"]
        for _ in range(by_night(5000, 1500)):
            other = b.relu(other, cost=1)
        return value, done, other, b.wait(b.start(b["y"], cost=4000))

    from tests.support.overlap_programs import program

    pass_ = kind(memory_budget=1)
    pass_(program(build).graph_module(0))
    assert sum(row.moves for row in pass_.statistics) > 1000
