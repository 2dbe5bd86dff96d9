"""The same pass, fixed: one rank of the group adds."""

import torch
from torch import fx

from tcverify import REPLICATED


def sink_all_reduce(gm: fx.GraphModule) -> fx.GraphModule:
    """all_reduce(x) + y ⇒ all_reduce(x + y on the first rank, x on the others), where y is equal on all of them"""
    if any(writes(node) for node in gm.graph.nodes):
        return gm  # x may have changed when the sum is computed later
    for add in list(gm.graph.nodes):
        if add.target is not torch.ops.aten.add.Tensor or add.kwargs:
            continue
        for reduced, other in (add.args, add.args[::-1]):
            if not isinstance(reduced, fx.Node) or reduced.target is not torch.ops.tensor_cast.all_reduce.default:
                continue
            partial, rank, group = reduced.args
            if len(reduced.users) > 1 or not equal_on(other, group) or not same_layout(add, partial):
                continue
            with gm.graph.inserting_after(add):
                total = gm.graph.call_function(reduced.target, (add, rank, group))
            # Views of the sum share its storage: now they must share the total's.
            total.meta["val"], add.meta["val"] = add.meta["val"], torch.empty_like(add.meta["val"])
            add.replace_all_uses_with(total, delete_user_cb=lambda user, new=total: user is not new)
            if rank == group[0]:
                add.replace_input_with(reduced, partial)
            else:
                total.args = (partial, rank, group)
                gm.graph.erase_node(add)
            gm.graph.erase_node(reduced)
            break
    gm.recompile()
    return gm


def equal_on(node, group) -> bool:
    """Whether a node is an input that is equal on all ranks of a group."""
    return (
        isinstance(node, fx.Node)
        and node.op == "placeholder"
        and node.meta["placement"].get(tuple(group)) == REPLICATED
    )


def writes(node: fx.Node) -> bool:
    """Whether a node writes into an operand."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def same_layout(one: fx.Node, other: fx.Node) -> bool:
    """Whether two values have the same shape, stride and dtype."""
    a, b = one.meta.get("val"), other.meta.get("val")
    return a is not None and b is not None and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
