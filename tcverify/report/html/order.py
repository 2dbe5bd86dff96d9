"""The order in which a host program is drawn: a column per stream, each op below its predecessor on the stream."""

from __future__ import annotations

from torch import fx

from tcverify.ops import lookup
from tcverify.ops.dialects.host_ir import CURRENT_STREAM, SET_STREAM, STREAM, SYNCHRONIZE
from tcverify.program.stream_options import MAIN_STREAM


def stream_predecessors(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """By node of a graph in host IR, the nodes that it is drawn below; {} for other graphs.

    First its predecessor on its stream; for the first op of a worker, the caller's last op. A `synchronize` is also
    below what it waits for.
    """
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    tokens: dict[fx.Node, object] = {}
    last: dict[object, fx.Node] = {}
    current: object = MAIN_STREAM
    host = False
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        name = lookup(node.target).name if node.op == "call_function" else ""
        host = host or name.startswith("host_ir::")
        named = tokens.get(node.args[0], MAIN_STREAM) if name in (SET_STREAM, SYNCHRONIZE) else None
        if name == CURRENT_STREAM:
            tokens[node] = current
        elif name == STREAM:
            tokens[node] = ("worker", str(node.args[0]))
        elif name == SET_STREAM:
            current = named
        elif node.op == "output":
            current = MAIN_STREAM
        above = [last.get(current, last.get(MAIN_STREAM))]
        if name == SYNCHRONIZE:
            above.append(last.get(named))
        found[node] = tuple(one for one in above if one is not None)
        last[current] = node
    return found if host else {}


__all__ = ["stream_predecessors"]
