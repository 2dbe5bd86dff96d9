"""Brings a graph into the form that torch.compile gets: collectives that write into operands become functional ones and copies.

TorchDynamo writes `dist.all_reduce(x)` so: the functional collective, its wait, and a copy into `x`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import qualified_name, schema_of

#: Collectives that write into operands, and those that give the same as a new tensor.
_FUNCTIONAL = {
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
}

#: Ops that give their operand, and that functional graphs hold.
_WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::wait_tensor.default"})


def functional_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that means the same, without collectives that write into operands.

    Raises:
        Unsupported: a node has no such form, or is a constant; the message names it.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, copies)
    graph.output(result)
    for node in list(graph.nodes):
        if node.op == "get_attr":
            raise Unsupported(f"node '{node.name}' is a constant of the module")
        if node.op == "call_function":
            _write_anew(graph, node)
    for node, copy in copies.items():
        if node.op == "placeholder":
            copy.meta.update(node.meta)
    return fx.GraphModule(torch.nn.Module(), graph)


def _write_anew(graph: fx.Graph, node: fx.Node) -> None:
    name, schema = qualified_name(node.target), schema_of(node.target)
    namespace, _, base = name.removesuffix(".default").partition("::")
    if namespace == "aten" and base.startswith(("empty", "new_empty")):
        raise Unsupported(f"node '{node.name}' allocates memory that is never written")
    if schema is None or not schema.is_mutable or name in _WAITS or namespace in ("aten", "p2p"):
        return
    plain = _FUNCTIONAL.get(base) if namespace == "_c10d_functional" else None
    if plain is None:
        raise Unsupported(f"node '{node.name}' calls {name}, which writes into an operand")
    start = getattr(torch.ops._c10d_functional, plain).default
    wait = torch.ops._c10d_functional.wait_tensor.default
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        out = kwargs.pop("out", None)
        first: Any = node.args[0]
        several = isinstance(first, (list, tuple))
        written = []
        for one in first if several else [first]:
            arrived = graph.call_function(wait, (graph.call_function(start, (one, *node.args[1:]), kwargs),))
            written.append(graph.call_function(torch.ops.aten.copy_.default, (one if out is None else out, arrived)))
    if not several:
        node.replace_all_uses_with(written[0])
        graph.erase_node(node)
        return
    for user in list(node.users):
        if not qualified_name(user.target).endswith("getitem") or not isinstance(user.args[1], int):
            raise Unsupported(f"node '{user.name}' reads the results of '{node.name}' as a whole")
        user.replace_all_uses_with(written[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


__all__ = ["functional_copy"]
