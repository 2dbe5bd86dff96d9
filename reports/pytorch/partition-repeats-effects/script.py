"""An op of the forward that is known to have a side effect runs again in the backward."""

import sys

import torch

CALLS = []


@torch.library.custom_op("demo::barrier", mutates_args=())
def barrier(number: int) -> None:
    CALLS.append(number)


barrier.register_fake(lambda number: None)
torch.fx.node.has_side_effect(torch.ops.demo.barrier.default)


def step(weight):
    hidden = weight.sin()
    torch.ops.demo.barrier(7)
    return (hidden * hidden).sum()


if __name__ == "__main__":
    weight = torch.ones(2, requires_grad=True)
    step(weight).backward()
    expected = len(CALLS)
    CALLS.clear()
    # The default backend uses the same partitioner as aot_eager; this one needs no C++ compiler.
    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(weight)
    forward = len(CALLS)
    loss.backward()
    backward = len(CALLS) - forward
    print(f"torch {torch.__version__}: expected {expected} call, got {forward} in the forward and {backward} in the backward")
    sys.exit(0 if len(CALLS) == expected else 1)
