"""Of many ranks that run one graph, a pass is applied on some, which tell what it does on the rest; or on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tcverify import verify
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program

MESH = Mesh.grid({"dp": 4, "tp": 8})


def sliced(first: Callable[[int], int]) -> Program:
    def build(b: GraphBuilder) -> Any:
        return b.call("aten::select.int", b.call("aten::neg", b.input("x")), 0, b.constant("c", first))

    return spmd_program(MESH, [InputSpec("x", (64, 2))], build)


def plain() -> Program:
    return spmd_program(MESH, [InputSpec("x", (64, 2))], lambda b: b.call("aten::neg", b.input("x")))


def cutting(start: Callable[[int], int], seen: list[int]) -> Callable[[fx.GraphModule], None]:
    """A pass that returns one row of the result, another one on every rank."""

    def cut(module: fx.GraphModule) -> None:
        rank = module.meta["rank"]
        seen.append(rank)
        output = next(node for node in module.graph.nodes if node.op == "output")
        (neg,) = output.all_input_nodes
        with module.graph.inserting_before(output):
            row = module.graph.call_function(torch.ops.aten.slice.Tensor, (neg, 0, start(rank), start(rank) + 1))
            whole = module.graph.call_function(torch.ops.aten.expand.default, (row, [64, 2]))
        row.meta["val"], whole.meta["val"] = neg.meta["val"][:1], neg.meta["val"]
        output.replace_input_with(neg, whole)

    return cut


def starts(start: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """The ranks on which the pass was applied, and the row that each rank returns then."""
    seen: list[int] = []
    verdict = verify(cutting(start, seen), plain())
    rewritten = verdict.pair.rewritten
    assert rewritten is not None
    graphs = [rewritten.graph(rank) for rank in range(32)]
    rows = [n.args[2] for graph in graphs for n in graph.nodes if n.target is torch.ops.aten.slice.Tensor]
    return seen, rows


def test_a_pass_that_does_the_same_everywhere_is_applied_on_a_few_ranks() -> None:
    seen, rows = starts(lambda rank: 3)
    assert set(rows) == {3}
    assert len(seen) == len(set(seen)) <= 6
    assert {0, 31} <= set(seen)


def test_what_is_linear_in_the_places_of_ranks_is_inferred() -> None:
    seen, rows = starts(lambda rank: 5 * (rank % 8) + rank // 8)
    assert rows == [5 * (rank % 8) + rank // 8 for rank in range(32)]
    assert len(seen) <= 6


def test_a_pass_that_does_what_is_not_linear_is_applied_on_all_ranks() -> None:
    seen, rows = starts(lambda rank: rank * rank % 50)
    assert rows == [rank * rank % 50 for rank in range(32)]
    assert {*seen} == {*range(32)}


def test_constants_that_are_not_linear_keep_their_ranks() -> None:
    for constant, few in ((lambda rank: rank % 8, True), (lambda rank: (rank + 3) % 8, False)):
        seen: list[int] = []

        def look(module: fx.GraphModule, seen: list[int] = seen) -> None:
            seen.append(module.meta["rank"])

        assert verify(look, sliced(constant)).status == "passed"
        assert (len(seen) <= 6) == few
        assert few or {*seen} == {*range(32)}
