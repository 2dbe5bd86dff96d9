"""The pass `make_resharding_contiguous`: what gains or loses a shard becomes the outermost dim, so that it can be lowered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import Layout, Resharding
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.passes.base import Pass
from tcverify.passes.editing import known_spec, named_arguments
from tcverify.passes.resharding.decisions import InnerResharding, plan_resharding
from tcverify.passes.resharding.layouts import resharding_of, stream_axis_of
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Contract, rewrite


class MakeReshardingContiguous(Pass):
    """Rewrites inner reshardings: the dim goes to the front, the tensor to the other layout, and the dim back.

    What cannot be lowered for another reason is left as it is.
    Source: nvFuser's passes that reorder sharded axes and make reshardings contiguous.
    """

    name = "make_resharding_contiguous"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, inputs="stream0")
    PATTERNS: ClassVar[tuple[str, ...]] = ("set", "reduce")

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Rewrite every inner `set` and `reduce`.

        Raises:
            Unsupported: arguments of one of them do not fit together.
        """
        writer = HostWriter(graph)
        displaced: list[fx.Node] = []
        asked = [(node, made) for node in graph.nodes if (made := resharding_of(node)) is not None]
        inner = [(node, made, axis) for node, made in asked if (axis := _inner_axis(node, made)) is not None]
        for node, made, axis in inner:
            if not rewrite("set" if made.dim is None else "reduce", node):
                continue
            with writer.before(node):
                node.replace_all_uses_with(_with_axis_outermost(writer, node, made, axis))
            displaced += node.all_input_nodes
            graph.erase_node(node)
            self.rewrites["set" if made.dim is None else "reduce"] += 1
        return displaced


def _inner_axis(node: fx.Node, made: Resharding) -> int | None:
    """The dim that makes a resharding an inner one, or None. All ranks find the same.

    Raises:
        Unsupported: it is one, and the shape of its operand is not known.
    """
    given = named_arguments(node)
    try:
        plan_resharding(made, given["rank"], given["dtype"])
    except InnerResharding as error:
        if given["x"] is not None and known_spec(given["x"]) is None:
            raise Unsupported(
                f"'{node.name}': the metadata of its operand '{given['x'].name}' has no shape of known sizes",
                "propagate shapes through the graph before the pass",
            ) from None
        return error.axis
    except Unsupported:
        pass
    return None


def _with_axis_outermost(writer: HostWriter, node: fx.Node, made: Resharding, axis: int) -> fx.Node:
    """Write the resharding with one dim of the operand in front. Returns the replacement of the old result."""
    given = named_arguments(node)
    x, rank = given["x"], given["rank"]
    order = [axis, *(dim for dim in range(len(made.shape)) if dim != axis)]
    source = _renumbered(made.source, order)
    left = [dim for dim in range(len(made.shape)) if dim != made.dim]  # dims of the result, counted in the operand
    found = [left.index(dim) for dim in order if dim != made.dim]  # where each dim of the new result was in the old one
    target = _renumbered(made.target, found)
    if x is not None:
        x = _permuted(writer, x, order, source)
    reduction = () if made.dim is None else (order.index(made.dim), made.reduce_op)
    shape = [made.shape[dim] for dim in order]
    op = SET if made.dim is None else REDUCE
    new = writer.call(op, x, *reduction, str(source), str(target), shape, given["dtype"], rank)
    if rank not in made.target.mesh:
        return new
    back = [found.index(dim) for dim in range(len(left))]
    axis_of_stream = stream_axis_of(node)
    result = _permuted(writer, new, back, made.target, fresh=axis_of_stream is not None)
    if axis_of_stream is not None:
        result.meta["stream_axis"] = axis_of_stream
    return result


def _renumbered(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout of the tensor whose dim i is dim order[i] of the one that has this layout."""
    return Layout(layout.mesh, tuple(None if dim is None else order.index(dim) for dim in layout.sharding))


def _permuted(writer: HostWriter, x: fx.Node, order: Sequence[int], layout: Layout, *, fresh: bool = False) -> fx.Node:
    """The dims in another order, contiguous; `fresh` if it must not be shared."""
    x = writer.call("aten::permute", x, list(order))
    x.meta["layout"] = str(layout)
    if fresh or not x.meta["val"].is_contiguous():
        x = writer.call("aten::clone", x, memory_format=torch.contiguous_format)
        x.meta["layout"] = str(layout)
    return x


__all__ = ["MakeReshardingContiguous"]
