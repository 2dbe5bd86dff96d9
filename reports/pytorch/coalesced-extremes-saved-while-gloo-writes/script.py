"""Functional all_reduce_coalesced of a maximum: its backward fails on gloo, whose threads write what autograd has saved.

Two ranks, two tensors. Exit code 1: the backward raises.
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


#: The maximum of all ranks is that of rank 1, on which the gradients of both ranks end.
EXPECTED = {0: {"all_reduce": 0.0, "all_reduce_coalesced": 0.0}, 1: {"all_reduce": 2.0, "all_reduce_coalesced": 2.0}}


def got(rank):
    found = {}
    for name in EXPECTED[rank]:
        x = torch.full((1 << 22,), float(rank), requires_grad=True)
        y = torch.full((1 << 22,), float(rank), requires_grad=True)
        if name == "all_reduce":
            made = [collectives.all_reduce(one, "max", dist.group.WORLD) for one in (x, y)]
        else:
            made = collectives.all_reduce_coalesced([x, y], "max", dist.group.WORLD)
        try:
            sum(one.sum() for one in made).backward()
            found[name] = x.grad[0].item()
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {str(error):.90}…"
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
    if not hasattr(collectives, "_is_min_max"):
        print(f"all_reduce_coalesced of torch {torch.__version__} has no gradient of a maximum")
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
