"""Passes on c10d's functional collectives, sound ones and ones with a planted defect, for the tests of `checked`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tcverify import Unsupported

ATEN = torch.ops.aten
C10D = torch.ops._c10d_functional


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Insert a call, with metadata where its operands have some."""
    made = graph.call_function(target, args)
    values = [arg.meta.get("val") if isinstance(arg, fx.Node) else arg for arg in args]
    if all(value is not None for value in values):
        made.meta["val"] = target(*values)
    return made


def waits(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is C10D.wait_tensor.default]


def scatter_and_gather(gm: fx.GraphModule) -> fx.GraphModule:
    """all_reduce ⇒ reduce_scatter, all_gather. Sound."""
    split(gm.graph)
    return gm


def split(graph: fx.Graph) -> None:
    for wait in waits(graph):
        start = wait.args[0]
        if start.target is not C10D.all_reduce.default:
            continue
        addend, op, group = start.args
        with graph.inserting_before(start):
            mine = call(
                graph, C10D.wait_tensor.default, call(graph, C10D.reduce_scatter_tensor.default, addend, op, 2, group)
            )
            whole = call(graph, C10D.all_gather_into_tensor.default, mine, 2, group)
        start.replace_all_uses_with(whole)
        graph.erase_node(start)


def forget_sum(gm: fx.GraphModule) -> None:
    """all_reduce(x) ⇒ x. Wrong."""
    forget(gm.graph)


def forget(graph: fx.Graph) -> None:
    for wait in waits(graph):
        wait.replace_all_uses_with(wait.args[0].args[0])
        start = wait.args[0]
        graph.erase_node(wait)
        graph.erase_node(start)


class Graphwise:
    """`split` as a pass manager calls it: with a graph."""

    def __init__(self) -> None:
        self.applicable_to = "everything"

    def __call__(self, graph: fx.Graph) -> None:
        split(graph)

    def is_applicable(self, shape: int | None) -> bool:
        return shape is None

    def uuid(self) -> str:
        return "graphwise-1"


class GraphwiseWrong(Graphwise):
    def __call__(self, graph: fx.Graph) -> None:
        forget(graph)


def unannotated(graph):  # type: ignore[no-untyped-def]
    forget(graph)


def _own_rows(gm: fx.GraphModule, rank: int) -> None:
    """all_reduce(x) ⇒ all_gather of this rank's rows of all_reduce(x)."""
    graph = gm.graph
    for wait in waits(graph):
        group = wait.args[0].args[2]
        rows = wait.meta["val"].shape[0] // 2
        with graph.inserting_after(wait):
            own = call(graph, ATEN.slice.Tensor, wait, 0, rank * rows, (rank + 1) * rows)
        with graph.inserting_after(own):
            start = call(graph, C10D.all_gather_into_tensor.default, own, 2, group)
        with graph.inserting_after(start):
            whole = call(graph, C10D.wait_tensor.default, start)
        wait.replace_all_uses_with(whole, delete_user_cb=lambda user, own=own: user is not own)


def rows_by_meta(gm: fx.GraphModule) -> None:
    """Sound; reads the rank from the graph."""
    _own_rows(gm, gm.meta["rank"])


def rows_by_process_group(gm: fx.GraphModule) -> None:
    """Sound; asks torch.distributed for the rank."""
    _own_rows(gm, dist.get_rank())


class RowsByConstruction:
    """Sound on the rank that it is made for, and nowhere else."""

    def __call__(self, gm: fx.GraphModule) -> None:
        _own_rows(gm, 0)


def raises(gm: fx.GraphModule) -> None:
    raise LookupError("no such pattern")


def declines(gm: fx.GraphModule) -> None:
    raise Unsupported("too many collectives")


def nothing(gm: fx.GraphModule) -> fx.GraphModule:
    return gm


def with_examples(gm: fx.GraphModule, example_inputs: list[Any]) -> fx.GraphModule:
    """Sound; wants the example inputs."""
    assert len(example_inputs) == sum(node.op == "placeholder" for node in gm.graph.nodes)
    return scatter_and_gather(gm)


def use_before_definition(gm: fx.GraphModule) -> None:
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    last = next(n for n in reversed(gm.graph.nodes) if n.op == "call_function")
    first.append(last)
    first.prepend(last)


def another_output(gm: fx.GraphModule) -> None:
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((output.args[0], output.args[0]),)


def new_but_changes_given(gm: fx.GraphModule) -> fx.GraphModule:
    split(gm.graph)
    return fx.GraphModule(gm, _copy(gm.graph))


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied
