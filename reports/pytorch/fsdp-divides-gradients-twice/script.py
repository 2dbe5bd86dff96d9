"""FSDP2: gradients are divided twice where one rank has all shards of a parameter and collectives only sum.

Two ranks, two replicas of one shard, with set_gradient_divide_factor(2) and set_force_sum_reduction_for_comms(True). Exit code 1: the
gradient is not the sum over the ranks divided by 2, which it is without the second setting.
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

RANKS = 2


def loss_of(model, rank):
    return model(torch.arange(4.0).reshape(2, 2) + rank).square().mean()


def model_of():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def gradient(mesh, rank, sums):
    model = model_of()
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(float(RANKS))
    model.set_force_sum_reduction_for_comms(sums)
    loss_of(model, rank).backward()
    return model.weight.grad.full_tensor().tolist()


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    both = [gradient(mesh, rank, sums) for sums in (False, True)]
    if rank == 0:
        found.put(both)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        without, got = found.get(timeout=100)
        for one in ranks:
            one.join(10)
    model = model_of()
    for rank in range(RANKS):
        (loss_of(model, rank) / RANKS).backward()
    expected = model.weight.grad
    if not torch.allclose(expected, torch.tensor(without)):
        raise RuntimeError("the gradient is wrong without set_force_sum_reduction_for_comms as well")
    print(f"torch {torch.__version__}: expected the gradient {expected.tolist()}")
    print(f"torch {torch.__version__}: got      the gradient {got}")
    sys.exit(int(not torch.allclose(expected, torch.tensor(got))))
