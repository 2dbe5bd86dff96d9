"""A pass that sinks waits, and forgets that a start still reads its operand."""

import torch
from torch import fx


def late_wait(gm: fx.GraphModule) -> fx.GraphModule:
    """move every wait down to the first reader of its result"""
    for wait in reversed(
        gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)
    ):
        reader = wait.next
        while reader.op != "output" and reader not in wait.users:
            reader = reader.next
        reader.prepend(wait)
    gm.recompile()
    return gm
