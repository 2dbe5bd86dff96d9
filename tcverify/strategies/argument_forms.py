"""Programs whose arguments are written in other ways: dims counted from the end, slices with an open end, inferred sizes."""

from __future__ import annotations

from dataclasses import replace

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import equivalent_arguments
from tcverify.program import Program

#: The label of programs in which an argument was rewritten.
LABEL = "argument-forms"


def with_argument_forms(program: Program, how: int) -> Program:
    """Write arguments of a program that is not shared in other ways that mean the same.

    Args:
        how: three of four values leave the program as it is; the others choose among the ways.
    """
    if how % 4 != 3:
        return program
    changed = False
    for graph in program.graphs:
        for number, node in enumerate(graph.nodes):
            if node.op == "call_function" and node.args:
                changed |= _rewrite(node, how // 4 + number)
    return replace(program, labels=(*program.labels, LABEL)) if changed else program


def _rewrite(node: fx.Node, how: int) -> bool:
    """Choose among the ways to write the arguments of a call. Return whether that changes any."""
    operand = map_aggregate(node.args[0], lambda one: one.meta.get("val") if isinstance(one, fx.Node) else one)
    args = list(node.args)
    for place, ways in equivalent_arguments(node.target, args, operand).items():
        args[place] = ways[how % len(ways)]
    if tuple(args) == node.args:
        return False
    node.args = tuple(args)
    return True


__all__ = ["LABEL", "with_argument_forms"]
