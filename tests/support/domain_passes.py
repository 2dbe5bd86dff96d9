"""Passes for the tests of number domains, in a module that processes which apply them import at once."""

from __future__ import annotations

import math

import torch
from torch import fx


def last_digit_of_eps(gm: fx.GraphModule) -> None:
    """What no floating-point comparison sees: the effect is 1e-21 of an output."""
    for node in gm.graph.nodes:
        if node.target is torch.ops.tensor_cast.rms_norm.default:
            node.args = (*node.args[:2], math.nextafter(node.args[2], 1.0))


def copies_to_bfloat16(gm: fx.GraphModule) -> None:
    """What float64 does not see: a cast is the identity there."""
    aten = torch.ops.aten
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.tensor_cast.all_reduce.default:
            continue
        x = node.args[0]
        with gm.graph.inserting_before(node):
            small = gm.graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
        small.meta["val"] = x.meta["val"].to(torch.bfloat16)
        dtype, node.meta["val"] = node.meta["val"].dtype, small.meta["val"].clone()
        node.args = (small, *node.args[1:])
        with gm.graph.inserting_after(node):
            back = gm.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
        back.meta["val"] = x.meta["val"].clone()
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)


def touched(gm: fx.GraphModule) -> None:
    """A change that means nothing: one more copy."""
    value = next(node for node in gm.graph.nodes if node.name == "all_reduce")
    with gm.graph.inserting_after(value):
        copy = gm.graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta["val"] = value.meta["val"].clone()
    value.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def adds_zero_over_zero(gm: fx.GraphModule) -> None:
    """NaN in floating point. In the field 0 / 0 is 0."""
    aten = torch.ops.aten
    value = next(node for node in gm.graph.nodes if node.name == "all_reduce")
    readers = list(value.users)
    with gm.graph.inserting_before(value.next):
        nothing = gm.graph.call_function(aten.sub.Tensor, (value, value))
        undefined = gm.graph.call_function(aten.div.Tensor, (nothing, nothing))
        total = gm.graph.call_function(aten.add.Tensor, (value, undefined))
    for node in (nothing, undefined, total):
        node.meta["val"] = value.meta["val"].clone()
    for reader in readers:
        reader.replace_input_with(value, total)


def adds_one(gm: fx.GraphModule) -> None:
    """What every domain sees."""
    norm = next(node for node in gm.graph.nodes if node.name == "rms_norm")
    with gm.graph.inserting_before(norm):
        more = gm.graph.call_function(torch.ops.aten.add.Tensor, (norm.args[0], 1.0))
    more.meta["val"] = norm.args[0].meta["val"].clone()
    norm.args = (more, *norm.args[1:])


def reduces_in_bfloat16(gm: fx.GraphModule) -> None:
    """Half the traffic, and an eighth of the digits."""
    (reduced,) = gm.graph.find_nodes(op="call_function", target=torch.ops.tensor_cast.all_reduce.default)
    operand, cast = reduced.args[0], torch.ops.aten.to.dtype
    with gm.graph.inserting_before(reduced):
        low = gm.graph.call_function(cast, (operand, torch.bfloat16))
    low.meta["val"] = operand.meta["val"].to(torch.bfloat16)
    with gm.graph.inserting_after(reduced):
        high = gm.graph.call_function(cast, (reduced, operand.meta["val"].dtype))
    high.meta["val"] = reduced.meta["val"]
    reduced.replace_all_uses_with(high, delete_user_cb=lambda user: user is not high)
    reduced.update_arg(0, low)
    reduced.meta["val"] = low.meta["val"].clone()


def copies(gm: fx.GraphModule) -> None:
    """Sound, and in the dtypes of the program."""
    norm = next(node for node in gm.graph.nodes if node.name == "rms_norm")
    with gm.graph.inserting_before(norm):
        copy = gm.graph.call_function(torch.ops.aten.clone.default, (norm.args[0],))
    copy.meta["val"] = norm.args[0].meta["val"].clone()
    norm.update_arg(0, copy)


def reduces_on_rank_0_alone(gm: fx.GraphModule) -> None:
    """The other rank's graph is left as it is, so it waits forever."""
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.tensor_cast.all_reduce.default and node.args[1] == 1:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def raises(gm: fx.GraphModule) -> None:
    raise ValueError("no")
