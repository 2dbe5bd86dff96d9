"""Two calls of an op that is known to have a side effect become one in the default partitioner of torch.compile."""

import sys

import torch

SENT = []


@torch.library.custom_op("demo::send", mutates_args=())
def send(x: torch.Tensor) -> torch.Tensor:
    SENT.append(x.tolist())
    return x.clone()


send.register_fake(torch.empty_like)
torch.fx.node.has_side_effect(torch.ops.demo.send.default)


def step(weight, x):
    torch.ops.demo.send(x)
    torch.ops.demo.send(x)
    return (weight * weight).sum()


if __name__ == "__main__":
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2)
    step(weight, x)
    expected = len(SENT)
    SENT.clear()
    # The default backend uses the same partitioner, and its CSE, as aot_eager; this one needs no C++ compiler.
    torch.compile(step, backend="aot_eager", fullgraph=True)(weight, x)
    print(f"torch {torch.__version__}: expected {expected} sends, got {len(SENT)}")
    sys.exit(0 if len(SENT) == expected else 1)
