"""Alignment: which nodes of two graphs correspond."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tcverify.ops import TensorSpec
from tcverify.program import Program
from tcverify.report.alignment import align
from tcverify.report.listing import listing_difference, longest_increasing
from tests.support.html_cases import blocks, case


def marks(before: Program, after: Program) -> list[str]:
    return [f"{row.mark} {row.before or '-'} {row.after or '-'}" for row in align(before, after, 0)]


def renamed(program: Program) -> Program:
    """The program with other names of its nodes."""
    graphs = []
    for rank in range(program.world_size):
        graph = program.graph(rank)
        for number, node in enumerate(graph.nodes):
            if node.op == "call_function":
                node.name = f"other_{number}"
        graphs.append(graph)
    return program.with_graphs(graphs)


def test_a_removed_node_and_what_read_it() -> None:
    found = case("wrong-value")
    assert found.rewritten is not None
    assert marks(found.program, found.rewritten) == [
        "same x x",
        "same residual residual",
        "same gain gain",
        "removed all_reduce -",
        "changed add add",
        "same rms_norm rms_norm",
        "same silu silu",
        "same output output",
    ]


def test_other_names_are_no_difference() -> None:
    program = blocks(3)
    rows = align(program, renamed(program), 0)
    assert {row.mark for row in rows} == {"same"}
    assert str(rows[-2].after) == "other_14"


def test_a_node_at_another_place_has_moved() -> None:
    found = case("deadlock")
    assert found.rewritten is not None
    rows = align(found.program, found.rewritten, 0)
    assert [str(row.before or row.after) for row in rows if row.mark == "moved"] == ["all_reduce_1", "all_reduce_1"]


def test_a_value_of_another_shape_has_changed() -> None:
    program = blocks(1)
    graphs = [program.graph(rank) for rank in range(program.world_size)]
    for graph in graphs:
        reduced = next(node for node in graph.nodes if node.name == "all_reduce")
        reduced.meta["val"] = TensorSpec.contiguous((2, 8), torch.float32)
    found = marks(program, program.with_graphs(graphs))
    assert [mark for mark in found if not mark.startswith("same")] == ["changed all_reduce all_reduce"]


def test_both_graphs_keep_their_order() -> None:
    for kind in ("wrong-value", "deadlock", "rewritten-raises"):
        found = case(kind)
        assert found.rewritten is not None
        rows = align(found.program, found.rewritten, 0)
        assert [r.before for r in rows if r.before is not None] == list(found.program.graphs[0].nodes)
        new = found.rewritten.graphs[found.rewritten.ranks[0].graph]
        assert [r.after for r in rows if r.after is not None] == list(new.nodes)


def test_listings_keep_both_graphs_in_order() -> None:
    found = case("deadlock")
    assert found.rewritten is not None
    lines = listing_difference(found.program, found.rewritten, 0)
    assert [line.node for line in lines if line.mark != "+"] == [
        "x",
        "y",
        "all_reduce",
        "all_reduce_1",
        "add",
        "output",
    ]
    assert [line.node for line in lines if line.mark != "-"] == [
        "x",
        "y",
        "all_reduce_1",
        "all_reduce",
        "add",
        "output",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_increasing_subsequence_is_longer(seed: int) -> None:
    values = random.Random(seed).sample(range(20), 8)
    found = [values[i] for i in longest_increasing(values)]
    assert found == sorted(found)
    longer = itertools.combinations(values, len(found) + 1)
    assert not any(list(c) == sorted(c) for c in longer)
