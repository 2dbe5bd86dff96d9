"""A pass that lowers resharding to communication, and gathers shards in the order of ranks."""

import torch
from torch import fx

from tcverify import Layout


def gather_in_rank_order(gm: fx.GraphModule) -> fx.GraphModule:
    """set from shards to a replicated layout ⇒ all_gather"""
    ops, graph = torch.ops.host_ir, gm.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.multidevice.set.default):
        source, target = Layout.parse(node.args[1]), Layout.parse(node.args[2])
        if source.mesh != target.mesh or source.sharding != (0,) or target.sharding != (None,):
            continue
        team = sorted(source.mesh.ranks)
        shape = list(node.meta["val"].shape)
        with graph.inserting_before(node):
            whole = graph.call_function(torch.ops.aten.empty.memory_format, (shape,), {"dtype": node.meta["val"].dtype})
            gather = graph.call_function(ops.all_gather.default, (node.args[0], 0, team), {"out": whole})
            graph.call_function(ops.wait.default, (gather,))
        whole.meta["val"] = gather.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
    gm.recompile()
    return gm
