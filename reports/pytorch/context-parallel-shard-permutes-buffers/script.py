"""_context_parallel_shard: with a load balancer, it puts the tokens of the buffers themselves into another order.

Two ranks. A batch of four tokens is divided by a balancer that gives each rank tokens from the front and from the back. Exit code 1: the batch has
changed.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention

RANKS = 2
TOKENS = [[0, 1, 2, 3]]
EXPECTED = {0: {"part": [[0, 3]], "batch": TOKENS}, 1: {"part": [[1, 2]], "batch": TOKENS}}


def got(rank, mesh):
    batch = torch.tensor(TOKENS)
    balancer = _attention._HeadTailLoadBalancer(4, RANKS, "cpu")
    (part,) = _attention._context_parallel_shard(mesh, [batch], [1], balancer)
    return {"part": part.tolist(), "batch": batch.tolist()}


def worker(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    time = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=time)
    found.put((rank, got(rank, init_device_mesh("cpu", (RANKS,)))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not hasattr(_attention, "_HeadTailLoadBalancer"):
        print(f"torch {torch.__version__} has no such balancer: nothing is expected")
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
