"""A side effect of the backward happens in the forward, whether there is a backward or not."""

import sys

import torch

CALLS = []


@torch.library.custom_op("demo::send", mutates_args=())
def send(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.tolist())
    return x.clone()


send.register_fake(torch.empty_like)
torch.fx.node.has_side_effect(torch.ops.demo.send.default)


class Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        torch.ops.demo.send(ctx.saved_tensors[0])
        return gradient * 2


def step(weight):
    return Stage.apply(weight.sin())


def counted(run, weight):
    CALLS.clear()
    result = run(weight).sum()
    forward = len(CALLS)
    result.backward()
    return forward, len(CALLS) - forward


if __name__ == "__main__":
    weight = torch.ones(2, requires_grad=True)
    expected = counted(step, weight)
    # The default backend uses the same partitioner as aot_eager; this one needs no C++ compiler.
    got = counted(torch.compile(step, backend="aot_eager", fullgraph=True), weight)
    print(f"torch {torch.__version__}: sends in the forward and in the backward: expected {expected}, got {got}")
    sys.exit(0 if got == expected else 1)
