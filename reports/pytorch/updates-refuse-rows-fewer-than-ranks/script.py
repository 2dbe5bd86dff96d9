"""DTensor: optimizers cannot update a parameter with fewer rows than ranks, of which DTensor itself has replicated the gradient.

Two ranks and a layer with one output feature under ColwiseParallel. Exit code 1: the step of the optimizer raises.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

RANKS = 2


def model_of():
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False)


def step(model):
    model(torch.tensor([[3.0, -4.0]])).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(model_of(), mesh, ColwiseParallel(output_layouts=Replicate()))
    try:
        step(model)
        got = model.weight.full_tensor().tolist()
    except RuntimeError as error:
        got = f"{type(error).__name__}: {str(error)[:130]}"
    found.put((rank, got))
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        weights = dict(found.get(timeout=100) for _ in ranks)
        for one in ranks:
            one.join(10)
    model = model_of()
    step(model)
    expected = model.weight.tolist()
    for rank in range(RANKS):
        print(f"torch {torch.__version__}: rank {rank} expected the weight {expected}")
        print(f"torch {torch.__version__}: rank {rank} got      the weight {weights[rank]}")
    sys.exit(int(any(weights[rank] != expected for rank in range(RANKS))))
