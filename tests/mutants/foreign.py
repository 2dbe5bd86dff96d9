"""Small passes of the kind that engineers write, each sound, and each with one defect put back: sums and shards.

Classes that the passes of the library cannot show, because they never do what goes wrong there. A sound pass stands in front of
its mutants. `foreign_groups` holds passes that fuse, merge and erase collectives, `foreign_local` those on ops of one rank.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import fx

from tcverify.ops import lookup, resolve
from tcverify.passes.editing import erase_unused, infer_metadata, known_spec, named_arguments, op_name

ADD, MUL = "aten::add.Tensor", "aten::mul.Tensor"
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = (
    f"tensor_cast::{name}" for name in ("all_reduce", "reduce_scatter", "all_gather")
)


class Foreign:
    """A pass over one graph, in place, that looks at one call after another.

    Attributes:
        name: as reports call it: that of the class.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.displaced: list[fx.Node] = []
        self.changed = False
        self.begin(gm.graph)
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node not in self.displaced and known_spec(node) is not None:
                self.visit(gm.graph, node)
        erase_unused(gm.graph, self.displaced)
        if self.changed:
            self.refresh(gm.graph)
        gm.recompile()
        return gm

    def refresh(self, graph: fx.Graph) -> None:
        """Let the metadata of views refer to the storage of what they are views of now."""
        for node in graph.nodes:
            view = node.op == "call_function" and lookup(node.target).aliases
            if view and all(known_spec(known) is not None for known in (node, *node.all_input_nodes)):
                infer_metadata(node)

    def begin(self, graph: fx.Graph) -> None:
        """Look at the whole graph before anything is rewritten."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        """Rewrite what ends in `node`, a call that gives one tensor."""

    def put(self, before: fx.Node, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, with its metadata."""
        with before.graph.inserting_before(before):
            made = before.graph.call_function(resolve(op), args, kwargs)
        infer_metadata(made)
        self.changed = True
        return made

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let all that read `node` read something else."""
        node.replace_all_uses_with(by, delete_user_cb=lambda user: user is not by)
        self.displaced.append(node)


def shape(node: Any) -> tuple[int, ...]:
    """The shape of a value; () where it is no tensor that is known."""
    spec = known_spec(node)
    return () if spec is None else spec.shape


def writes(node: fx.Node) -> bool:
    """Whether a call writes into a tensor that it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def written(graph: fx.Graph) -> bool:
    """Whether any call of a graph writes into a tensor."""
    return any(map(writes, graph.nodes))


# --------------------------------------------------------------------------------------- an all_reduce that comes later


class SinkAllReduce(Foreign):
    """all_reduce(x) · 2 ⇒ all_reduce(x · 2), where that is the same: for a product with a number."""

    def commutes(self, node: fx.Node) -> bool:
        """Whether applying `node` before the sum gives what it gives behind the sum."""
        return op_name(node) == MUL and len(node.args) == 2 and isinstance(node.args[1], (int, float))

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if not self.commutes(node):
            return
        for total in node.all_input_nodes:
            if op_name(total) == ALL_REDUCE and len(total.users) == 1 and shape(total) == shape(node):
                given = named_arguments(total)
                early = self.put(
                    node, op_name(node), *(given["x"] if arg is total else arg for arg in node.args), **node.kwargs
                )
                self.replace(node, self.put(node, ALL_REDUCE, early, given["rank"], given["rank_group"]))
                return


class SunkBelowConstant(SinkAllReduce):
    """A number is added on every rank before the sum, and so counts once per rank (wrong-value)."""

    def commutes(self, node: fx.Node) -> bool:
        return op_name(node) == ADD and len(node.args) == 2 and isinstance(node.args[1], (int, float))


class SunkBelowResidual(SinkAllReduce):
    """The residual is added on every rank before the sum (wrong-value)."""

    def commutes(self, node: fx.Node) -> bool:
        return op_name(node) == ADD and len(node.all_input_nodes) == 2 and not node.kwargs


class SunkBelowActivation(SinkAllReduce):
    """The activation of every addend is summed, in place of the activation of the sum (wrong-value)."""

    def commutes(self, node: fx.Node) -> bool:
        return op_name(node) in ("tensor_cast::silu", "tensor_cast::gelu", "aten::relu", "aten::tanh")


