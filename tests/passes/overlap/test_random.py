"""Drawn programs: the dependency graph against notes taken while drawing, and what every greedy pass keeps of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tcverify.passes.overlap import (
    OVERLAP_PASSES,
    RaiseComms,
    ReorderComputeForOverlap,
    ReorderForComputeCommOverlap,
    SinkWaits,
    comm_graph,
    is_valid_order,
)
from tcverify.verification.verifier import verify
from tests.support.overlap_orders import movable
from tests.support.overlap_programs import GRID, TP2, Note, closure, drawn, must_follow, names

PROGRAMS = st.binary(min_size=75, max_size=75)
GREEDY = [SinkWaits, RaiseComms, ReorderComputeForOverlap, ReorderForComputeCommOverlap]


def needed(notes: list[Note]) -> list[int]:
    pairs = itertools.combinations(range(len(notes)), 2)
    return closure(len(notes), [(i, j) for i, j in pairs if must_follow(notes[i], notes[j])])


@given(PROGRAMS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_dependencies_are_those_that_a_program_has(data: bytes, racy: bool) -> None:
    """Neither more nor fewer, however many edges they take."""
    program, notes = drawn(data, racy=racy)
    found = comm_graph(program.graph(0))
    numbers = {note.name: number for number, note in enumerate(notes)}
    assert [node.name for node in movable(found)] == list(numbers)
    edges = [
        (numbers[earlier.name], numbers[node.name])
        for node in movable(found)
        for earlier in found.predecessors[node]
        if earlier.op != "placeholder"
    ]
    assert closure(len(notes), edges) == needed(notes)
    assert all(node in found.successors[earlier] for node in found.nodes for earlier in found.predecessors[node])


@pytest.mark.parametrize("kind", GREEDY)
@given(PROGRAMS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_must_follow_follows(kind: type, data: bytes, racy: bool) -> None:
    program, notes = drawn(data, racy=racy)
    gm = program.graph_module(0)
    found = comm_graph(gm.graph)
    before = names(gm.graph)
    pass_ = kind()
    pass_(gm)
    gm.graph.lint()
    order = {name: place for place, name in enumerate(names(gm.graph))}
    assert sorted(order) == sorted(before)
    assert is_valid_order(found, list(gm.graph.nodes))
    for number, behind in enumerate(needed(notes)):
        for earlier in range(number):
            if behind >> earlier & 1:
                assert order[notes[earlier].name] < order[notes[number].name]
    assert (names(gm.graph) == before) == (not any(pass_.rewrites.values()))


@pytest.mark.parametrize("kind", [SinkWaits, RaiseComms, ReorderComputeForOverlap])
@given(PROGRAMS)
@settings(max_examples=60, deadline=None)
def test_a_second_run_changes_nothing(kind: type, data: bytes) -> None:
    gm = drawn(data)[0].graph_module(0)
    kind()(gm)
    before = names(gm.graph)
    again = kind()
    again(gm)
    assert names(gm.graph) == before
    assert again.rewrites == {"moved": 0}


@pytest.mark.parametrize("kind", [SinkWaits, RaiseComms])
@given(PROGRAMS, st.booleans())
@example(bytes(33) + b"\xc5\0\0\0\x01\x01" + bytes(36), False)  # waits for what it has not started
@settings(max_examples=60, deadline=None)
def test_no_wait_and_no_start_could_go_further(kind: type, data: bytes, racy: bool) -> None:
    """After sinking, what stands right behind a wait needs it, or is a wait. After raising, what stands right before a start is
    needed by it or by one before it. A graph that starts nothing is left alone, whatever it waits for."""
    gm = drawn(data, racy=racy)[0].graph_module(0)
    original = names(gm.graph)
    kind()(gm)
    found = comm_graph(gm.graph)
    if not found.starts:
        assert names(gm.graph) == original
        return
    for before, behind in itertools.pairwise(movable(found)):
        if kind is SinkWaits and found.kind(before) == "wait" and found.kind(behind) != "wait":
            assert before in found.predecessors[behind]
        if kind is RaiseComms and found.kind(behind) == "start":
            assert before in found.predecessors[behind]


@given(PROGRAMS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_without_collectives_under_way_nothing_moves(data: bytes, grid: bool) -> None:
    """All communication blocks: op 10 in place of every start, nothing in place of every wait."""
    blocking = bytes(
        byte if number % 3 else (10 if byte % 12 in (4, 7, 8, 9) else byte) for number, byte in enumerate(data)
    )
    program, _ = drawn(blocking, mesh=GRID if grid else TP2)
    for kind in OVERLAP_PASSES.values():
        gm = program.graph_module(0)
        before = names(gm.graph)
        kind()(gm)
        assert names(gm.graph) == before


@pytest.mark.parametrize("kind", [*GREEDY, OVERLAP_PASSES["decide_global_ordering_of_comms"]])
@given(PROGRAMS, st.booleans())
@settings(max_examples=12, deadline=None)
def test_programs_keep_their_meaning(kind: type, data: bytes, grid: bool) -> None:
    program, _ = drawn(data, mesh=GRID if grid else TP2)
    verdict = verify(kind(), program)
    assert verdict, (verdict.findings, verdict.doubts)
