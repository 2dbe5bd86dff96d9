"""FSDP2: activations that are DTensors get plain gradients where the loss does not depend on what a layer gives of them.

Four ranks, two of data parallelism with two of tensor parallelism each. A layer hands on its input beside its output, and the next
one does not read it. Exit code 1: the backward raises, where it does not without fully_shard.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module

RANKS = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, h, residual):
        return self.linear(h), h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        h, residual = x, x
        for layer in self.layers:
            h, residual = layer(h, residual)
        return h


def gradient(mesh, sharded):
    model = Model()
    distribute_module(model, mesh["tp"])
    if sharded:
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh["dp"])
    rows = torch.arange(4.0).reshape(2, 2) + mesh.get_local_rank("dp")
    output = model(DTensor.from_local(rows, mesh["tp"], [Replicate()]))
    output.to_local().square().mean().backward()
    grad = model.layers[0].linear.weight.grad.full_tensor()
    if not sharded:
        dist.all_reduce(grad, dist.ReduceOp.SUM, group=mesh["dp"].get_group())
        grad = grad / mesh["dp"].size()
    return grad


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = gradient(mesh, sharded=False).tolist()
    try:
        got = gradient(mesh, sharded=True).tolist()
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        got = str(error)
    if rank == 0:
        found.put((expected, got))
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        expected, got = found.get(timeout=100)
        for one in ranks:
            one.join(10)
    print(f"torch {torch.__version__}: expected the gradient {expected}")
    print(f"torch {torch.__version__}: got      {'' if isinstance(got, str) else 'the gradient '}{got}")
    if isinstance(got, str):
        sys.exit(1)
    sys.exit(0 if torch.allclose(torch.tensor(expected), torch.tensor(got)) else 2)
