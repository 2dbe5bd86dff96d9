"""HSDP: gradients that wait for the all_reduce are lost where the last microbatch does not use the layer.

Four ranks, two replicas of two shards, accumulate gradients of two microbatches and all_reduce in the last. Exit code 1: the gradient
of a layer that only the first microbatch uses differs from that of one process.
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

RANKS = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.first = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, microbatch):
        x = self.always(x)
        return self.first(x) if microbatch == 0 else x


def loss_of(model, rank, microbatch):
    return model(torch.arange(4.0).reshape(2, 2) + rank + microbatch, microbatch).square().mean()


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    for layer in (model.always, model.first, model):
        fully_shard(layer, mesh=mesh)
    for microbatch in range(2):
        last = microbatch == 1
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        loss_of(model, rank, microbatch).backward()
    grads = [one.grad for one in (model.always.weight, model.first.weight)]
    whole = [None if one is None else one.full_tensor().tolist() for one in grads]
    if rank == 0:
        found.put(whole)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        always, got = found.get(timeout=100)
        for one in ranks:
            one.join(10)
    model = Model()
    for rank in range(RANKS):
        for microbatch in range(2):
            (loss_of(model, rank, microbatch) / RANKS).backward()
    if not torch.allclose(model.always.weight.grad, torch.tensor(always)):
        raise RuntimeError("the gradient of a layer that each microbatch uses is wrong as well")
    expected = model.first.weight.grad
    print(f"torch {torch.__version__}: expected the gradient {expected.tolist()}")
    print(f"torch {torch.__version__}: got      the gradient {got}")
    sys.exit(int(got is None or not torch.allclose(expected, torch.tensor(got))))
