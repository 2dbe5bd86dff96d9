"""context_parallel_unshard: where the sequence is dim 0, it puts another dim into order.

Two ranks. A buffer [sequence, features] with four positions and four features is divided over the ranks and put together again.
Exit code 1: what has been put together is not the buffer.
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
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

RANKS = 2
WHOLE = torch.arange(16.0).reshape(4, 4)
EXPECTED = {rank: {"put together": WHOLE.tolist()} for rank in range(RANKS)}


def got(rank, mesh):
    buffer = WHOLE.clone()
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
        part = buffer.clone()
    return {"put together": context_parallel_unshard(mesh, [part], [0])[0].tolist()}


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
