"""torch.distributed.nn.functional.broadcast and reduce: elements change places where ranks hold a tensor in different orders.

Two ranks. Rank 0 has a transposed matrix, rank 1 one of the same shape that is contiguous. Exit code 1: a value is wrong.
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
from torch.distributed.nn import functional

RANKS = 2


VALUES = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
TWICE = [[2 * one for one in row] for row in VALUES]
EXPECTED = {0: {"broadcast": VALUES, "reduce": TWICE, "all_reduce": TWICE}, 1: {"broadcast": VALUES, "all_reduce": TWICE}}


def got(rank):
    x = torch.tensor(VALUES)
    x = x.t().contiguous().t() if rank == 0 else x
    return {
        "broadcast": functional.broadcast(x, 0).tolist(),
        "reduce": functional.reduce(x, 0).tolist(),
        "all_reduce": functional.all_reduce(x).tolist(),
    }


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
