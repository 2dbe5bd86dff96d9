"""`control_deps`: an op in a subgraph, ordered after nodes that it does not read. Such order becomes `meta["after"]`."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from tcverify.errors import Unsupported


def plain_order(gm: fx.GraphModule) -> int:
    """Inline the ops inside `control_deps` into the graph, in place; their predecessors are recorded in `meta["after"]`.

    Returns:
        The number of these ops.

    Raises:
        Unsupported: one holds more than one call.
    """
    wrapped = [node for node in gm.graph.nodes if _is_control(node)]
    for node in wrapped:
        _unwrap(gm, node)
    if wrapped:
        for node in list(gm.graph.nodes):
            if node.op == "get_attr" and not node.users:
                gm.graph.erase_node(node)
        gm.delete_all_unused_submodules()
    return len(wrapped)


def _is_control(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "control_deps"


def _unwrap(gm: fx.GraphModule, node: fx.Node) -> None:
    behind, held, *given = node.args
    assert isinstance(held, fx.Node)
    inner: fx.GraphModule = getattr(gm, str(held.target))
    values: dict[fx.Node, Any] = {}
    calls = []
    for one in inner.graph.nodes:
        if one.op == "placeholder":
            values[one] = given[len(values)]
        elif one.op != "output":
            calls.append(one)
    if len(calls) != 1 or calls[0].op != "call_function":
        raise Unsupported(f"{node.name} holds {len(calls)} calls under control_deps; one is understood")
    (call,) = calls
    with gm.graph.inserting_before(node):
        plain = gm.graph.call_function(
            call.target, map_arg(call.args, values.__getitem__), map_arg(call.kwargs, values.__getitem__)
        )
    plain.meta = {**call.meta, **node.meta}
    names = [one.name for one in behind if isinstance(one, fx.Node)] if isinstance(behind, (tuple, list)) else []
    name = node.name
    node.replace_all_uses_with(plain)
    gm.graph.erase_node(node)
    plain.name = name
    plain.meta["after"] = [*plain.meta.get("after", ()), *names]


__all__ = ["plain_order"]
