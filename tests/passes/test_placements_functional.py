"""Placement propagation through functional collectives, and where numbers are known to be the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from tcverify.passes.placements import Placements, propagate
from tcverify.passes.storages import mutated_nodes
from tcverify.program import REPLICATED, VARYING, Mesh, shard
from tests.support.rows_programs import ADD, C10D, MUL, gathered, summed, waited
from tests.support.sequence_programs import GRID, REVERSED, TP2, Build, Builder, program


def facts(build: Build, mesh: Mesh = TP2, shape: tuple[int, ...] = (12, 8)) -> tuple[fx.Node, Placements]:
    """What is known of the output of a program, with what is said beside its graph."""
    gm = program(build, shape, mesh).graph_module(0)
    result = gm.graph.output_node().args[0]
    assert isinstance(result, fx.Node)
    return result, propagate(gm.graph, gm.meta["groups"], gm.meta["same_numbers"])


def item(b: Builder, op: str, value: Any, *rest: Any) -> Any:
    return waited(b, b.graph.getitem(b.call(f"{C10D}{op}", [value, value], *rest), 1))


EQUAL: dict[str, Build] = {
    "all_reduce": lambda b: summed(b, b["v"]),
    "all_reduce by max": lambda b: summed(b, b["v"], op="max"),
    "all_gather": lambda b: gathered(b, b["s"]),
    "broadcast": lambda b: waited(b, b.call(f"{C10D}broadcast", b["v"], 0, "tp")),
    "coalesced": lambda b: item(b, "all_reduce_coalesced", b["v"], "sum", "tp"),
    "a second wait": lambda b: waited(b, summed(b, b["v"])),
    "a sum with a replicated residual": lambda b: b.call(ADD, b["r"], summed(b, b["v"])),
    "a slice at one place": lambda b: b.call("aten::slice.Tensor", b["r"], 0, 2, 5),
    "a product with an integer": lambda b: b.call("aten::mul.Scalar", b["r"], 2),
    "a square": lambda b: b.call("aten::pow.Tensor_Scalar", b["r"], 2),
    "a part of a split": lambda b: b.graph.getitem(b.call("aten::split.Tensor", b["r"], 6), 1),
    "numbers": lambda b: b.call(ADD, b["r"], b.call("aten::arange", 8)),
    "rotated halves": lambda b: b.call(
        "aten::cat", [b.call("aten::neg", b.call("aten::slice.Tensor", b["r"], 1, 4, 8)), b["r"]], -1
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_equal_on_the_group(case: str) -> None:
    result, found = facts(EQUAL[case])
    assert found.placement(result, (0, 1)) == REPLICATED
    assert not found.mutated(result)


def number(b: Builder, of: Any) -> Any:
    return b.graph.constant("number", of)


UNKNOWN: dict[str, Build] = {
    "all_to_all": lambda b: waited(b, b.call(f"{C10D}all_to_all_single", b["r"], [6, 6], [6, 6], "tp")),
    "in place": lambda b: waited(b, b.call(f"{C10D}all_reduce_", b.call("aten::clone", b["v"]), "sum", "tp")),
    "a sum with a varying residual": lambda b: b.call(ADD, b["v"], summed(b, b["x"])),
    "a slice by rank": lambda b: b.call(
        "aten::slice.Tensor", b["r"], 0, number(b, lambda rank: rank), b.graph.constant("end", lambda rank: rank + 4)
    ),
    "a power by rank": lambda b: b.call("aten::pow.Tensor_Scalar", b["r"], number(b, lambda rank: rank + 1)),
    "a factor by rank": lambda b: b.call("aten::mul.Scalar", b["r"], number(b, lambda rank: rank + 1)),
    "numbers by rank": lambda b: b.call("aten::full", [8], number(b, lambda rank: rank)),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_is_known(case: str) -> None:
    result, found = facts(UNKNOWN[case])
    assert found.placement(result, (0, 1)) == VARYING


def test_a_sum_over_one_group_says_nothing_of_another() -> None:
    result, found = facts(lambda b: summed(b, b["r"], "dp"), GRID)
    assert found.replicated(result, (0, 2))
    assert not found.replicated(result, (0, 1))


def test_a_reduce_scatter_gives_a_shard_of_dim_0_that_sums_keep() -> None:
    def build(b: Builder) -> Any:
        mine = waited(b, b.call(f"{C10D}reduce_scatter_tensor", b["x"], "sum", 2, "tp"))
        return b.call(MUL, b.call(ADD, mine, b["s"]), 0.5)

    result, found = facts(build, REVERSED)
    assert found.placement(result, (1, 0)) == shard(0)
    assert found.placement(result, (0, 1)) == VARYING


def test_of_groups_that_nobody_names_nothing_is_known() -> None:
    gm = program(lambda b: summed(b, b["v"])).graph_module(0)
    result = gm.graph.output_node().args[0]
    assert isinstance(result, fx.Node)
    assert not propagate(gm.graph).replicated(result, (0, 1))
    assert not propagate(gm.graph, {"dp": (0, 1)}).replicated(result, (0, 1))


def test_a_wait_writes_into_nothing_and_a_write_behind_it_does() -> None:
    quiet = program(lambda b: summed(b, b["v"])).graph(0)
    assert mutated_nodes(quiet) == frozenset()
    loud = program(lambda b: b.call("aten::mul_.Tensor", summed(b, b["v"]), 0.5)).graph(0)
    assert {node.name for node in mutated_nodes(loud)} == {"all_reduce", "wait_tensor", "mul_"}
