"""Passes for captured models, in a module that processes which apply them import at once."""

from __future__ import annotations

import torch
from torch import fx


def swapped(module: fx.GraphModule) -> fx.GraphModule:
    """The operands of every addition of equal layouts, the other way round."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        layouts = [(v.shape, v.stride()) for v in (a.meta["val"] for a in node.args if isinstance(a, fx.Node))]
        if len(layouts) == 2 and layouts[0] == layouts[1]:
            node.args = (node.args[1], node.args[0])
    module.recompile()
    return module


def without_a_collective(module: fx.GraphModule) -> fx.GraphModule:
    """The last wait is given what the collective was given, in place of its result; where shapes allow it."""
    for wait in reversed(
        module.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)
    ):
        start = wait.args[0]
        operand = start.args[0]
        if operand.meta["val"].shape == wait.meta["val"].shape and module.meta["rank"] == 0 and wait.users:
            wait.replace_all_uses_with(operand)
            break
    module.recompile()
    return module