class NormBelowGather(Foreign):
    """all_gather(x, dim) → rms_norm ⇒ rms_norm on the part → all_gather, where the norm does not reduce over `dim`."""

    def allows(self, dim: int, rank: int) -> bool:
        """Whether each part can be normed by itself."""
        return dim % rank != rank - 1

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != "tensor_cast::rms_norm":
            return
        whole, weight, eps = node.args
        if not isinstance(whole, fx.Node) or op_name(whole) != ALL_GATHER or len(shape(weight)) != 1:
            return
        part, dim, rank, group = named_arguments(whole).values()
        sizes = shape(part)
        if not self.allows(dim, len(sizes)):
            return
        if dim % len(sizes) == len(sizes) - 1:
            start = group.index(rank) * sizes[-1]
            weight = self.put(node, "aten::slice.Tensor", weight, 0, start, start + sizes[-1])
        normed = self.put(node, "tensor_cast::rms_norm", part, weight, eps)
        self.replace(node, self.put(node, ALL_GATHER, normed, dim, rank, group))


class NormOverShard(NormBelowGather):
    """The mean square is taken over this rank's part of the hidden dim (wrong-value)."""

    def allows(self, dim: int, rank: int) -> bool:
        return True


# --------------------------------------------------------------------------------------------- a collective made of others


class ReduceByGather(Foreign):
    """all_reduce ⇒ all_gather along a new dim, and a sum over it."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != ALL_REDUCE:
            return
        given = named_arguments(node)
        row = self.put(node, "aten::unsqueeze", given["x"], 0)
        rows = self.put(node, ALL_GATHER, row, 0, given["rank"], given["rank_group"])
        self.replace(node, self.total(node, rows, given["x"], len(given["rank_group"])))

    def total(self, node: fx.Node, rows: fx.Node, mine: fx.Node, members: int) -> fx.Node:
        """The sum of the rows, one per member."""
        return self.put(node, "aten::sum.dim_IntList", rows, [0])


class ContributionLost(ReduceByGather):
    """The loop over the members ends one too early: the last addend is not in the sum (wrong-value)."""

    def total(self, node: fx.Node, rows: fx.Node, mine: fx.Node, members: int) -> fx.Node:
        seen = self.put(node, "aten::slice.Tensor", rows, 0, 0, members - 1)
        return self.put(node, "aten::sum.dim_IntList", seen, [0])


class ContributionTwice(ReduceByGather):
    """The sum begins with this rank's addend, and adds it once more with the others (wrong-value)."""

    def total(self, node: fx.Node, rows: fx.Node, mine: fx.Node, members: int) -> fx.Node:
        return self.put(node, ADD, super().total(node, rows, mine, members), mine)


class AveragedInsteadOfSummed(ReduceByGather):
    """A mean stands where the sum should be (wrong-value)."""

    def total(self, node: fx.Node, rows: fx.Node, mine: fx.Node, members: int) -> fx.Node:
        return self.put(node, "aten::mean.dim", rows, [0])


class ScatterFirstDim(Foreign):
    """reduce_scatter along `dim` ⇒ the same along dim 0, between two transpositions."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != REDUCE_SCATTER or named_arguments(node)["dim"] % len(shape(node)) == 0:
            return
        x, dim, rank, group = named_arguments(node).values()
        first = self.put(node, "aten::clone", self.put(node, "aten::transpose.int", x, 0, dim))
        self.replace(node, self.back(node, self.put(node, REDUCE_SCATTER, first, 0, rank, group), dim))

    def back(self, node: fx.Node, scattered: fx.Node, dim: int) -> fx.Node:
        """Turn the dims around again."""
        turned = self.put(node, "aten::transpose.int", scattered, 0, dim)
        return self.put(node, "aten::clone", turned, memory_format=torch.contiguous_format)


class TransposeByReshape(ScatterFirstDim):
    """The way back takes the right shape, but leaves the elements in the order that they have (wrong-value)."""

    def back(self, node: fx.Node, scattered: fx.Node, dim: int) -> fx.Node:
        return self.put(node, "aten::reshape", scattered, list(shape(node)))


class ScatterBySlice(Foreign):
    """reduce_scatter ⇒ all_reduce, of which every rank takes its chunk."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != REDUCE_SCATTER:
            return
        x, dim, rank, group = named_arguments(node).values()
        total = self.put(node, ALL_REDUCE, x, rank, group)
        start, size = self.start(node, dim, group.index(rank)), shape(node)[dim]
        self.replace(
            node, self.put(node, "aten::clone", self.put(node, "aten::slice.Tensor", total, dim, start, start + size))
        )

    def start(self, node: fx.Node, dim: int, position: int) -> int:
        """Where the chunk begins."""
        return position * shape(node)[dim]


class RememberedFromFirstRank(ScatterBySlice):
    """What was computed for a shape is remembered, and holds for the next rank's graph as well (wrong-value)."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}

    def start(self, node: fx.Node, dim: int, position: int) -> int:
        return self.known.setdefault((shape(node), dim), super().start(node, dim, position))
