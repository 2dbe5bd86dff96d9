"""A model as its users write it, and a pass on the graph that torch captures from it."""

import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tcverify

C10D = torch.ops._c10d_functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x))) + self.bias


def block():
    """The graph of this rank. `tcverify check` calls it once per rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Block(), mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    return tcverify.capture(model, (torch.ones(3, 4),))


def sink_wait(gm: fx.GraphModule) -> fx.GraphModule:
    """wait(all_reduce(x)) + y ⇒ wait(all_reduce(x + y)), which adds y once per rank"""
    for add in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        for wait in [n for n in add.all_input_nodes if n.target is C10D.wait_tensor.default]:
            start = wait.args[0]
            add.replace_input_with(wait, start.args[0])
            with gm.graph.inserting_after(add):
                total = gm.graph.call_function(start.target, (add, *start.args[1:]))
            with gm.graph.inserting_after(total):
                waited = gm.graph.call_function(wait.target, (total,))
            add.replace_all_uses_with(waited, delete_user_cb=lambda user, new=total: user is not new)
            total.meta["val"] = torch.empty_like(add.meta["val"])
            waited.meta["val"] = total.meta["val"]
            gm.graph.erase_node(wait)
            gm.graph.erase_node(start)
    gm.recompile()
    return gm
