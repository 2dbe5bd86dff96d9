"""FSDP2: gradients of a backward that raised are added to those of the next one, although reset_iter_state is to discard them.

One process. The backward raises between the two layers of one group of parameters. Exit code 1: a gradient is wrong.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Failing(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Failing.fails:
            raise ValueError("the backward is aborted")
        return grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for one in self.parameters():
            nn.init.ones_(one)

    def forward(self, x):
        return self.second(Failing.apply(self.first(x)))


def gradient_of(model, synced):
    model.set_requires_gradient_sync(synced)
    Failing.fails = True
    try:
        model(torch.ones(1, 1)).sum().backward()
    except ValueError:
        model.reset_iter_state()
        model.zero_grad()
    Failing.fails = False
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 1)).sum().backward()
    return model.second.weight.grad.full_tensor().item()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        models = {synced: fully_shard(Model(), mesh=mesh) for synced in (True, False)}
        if not hasattr(models[True], "reset_iter_state"):
            print(f"torch {torch.__version__} has no reset_iter_state")
            dist.destroy_process_group()
            sys.exit(0)
        found = {synced: gradient_of(model, synced) for synced, model in models.items()}
        dist.destroy_process_group()
    for synced, value in found.items():
        print(f"gradient behind an aborted backward, requires_gradient_sync={synced}: expected 1.0, got {value}")
    print(f"torch {torch.__version__}")
    sys.exit(any(value != 1.0 for value in found.values()))
