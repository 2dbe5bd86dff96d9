"""A sound `wrap_all_sync_nodes_with_control_deps`: nothing moves past an event."""

from __future__ import annotations

import importlib

from torch import fx


def tie(gm: fx.GraphModule) -> None:
    """Every event keeps its place among all nodes."""
    streams = importlib.import_module("torch._functorch._aot_autograd.streams")
    now: dict[fx.Node, None] = {}  # what hands on each value behind the last event
    visited: set[fx.Node] = set()
    for node in list(gm.graph.nodes):
        visited.add(node)
        if node.op != "call_function":
            continue
        if "streams." not in str(node.target):
            now[node] = None
            continue
        made, _ = streams._wrap_sync_node(gm, node, list(now), visited)
        for item in made.users:
            del now[made.args[1 + item.args[1]]]
            now[item] = None
        now[made] = None  # the next one follows it
    gm.recompile()


__all__ = ["tie"]
