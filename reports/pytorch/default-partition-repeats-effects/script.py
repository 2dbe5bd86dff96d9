"""An op of the forward that is known to have a side effect runs again in the backward."""

import sys

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

SENT = []


@torch.library.custom_op("demo::send", mutates_args=())
def send(x: torch.Tensor) -> torch.Tensor:
    SENT.append(x.tolist())
    return x.clone()


send.register_fake(torch.empty_like)
torch.fx.node.has_side_effect(torch.ops.demo.send.default)


def step(weight):
    hidden = weight.sin()
    torch.ops.demo.send(hidden.detach())
    return (hidden * hidden).sum()


if __name__ == "__main__":
    weight = torch.ones(2, requires_grad=True)
    step(weight).backward()
    expected = len(SENT)
    SENT.clear()
    # A backend as the page on custom backends has it.
    backend = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward))
    loss = torch.compile(step, backend=backend, fullgraph=True)(weight)
    forward = len(SENT)
    loss.backward()
    print(f"torch {torch.__version__}: expected {expected} send, got {forward} in the forward and {len(SENT) - forward} in the backward")
    sys.exit(0 if len(SENT) == expected else 1)
