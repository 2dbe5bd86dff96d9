"""What programs hold, asked in few words."""

from __future__ import annotations

from torch import fx

from tcverify.ops import qualified_name
from tcverify.program import Program, compute_nodes


def named(program: Program, op: str) -> list[fx.Node]:
    """The calls of an op, by its qualified name, in all graphs."""
    return [
        node
        for graph in program.graphs
        for node in graph.nodes
        if node.op == "call_function" and qualified_name(node.target) == op
    ]


def is_call(value: object, op: str) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_function" and qualified_name(value.target) == op


def ops(program: Program) -> list[str]:
    return [qualified_name(node.target).split("::")[1] for node in compute_nodes(program.graphs[0])]


def has_neg(program: Program) -> bool:
    return bool(named(program, "aten::neg"))


def reduced_then_normed(program: Program) -> bool:
    return any(is_call(n.args[0], "tensor_cast::all_reduce") for n in named(program, "tensor_cast::rms_norm"))
