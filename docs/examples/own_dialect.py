"""A dialect of one op, an all_reduce fused with the rms_norm that follows it, and the pass that creates it."""

import torch
from torch import fx

from tcverify import Op, register_dialect
from tcverify.ops import Collective, Request


@torch.library.custom_op("mylib::all_reduce_rms_norm", mutates_args=())
def kernel(x: torch.Tensor, gain: torch.Tensor, eps: float, rank: int, group: list[int]) -> torch.Tensor:
    raise NotImplementedError("the real kernel runs on a GPU")


@kernel.register_fake
def _(x, gain, eps, rank, group):
    return torch.empty_like(x)


def meaning(me, x, gain, eps, rank, group):
    """What one rank computes: it yields a request to the group, and receives the sum."""
    ask = Collective("all_reduce", tuple(group), tuple(x.shape), x.dtype, reduce_op="sum")
    total = yield Request(ask, x)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * gain


register_dialect("mylib", [Op("mylib::all_reduce_rms_norm", meaning, collective=True, resources=("compute", "comm"))])


def fuse_norm(gm: fx.GraphModule) -> fx.GraphModule:
    """all_reduce → rms_norm ⇒ all_reduce_rms_norm"""
    ops, graph = torch.ops, gm.graph
    for norm in graph.find_nodes(op="call_function", target=ops.tensor_cast.rms_norm.default):
        reduced, gain, eps = norm.args
        if reduced.target is ops.tensor_cast.all_reduce.default and len(reduced.users) == 1:
            x, rank, group = reduced.args
            with graph.inserting_before(norm):
                fused = graph.call_function(ops.mylib.all_reduce_rms_norm.default, (x, gain, eps, rank, group))
            fused.meta["val"] = torch.empty_like(norm.meta["val"])
            norm.replace_all_uses_with(fused)
            graph.erase_node(norm)
            graph.erase_node(reduced)
    gm.recompile()
    return gm
