"""A sound `wrap_all_sync_nodes_with_control_deps`: nothing moves past an event."""

from __future__ import annotations

import operator

import torch
from torch import fx


def tie(gm: fx.GraphModule) -> None:
    """`wrap_all_sync_nodes_with_control_deps`, mended: every event keeps its place among all nodes."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    now: dict[fx.Node, fx.Node] = {}  # a node -> what hands it on behind the last event
    for number, node in enumerate(list(gm.graph.nodes)):
        if node.op != "call_function":
            continue
        if "streams." not in str(node.target):
            now[node] = node
            continue
        inner = fx.Graph()
        inputs = [inner.placeholder(f"x{k}") for k in range(len(now))]
        inner.output((inner.call_function(node.target, node.args), *inputs))
        setattr(gm, f"tied{number}", fx.GraphModule(torch.nn.Module(), inner))
        with gm.graph.inserting_before(node):
            called = gm.graph.get_attr(f"tied{number}")
            made = gm.graph.call_function(control_deps, (tuple(now.values()), called, *now.values()))
            for k, (original, last) in enumerate(now.items()):
                item = gm.graph.call_function(operator.getitem, (made, k + 1))
                item.meta.update(last.meta)
                for user in [user for user in last.users if user > made and user is not item]:
                    user.replace_input_with(last, item)
                now[original] = item
        gm.graph.erase_node(node)


__all__ = ["tie"]
