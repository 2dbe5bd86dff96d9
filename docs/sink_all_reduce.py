"""A pass with a well-known mistake: it sinks an all_reduce below the add that follows it."""

import torch
from torch import fx


def sink_all_reduce(gm: fx.GraphModule) -> fx.GraphModule:
    """all_reduce(x) + y ⇒ all_reduce(x + y)"""
    for add in list(gm.graph.nodes):
        if add.target is not torch.ops.aten.add.Tensor:
            continue
        for reduced in add.all_input_nodes:
            if reduced.target is torch.ops.tensor_cast.all_reduce.default and len(reduced.users) == 1:
                partial, rank, group = reduced.args
                add.replace_input_with(reduced, partial)
                with gm.graph.inserting_after(add):
                    total = gm.graph.call_function(reduced.target, (add, rank, group))
                add.replace_all_uses_with(total, delete_user_cb=lambda user, new=total: user is not new)
                total.meta["val"] = torch.empty_like(add.meta["val"])
                gm.graph.erase_node(reduced)
                break
    gm.recompile()
    return gm
