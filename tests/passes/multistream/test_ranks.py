"""Ranks agree on the order of their collectives, whatever their costs and groups."""

from __future__ import annotations

from typing import Any

from tcverify.ops import lookup
from tcverify.passes import Multistream
from tcverify.passes.multistream.graph import OrderEdge, StreamGraph
from tcverify.program import Program
from tests.support.stream_programs import GRID, US, Builder, findings, is_lowered, lowered, node, program


class OrderedPerCommunicator(Multistream):
    """Chains the collectives of each communicator, and not those of one rank."""

    def edges(self, parts: StreamGraph) -> list[OrderEdge]:
        kept = [edge for edge in super().edges(parts) if edge.kind != "collective"]
        last: dict[tuple[int, ...], int] = {}
        for op in parts.work:
            if lookup(op.node.target).collective:
                group = tuple(op.node.args[-1])  # type: ignore[arg-type]
                if group in last:
                    kept.append(OrderEdge(last[group], op.index, "collective"))
                last[group] = op.index
        return kept


def over_rows_and_columns() -> Program:
    """A sum over the rows of a 2 by 2 grid and one over its columns, which do not depend on each other.

    On ranks 0 and 3, what follows the sum over columns takes long; on ranks 1 and 2, what follows the sum over rows.
    """

    def build(b: Builder) -> Any:
        rows, columns = b.all_reduce(b["x"], "tp"), b.all_reduce(b["v"], "dp")
        return b.mm(rows), b.mm(columns), b.mm(b.mm(b["r"]))

    original = program(build, mesh=GRID)
    graphs = [original.graph(rank) for rank in range(4)]
    for rank, graph in enumerate(graphs):
        late, early = ("mm_1", "mm") if rank in (0, 3) else ("mm", "mm_1")
        node(graph, late).meta["cost_s"] = 200 * US
        node(graph, early).meta["cost_s"] = 2 * US
    return original.with_graphs(graphs)


def test_groups_that_cross_wait_in_a_cycle_where_each_has_an_order_of_its_own() -> None:
    assert "deadlock" in findings(over_rows_and_columns(), OrderedPerCommunicator())


def test_collectives_of_a_rank_keep_their_order_whatever_their_groups() -> None:
    original = over_rows_and_columns()
    assert findings(original) == set()
    for rank in range(4):
        graph = lowered(original, rank=rank)
        assert is_lowered(graph)
        assert [n.name for n in graph.nodes if n.op == "call_function" and lookup(n.target).collective] == [
            "all_reduce",
            "all_reduce_1",
        ]
