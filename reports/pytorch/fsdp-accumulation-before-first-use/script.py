"""FSDP2: gradients cannot be accumulated without reductions in mixed precision before each layer has run.

Two ranks. The first of two microbatches, in which set_requires_gradient_sync(False) holds, does not use a layer. Exit code 1: its
backward raises.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sometimes = nn.Linear(2, 2, bias=False)
        self.always = nn.Linear(2, 2, bias=False)

    def forward(self, x, microbatch):
        return self.always(self.sometimes(x) if microbatch == 1 else x)


def loss_of(model, rank, microbatch):
    return model(torch.arange(4.0).reshape(2, 2) + rank, microbatch).square().mean()


def gradient(mesh, rank, **policy):
    model = Model()
    policy = MixedPrecisionPolicy(**policy)
    fully_shard(model.sometimes, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for microbatch in range(2):
        model.set_requires_gradient_sync(microbatch == 1)
        loss_of(model, rank, microbatch).backward()
    return model.sometimes.weight.grad.full_tensor().tolist()


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    without = gradient(mesh, rank)
    try:
        got = gradient(mesh, rank, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    except AttributeError as error:
        got = f"{type(error).__name__}: {error}"
    if rank == 0:
        found.put((without, got))
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
    model = Model()
    for rank in range(RANKS):
        (loss_of(model, rank, 1) / RANKS).backward()
    expected = model.sometimes.weight.grad
    if not torch.allclose(expected, torch.tensor(without)):
        raise RuntimeError("the gradient is wrong without mixed precision as well")
    print(f"torch {torch.__version__}: expected about the gradient {expected.tolist()}")
    print(f"torch {torch.__version__}: got {'' if isinstance(got, str) else 'the gradient '}{got}")
    sys.exit(int(isinstance(got, str) or not torch.allclose(expected, torch.tensor(got), rtol=0.1)))
