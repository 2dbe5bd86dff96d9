"""A scaled value is computed while rows are gathered; then the gathered rows are added to another value.

torch.compile with its defaults, on the CPU. Rank 1 is late by two seconds. Exit code 1: a rank reads the gathered rows before it waits
for them.
"""

import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.multiprocessing as mp

RANKS = 2


def step(x, v, scale):
    whole = fc.all_gather_tensor(x, 0, dist.group.WORLD)
    return v * scale, whole + v


def main(rank, folder):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    x, v, scale = torch.full((2, 8), rank + 1.0), torch.ones(4, 8), torch.full((4, 1), 3.0)
    expected = step(2 * x, v, scale)
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    compiled(x, v, scale)
    dist.barrier()
    if rank:
        time.sleep(2)  # rank 0 has its sum before the rows of rank 1 are there
    got = compiled(2 * x, v, scale)
    wrong = sum(int((a != b).sum()) for a, b in zip(expected, got))
    print(f"rank {rank}: expected equal results, got {wrong} elements that differ", flush=True)
    torch.save(not wrong, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        print(f"torch {torch.__version__}")
        sys.exit(int(not all(torch.load(f"{folder}/{rank}") for rank in range(RANKS))))
