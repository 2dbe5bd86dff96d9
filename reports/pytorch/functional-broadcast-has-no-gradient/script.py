"""Functional broadcast: each rank keeps the gradient of what it received, and the source does not get their sum.

Two ranks. Rank 0 broadcasts x, the loss of rank r is (r + 1) times the result. Exit code 1: a gradient is wrong.
"""

import datetime
import logging
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import _functional_collectives as collectives

RANKS = 2


#: The loss of all ranks is 3 times the x of rank 0, and does not depend on that of rank 1.
EXPECTED = {0: {"eager": 3.0, "torch.compile": 3.0}, 1: {"eager": 0.0, "torch.compile": 0.0}}


def received(x):
    return collectives.broadcast(x, 0, dist.group.WORLD)


def got(rank):
    found = {}
    for how, function in (("eager", received), ("torch.compile", torch.compile(received, backend="aot_eager"))):
        x = torch.ones(1, requires_grad=True)
        ((rank + 1) * function(x)).sum().backward()
        found[how] = 0.0 if x.grad is None else x.grad.item()
    return found


def worker(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    time = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=time)
    found.put((rank, got(rank)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not hasattr(collectives, "all_reduce_backward"):
        print(f"no functional collective of torch {torch.__version__} has a gradient")
        sys.exit(0)
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=worker, args=(rank, f"{folder}/store", found)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        said = dict(found.get(timeout=120) for _ in ranks)
        for one in ranks:
            one.join()
    wrong = 0
    for rank in range(RANKS):
        for what, want in EXPECTED[rank].items():
            wrong += said[rank][what] != want
            print(f"rank {rank}, {what}: expected {want}, got {said[rank][what]}")
    print(f"torch {torch.__version__}")
    sys.exit(bool(wrong))
