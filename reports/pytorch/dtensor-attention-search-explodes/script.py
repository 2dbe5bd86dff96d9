"""DTensor: finding placements for scaled_dot_product_attention of divided tensors takes most of a minute on CPU."""

import os
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

RANKS, LIMIT = 2, 15.0


def seconds(mesh, placement):
    """Time of the first call with all operands placed so, of 2 × 4 × 8 × 8 numbers each."""
    operands = [distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [placement]) for _ in range(3)]
    start = time.monotonic()
    with torch.no_grad():
        scaled_dot_product_attention(*operands)
    return time.monotonic() - start


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    try:
        print(f"rank {rank}: replicated: {seconds(mesh, Replicate()):.1f} s", flush=True)
    except NotImplementedError as error:
        print(f"this torch has no rule for it: {error}", flush=True)
        os._exit(2)

    def give_up():
        print(f"rank {rank}: divided along the batch: expected the like, got no answer within {LIMIT:g} s", flush=True)
        os._exit(1)

    timer = threading.Timer(LIMIT, give_up)
    timer.start()
    print(f"rank {rank}: divided along the batch: {seconds(mesh, Shard(0)):.1f} s", flush=True)
    timer.cancel()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork", join=False).processes
        for process in ranks:
            process.join()
        sys.exit(max(process.exitcode for process in ranks))
