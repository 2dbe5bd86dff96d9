"""Memory of an order: what lives when, and what changes hands when nodes change places."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcverify.errors import InternalError
from tcverify.passes.overlap import comm_graph
from tcverify.passes.overlap.memory import Footprint, OrderMemory, footprint
from tests.support.overlap_orders import legal_order, plain_levels
from tests.support.overlap_programs import Builder, drawn, program

DATA = st.binary(min_size=60, max_size=60)
T = 4 * 4 * 4
"""Bytes of a value of these programs."""


def levels(build: Callable[[Builder], Any]) -> list[int]:
    """Values alive while each call runs, beside the three inputs."""
    found = comm_graph(program(build).graph_module(0).graph)
    memory = OrderMemory(footprint(found), range(len(found.nodes)))
    every = memory.levels(range(len(found.nodes)))
    return [level // T - 3 for level, node in zip(every, found.nodes, strict=True) if node.op == "call_function"]


def test_operands_and_results_live_side_by_side() -> None:
    assert levels(lambda b: b.relu(b.relu(b.relu(b["x"])))) == [1, 2, 2]


@pytest.mark.parametrize(("start", "expected"), [(Builder.exchange, [1, 2, 3, 3, 3]), (Builder.start, [1, 2, 2, 2, 3])])
def test_what_a_collective_reads_lives_until_it_is_waited_for(start: Callable[..., Any], expected: list[int]) -> None:
    """Unless the start has copied it."""

    def build(b: Builder) -> Any:
        sent = start(b, b.relu(b["x"]))
        other = b.relu(b["y"])
        done = b.wait(sent)
        return b.add(done, other)

    assert levels(build) == expected


def test_of_several_waits_the_first_one_ends_it() -> None:
    def build(b: Builder) -> Any:
        sent = b.exchange(b.relu(b["x"]))
        done = b.wait(sent)
        other = b.relu(b["y"])
        return b.add(b.wait(sent), b.add(done, other))

    assert levels(build) == [1, 2, 2, 2, 2, 3, 3]


def test_of_coalesced_operands_each_lives_until_its_own_wait() -> None:
    def build(b: Builder) -> Any:
        operands = [b.relu(b["x"]), b.relu(b["y"])]
        sent = b.call("_c10d_functional::all_gather_into_tensor_coalesced", operands, 2, "tp")
        parts = [b.graph.getitem(sent, 0), b.graph.getitem(sent, 1)]
        first = b.wait(parts[0])
        between = b.relu(b["w"])
        return b.add(first, b.wait(parts[1])), between

    # relu, relu, start, getitem, getitem, wait (then the first operand goes), relu, wait (then the second goes), add
    assert levels(build) == [1, 2, 6, 6, 6, 6, 6, 6, 7]


def test_views_and_in_place_ops_keep_their_storage() -> None:
    def build(b: Builder) -> Any:
        made = b.relu(b["x"])
        seen = b.view(made)
        written = b.add_(made, b["y"])
        return b.add(seen, written), b.relu(b["w"])

    assert levels(build) == [1, 1, 1, 2, 2]


def test_inputs_live_throughout_and_outputs_to_the_end() -> None:
    def build(b: Builder) -> Any:
        returned = b.relu(b["x"])
        b.add_(b["y"], b["w"])
        return returned, b.relu(b.relu(b["y"]))

    assert levels(build) == [1, 1, 2, 3]


@given(DATA, st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_levels_are_those_that_are_told_plainly(data: bytes, seed: int) -> None:
    drawn_program, _ = drawn(data)
    found = comm_graph(drawn_program.graph_module(0).graph)
    numbers = {node: number for number, node in enumerate(found.nodes)}
    for order in (list(found.nodes), legal_order(found, random.Random(seed))):
        memory = OrderMemory(footprint(found), [numbers[node] for node in order])
        told = plain_levels(drawn_program.graphs[0], [node.name for node in order])
        assert memory.levels([numbers[node] for node in order]) == told


@given(DATA, st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_what_changes_hands_is_what_memory_computed_anew_says(data: bytes, seed: int) -> None:
    """Any candidate and any group beside it, whatever depends on what: last uses do not ask."""
    rng = random.Random(seed)
    found = comm_graph(drawn(data)[0].graph_module(0).graph)
    order = list(range(len(found.nodes)))
    memory = OrderMemory(footprint(found), order)
    for _ in range(40):
        if len(order) < 2:
            break
        first = rng.randrange(len(order) - 1)
        length = rng.randint(1, min(5, len(order) - 1 - first))
        if rng.random() < 0.5:
            candidate, group = order[first], order[first + 1 : first + 1 + length]
            handovers = memory.behind(candidate, set(group))
            after = [*group, candidate]
        else:
            group, candidate = order[first : first + length], order[first + length]
            latest = {s: node for node in group for s in memory.footprint.touched[node]}
            handovers = memory.before(candidate, latest)
            after = [candidate, *group]
        level = memory.levels(order)[first] - memory.allocated[order[first]]
        predicted = memory.peak(level, after, handovers)
        memory.apply(handovers)
        order[first : first + length + 1] = after
        memory.verify(order)
        assert predicted == max(memory.levels(order)[first : first + length + 1])


def test_a_last_use_that_stays_with_its_old_owner_is_noticed() -> None:
    def build(b: Builder) -> Any:
        made = b.relu(b["x"])
        return b.relu(made), b.mm(made)

    found = comm_graph(program(build).graph_module(0).graph)
    order = list(range(len(found.nodes)))
    memory = OrderMemory(footprint(found), order)
    candidate, other = [n for n, node in enumerate(found.nodes) if node.op == "call_function"][1:]
    assert memory.behind(candidate, {other})
    order[candidate], order[other] = order[other], order[candidate]
    with pytest.raises(InternalError, match="incremental memory"):
        memory.verify(order)


def test_what_has_changed_hands_lives_until_the_other_node() -> None:
    # 1 and 2 read what 0 makes; 2, which frees it, goes before 1
    memory = OrderMemory(Footprint(0, (16, 20, 8), (0, 0, 0), ((0,), (0, 1), (0, 2)), (16, 20, 8), ()), [0, 1, 2])
    handovers = memory.before(2, {0: 1, 1: 1})
    assert handovers == [(0, 2, 1)]
    assert memory.peak(16, [2, 1], handovers) == 16 + 20
    memory.apply(handovers)
    memory.verify([0, 2, 1])
    assert memory.levels([0, 2, 1]) == [16, 24, 36]
