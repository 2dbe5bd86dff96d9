"""Diagnosis of asynchronous programs: writes in place that come early, operands in another order, frees, ranks that part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.execution import Lockstep
from tcverify.explain.diagnosis import diagnose
from tcverify.program import PARTIAL, Contract, Finding, InputSpec, Program
from tests.support.async_programs import DP2_TP2, Functional, edited, judge, program, reordered

PARTS = tuple(InputSpec(name, (4, 4), placements=(("dp", PARTIAL),)) for name in ("x", "y"))


def wrong(label: str) -> Finding:
    return Finding("wrong-value", "equivalence", "", "", None, 0, {"label": label})


def said(before: Program, after: Program, finding: Finding) -> str:
    return str(diagnose(before, after, finding).first)


def reduced_later(b: Functional) -> fx.Node:
    product = b.mm(b.x)
    b.wait(b.start(b.x, kind="all_reduce_"))
    return b.relu(product)


def written_then_reduced(b: Functional) -> fx.Node:
    b.add_(b.x, b.y)
    b.wait(b.start(b.x, kind="all_reduce_"))
    return b.relu(b.y)


@pytest.mark.parametrize(
    ("build", "order", "label", "node", "operand"),
    [
        (reduced_later, ["all_reduce_", "mm", "wait_tensor", "relu"], "output 0", "mm", "x"),
        (reduced_later, ["all_reduce_", "wait_tensor", "mm", "relu"], "output 0", "mm", "x"),
        (written_then_reduced, ["all_reduce_", "wait_tensor", "add_", "relu"], "input 'x' after the run", "add_", "x"),
    ],
)
def test_a_read_behind_a_write_that_came_after_it_says_so(
    build: Callable[[Functional], Any], order: list[str], label: str, node: str, operand: str
) -> None:
    made = program(build, inputs=PARTS)
    sentence = said(made, reordered(made, order), wrong(label))
    assert sentence.startswith(f"'{node}' is ")
    assert sentence.endswith(
        f"it reads '{operand}' after 'all_reduce_' writes into it, where the original's reads it before"
    )


def test_a_read_in_front_of_both_writes_is_not_said_to_be_late() -> None:
    made = program(written_then_reduced, inputs=PARTS)
    assert diagnose(made, made, wrong("input 'x' after the run")).first is None


def test_tensors_of_one_start_in_another_order_are_named() -> None:
    def coalesced(b: Functional) -> fx.Node:
        started = b.call("_c10d_functional::all_reduce_coalesced", [b.x, b.y], "sum", "dp")
        first, second = (b.wait(b.getitem(started, i)) for i in range(2))
        return b.add(first, b.relu(second))

    made = program(coalesced, inputs=PARTS)
    turned = edited(made, lambda graph, nodes: nodes["all_reduce_coalesced"].update_arg(0, [nodes["y"], nodes["x"]]))
    assert said(made, turned, wrong("output 0")) == (
        "'all_reduce_coalesced' is not what the original's is: "
        "it takes 'y', 'x' in this order, where the original's takes 'x', 'y'"
    )


def test_another_group_is_named_before_what_it_does_to_values() -> None:
    parts = tuple(InputSpec(name, (4, 4), placements=(("tp", PARTIAL),)) for name in ("x", "y"))
    made = program(lambda b: b.wait(b.start(b.x, "tp", "all_gather_into_tensor")), mesh=DP2_TP2, inputs=parts)
    other = edited(made, lambda graph, nodes: nodes["all_gather_into_tensor"].update_arg(2, "dp"))
    assert "its 'group_name' is 'dp', where the original's is 'tp'" in said(made, other, wrong("output 0"))


@pytest.mark.parametrize(("sizes", "by"), [((0,), "default"), ((64, 0), "default_1")])
def test_a_read_of_freed_memory_says_who_freed_it(sizes: tuple[int, ...], by: str) -> None:
    def twice(b: Functional) -> fx.Node:
        made = b.relu(b.x)
        return b.add(b.mm(made), b.mm(made))

    made = program(twice)

    def free(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        with graph.inserting_before(nodes["mm_1"]):
            for size in sizes:
                graph.call_function(torch.ops.inductor.resize_storage_bytes_.default, (nodes["relu"], size))

    freed = edited(made, free)
    run = Lockstep().run(freed)
    assert run.error is not None
    sentence = said(made, freed, Finding("rewritten-raises", "equivalence", "", "", None, 0))
    assert sentence == f"'mm_1' raises: it reads 'relu', which 'resize_storage_bytes__{by}' has freed"


def test_what_raises_is_not_to_blame_for_what_it_is_given() -> None:
    made = program(lambda b: b.mm(b.relu(b.x)))

    def summed(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["relu"].target = torch.ops.aten.sum.default

    sentence = said(made, edited(made, summed), Finding("rewritten-raises", "equivalence", "", "", None, 0))
    assert sentence.startswith("'relu' ")
    assert sentence.endswith(": it calls sum, where the original's 'relu' calls relu")


def test_ops_without_results_need_no_metadata() -> None:
    made = program(lambda b: b.relu(b.mm(b.x)))

    def free(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        with graph.inserting_after(nodes["relu"]):
            graph.call_function(torch.ops.inductor.resize_storage_bytes_.default, (nodes["mm"], 0))

    def bare(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["relu"].meta.pop("val", None)

    assert judge("metadata", made, edited(made, free)) == []
    (finding,) = judge("metadata", made, edited(made, bare))
    assert finding.title == "meta['val'] of 'relu' is missing"


def two_starts(b: Functional) -> fx.Node:
    first, second = b.start(b.x), b.start(b.y, kind="all_gather_into_tensor")
    b.wait(second)
    return b.wait(first)


def parted(edit: Callable[[fx.Graph, dict[str, fx.Node]], Any]) -> tuple[Program, Program]:
    """A program of one graph per rank, and the same with rank 1's edited."""
    made = program(two_starts, two_starts, inputs=PARTS)
    return made, replace(made, graphs=(made.graphs[0], edited(made, edit).graphs[1]))


def test_of_ranks_that_part_the_one_that_was_changed_is_shown() -> None:
    made, swapped = parted(lambda graph, nodes: nodes["all_reduce"].prepend(nodes["all_gather_into_tensor"]))
    (finding,) = _collectives(made, swapped)
    told = diagnose(made, swapped, finding)
    assert told.rank == 1
    assert str(told.first) == (
        "'all_gather_into_tensor' is what rank 1 calls next, where rank 0 calls 'all_reduce' first"
    )


def test_of_a_collective_that_one_rank_has_lost_that_rank_is_shown() -> None:
    def lose(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["wait_tensor_1"].replace_all_uses_with(nodes["x"])
        for name in ("wait_tensor_1", "all_reduce"):
            graph.erase_node(nodes[name])

    made, lost = parted(lose)
    (finding,) = _collectives(made, lost)
    told = diagnose(made, lost, finding)
    assert told.rank == 1
    assert str(told.first).startswith("'all_reduce' is called by rank 0, but the graph of rank 1 no longer has it")


def _collectives(before: Program, after: Program) -> list[Any]:
    comparison = Lockstep().compare(before, after)
    evidence = Evidence(Pair(before, after, changed=True), Contract())
    evidence.taken["lockstep"] = [comparison]
    return list(CHECKS["collectives"](evidence))
