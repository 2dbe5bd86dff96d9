"""Defects that change values by less than one part in 10⁹: rounding hides them from floating point, not from exact arithmetic.

Each sound pass stands in front of its mutants. The last one rounds so coarsely that arithmetic in the program's own dtypes shows
it, and no other does.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from tcverify.passes.editing import known_spec, named_arguments, op_name
from tests.mutants.foreign import ADD, ALL_REDUCE, MUL, Foreign, ReduceByGather, shape
from tests.mutants.foreign_local import ADD_RMS_NORM, RMS_NORM, FuseNorm

#: Sixteen units in the last place of 1: more than the rounding of a few ops, less than floating point can be blamed for.
LITTLE = 2.0**-48


class EpsLastDigit(FuseNorm):
    """eps went through a decimal that lacks its last digit: it is the next number (wrong-value)."""

    def eps(self, eps: float) -> float:
        return math.nextafter(eps, 1.0)


class ResidualScaled(FuseNorm):
    """The residual is scaled by 1 + 10⁻¹²: two scales that should cancel do not quite (wrong-value)."""

    factor = 1.0 + 1e-12

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        before = node.prev
        super().visit(graph, node)
        fused = node.prev
        if fused is not before and op_name(fused) == ADD_RMS_NORM:
            fused.update_arg(1, self.put(fused, MUL, fused.args[1], self.factor))


class ResidualHardlyScaled(ResidualScaled):
    """The same, by 1 + 2⁻⁴⁸ (wrong-value)."""

    factor = 1.0 + LITTLE


class SplitMean(Foreign):
    """mean over one dim ⇒ the sum, divided by the number of elements"""

    def divide(self, node: fx.Node, total: fx.Node, count: int) -> fx.Node:
        return self.put(node, "aten::div.Tensor", total, count)

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != "aten::mean.dim":
            return
        x, dims, keep = (*node.args, False)[:3]
        spec = known_spec(x)
        if spec is not None and len(dims) == 1 and spec.shape[dims[0]] > 1:  # type: ignore[arg-type, index]
            total = self.put(node, "aten::sum.dim_IntList", x, dims, keep)
            self.replace(node, self.divide(node, total, spec.shape[dims[0]]))  # type: ignore[index]


class ReciprocalOfFifteenDigits(SplitMean):
    """The reciprocal of the count is written into the graph as a decimal of fifteen digits (wrong-value)."""

    def divide(self, node: fx.Node, total: fx.Node, count: int) -> fx.Node:
        return self.put(node, MUL, total, float(f"{1 / count:.15g}"))


class ContributionScaled(ReduceByGather):
    """The first member's addend is scaled by 1 + 2⁻⁴⁸ (wrong-value)."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) == ALL_REDUCE and named_arguments(node)["rank"] == named_arguments(node)["rank_group"][0]:
            node.update_arg(0, self.put(node, MUL, node.args[0], 1.0 + LITTLE))
        super().visit(graph, node)


class WeightShrunk(Foreign):
    """The weight of every norm is smaller by 2⁻⁴⁸ (wrong-value)."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) == RMS_NORM and op_name(node.args[1]) != MUL:  # type: ignore[arg-type]
            node.update_arg(1, self.put(node, MUL, node.args[1], 1.0 - LITTLE))


class GuardedSum(Foreign):
    """10⁻¹⁵ is added to every sum over ranks, so that nothing divides by zero later (wrong-value)."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != ALL_REDUCE or not node.users:
            return
        guarded = self.put(node.next, ADD, node, 1e-15)
        node.replace_all_uses_with(guarded, delete_user_cb=lambda user: user is not guarded)


class SummedInBfloat16(Foreign):
    """Addends are rounded to bfloat16 on their way into the sum over ranks, to halve the traffic (wrong-value)."""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != ALL_REDUCE or node.meta["val"].dtype is not torch.float32 or not shape(node):
            return
        x, rank, group = named_arguments(node).values()
        rounded = self.put(node, "aten::_to_copy", x, dtype=torch.bfloat16)
        total = self.put(node, ALL_REDUCE, rounded, rank, group)
        self.replace(node, self.put(node, "aten::_to_copy", total, dtype=torch.float32))
