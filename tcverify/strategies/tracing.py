"""Graphs that make_fx has traced, as parts of programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import qualified_name
from tcverify.program import GraphBuilder

#: Views that tracing writes where autograd begins or ends: they change no value.
_MARKS = frozenset({"aten::detach", "aten::alias"})

#: Arguments that say where an op runs.
_WHERE = frozenset({"device", "layout", "pin_memory"})


def write_traced(b: GraphBuilder, traced: fx.Graph, inputs: Sequence[fx.Node]) -> Any:
    """Write a graph that was traced, of these inputs; what it returns."""
    made: dict[fx.Node, Any] = {}
    rest = iter(inputs)
    for node in traced.nodes:
        args, kwargs = map_aggregate(
            (node.args, dict(node.kwargs)), lambda one: made[one] if isinstance(one, fx.Node) else one
        )
        if node.op == "placeholder":
            made[node] = next(rest)
        elif node.op == "call_function":
            plain = {key: value for key, value in kwargs.items() if key not in _WHERE}
            name = qualified_name(node.target)
            made[node] = args[0] if name in _MARKS else b.call(name, *args, **plain)
    return args[0]


__all__ = ["write_traced"]
