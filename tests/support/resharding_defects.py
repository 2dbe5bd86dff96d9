"""Defects planted into what the lowering of resharding writes. Each is a pass: the sound one, then one edit on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tcverify.ops import lookup
from tcverify.passes.resharding.host_program import HostProgram
from tests.sizes import by_night

Edit = Callable[[fx.Graph, int], None]


def calls(graph: fx.Graph, op: str) -> list[fx.Node]:
    """The calls of an op, e.g. "host_ir::gather"."""
    return [n for n in graph.nodes if n.op == "call_function" and lookup(n.target).name == op]


def planted(edit: Edit, **options: object) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A pass that lowers soundly and then spoils what it has written."""

    def lower(gm: fx.GraphModule) -> fx.GraphModule:
        HostProgram(**{"deallocate": False, **options})(gm)  # type: ignore[arg-type]
        edit(gm.graph, int(gm.meta["rank"]))
        gm.recompile()
        return gm

    return lower


def rank_order(graph: fx.Graph, rank: int) -> None:
    """Shards are gathered in the order of rank numbers."""
    for node in calls(graph, "host_ir::all_gather"):
        node.update_arg(2, sorted(node.args[2]))  # type: ignore[arg-type, type-var]


def scattered_in_rank_order(graph: fx.Graph, rank: int) -> None:
    """Shards are divided in the order of rank numbers."""
    for node in calls(graph, "host_ir::scatter"):
        node.update_arg(3, sorted(node.args[3]))  # type: ignore[arg-type, type-var]


def zero_for_max(graph: fx.Graph, rank: int) -> None:
    """A root without a part contributes 0, for any reduction."""
    for node in calls(graph, "aten::full"):
        node.update_arg(1, 0.0)


def other_reduction(graph: fx.Graph, rank: int) -> None:
    """Maxima are minima."""
    for node in calls(graph, "host_ir::all_reduce"):
        node.update_arg(1, "min")


def crossed_pairs(graph: fx.Graph, rank: int) -> None:
    """Of two senders, 0 and 1, and two receivers, 2 and 3, each has the other's partner."""
    for node in calls(graph, "host_ir::send"):
        node.update_arg(1, 5 - node.args[1])  # type: ignore[operator]
    for node in calls(graph, "host_ir::recv"):
        node.update_arg(1, 1 - node.args[1])  # type: ignore[operator]


def last_receiver_forgotten(graph: fx.Graph, rank: int) -> None:
    """The last root gets no gather."""
    roots = [node.args[2] for node in calls(graph, "host_ir::gather")]
    for node in calls(graph, "host_ir::gather"):
        if node.args[2] == max(roots) == 3:  # type: ignore[type-var]
            for wait in list(node.users):
                graph.erase_node(wait)
            graph.erase_node(node)


def next_chunk(graph: fx.Graph, rank: int) -> None:
    """Chunk 1 is multiplied where chunk 0 is to be."""
    first, second = calls(graph, "aten::matmul")[:2]
    whole = second.args[0].args[0]  # type: ignore[union-attr]
    with graph.inserting_before(first):
        wrong = graph.call_function(torch.ops.aten.select.int, (whole, 0, 0))
        wrong.meta["val"] = first.args[0].meta["val"]  # type: ignore[union-attr]
    second.update_arg(0, wrong)


def lost_chunk(graph: fx.Graph, rank: int) -> None:
    """The last chunk is computed and not kept."""
    graph.erase_node(calls(graph, "aten::copy_")[-1])


def wrong_addend(graph: fx.Graph, rank: int) -> None:
    """Rank 1 gives twice its part."""
    if rank == 1:
        for node in calls(graph, "host_ir::all_reduce"):
            with graph.inserting_before(node):
                twice = graph.call_function(torch.ops.aten.mul.Scalar, (node.args[0], 2.0))
                twice.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]
            node.update_arg(0, twice)


def freed_early(graph: fx.Graph, rank: int) -> None:
    """What is gathered is freed before it is read."""
    for node in calls(graph, "host_ir::wait")[:1]:
        _free(graph, node)


def _free(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        graph.call_function(torch.ops.host_ir.deallocate.default, (node.args[0].kwargs["out"],))  # type: ignore[union-attr]


def long_way(graph: fx.Graph, rank: int) -> None:
    """What is reduced goes through thousands of copies, with the wrong sign."""
    for node in calls(graph, "host_ir::all_reduce"):
        value = node.args[0]
        with graph.inserting_before(node):
            for number in range(by_night(2000, 1200)):
                op = torch.ops.aten.clone.default if number else torch.ops.aten.neg.default
                made = graph.call_function(op, (value,))
                made.meta["val"] = value.meta["val"]  # type: ignore[union-attr]
                value = made
        node.update_arg(0, value)


def sharded_team(graph: fx.Graph, rank: int) -> None:
    """Of three ranks, two sum among themselves, and the third alone."""
    for node in calls(graph, "host_ir::all_reduce"):
        node.update_arg(2, [2] if rank == 2 else [0, 1])


def send_forgotten(graph: fx.Graph, rank: int) -> None:
    """Rank 0 sends nothing."""
    for node in calls(graph, "host_ir::send") if rank == 0 else ():
        _erase(graph, node)


def gather_forgotten(graph: fx.Graph, rank: int) -> None:
    """Rank 1 gives nothing to the second root."""
    for node in calls(graph, "host_ir::gather")[1:] if rank == 1 else ():
        _erase(graph, node)


def own_root(graph: fx.Graph, rank: int) -> None:
    """Rank 2 takes itself for the root of a broadcast that it only receives."""
    for node in calls(graph, "host_ir::broadcast") if rank == 2 else ():
        node.update_arg(1, 1)


def turned_round(graph: fx.Graph, rank: int) -> None:
    """Rank 1 posts its first two gathers in the opposite order, and waits for each at once."""
    nodes = calls(graph, "host_ir::gather") if rank == 1 else []
    for node in nodes[1:2]:
        into = [] if node.kwargs["out"] is None else [node.kwargs["out"]]
        for moved in (*into, node, *node.users):
            nodes[0].prepend(moved)  # type: ignore[arg-type]


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for wait in list(node.users):
        graph.erase_node(wait)
    graph.erase_node(node)
