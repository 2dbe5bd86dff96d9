"""DistributedDataParallel with static_graph=True: the step fails if its first backward is under no_sync.

Two ranks accumulate gradients of two microbatches. Exit code 1: the first backward raises, or gradients differ from those of one process.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def model():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def batch(rank, number):
    return torch.arange(4.0).reshape(2, 2) + 2 * rank + number


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(model(), static_graph=True)
    try:
        with wrapped.no_sync():
            wrapped(batch(rank, 0)).square().mean().backward()
        wrapped(batch(rank, 1)).square().mean().backward()
        said = wrapped.module.weight.grad.tolist()
    except RuntimeError as error:
        said = str(error)
    if rank == 0:
        found.put(said)


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(2)]
        for one in ranks:
            one.start()
        got = found.get(timeout=100)
        for one in ranks:
            one.join(10)
    whole = model()
    for rank in range(2):
        for number in range(2):
            (whole(batch(rank, number)).square().mean() / 2).backward()
    expected = whole.weight.grad
    raised = isinstance(got, str)
    if raised and not got.startswith("expect_autograd_hooks_"):
        raise RuntimeError(got)  # which is not what this is about
    print(f"torch {torch.__version__}: expected the gradient {expected.tolist()}")
    print(f"torch {torch.__version__}: got      {got.partition(' at ')[0] if raised else got}")
    sys.exit(int(raised or not torch.allclose(expected, torch.tensor(got))))
