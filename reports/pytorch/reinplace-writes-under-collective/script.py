"""A tensor is gathered while another value is made of it; compiled, that value is written over what is being gathered."""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
OP = torch.ops._c10d_functional


def step(x, w, place, value):
    """Nothing is written in place here."""
    sent = x @ w
    flying = OP.all_gather_into_tensor(sent, RANKS, dist.group.WORLD.group_name)
    changed = torch.index_put(sent, [place], value)
    return changed, OP.wait_tensor(flying)


def main(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    inputs = torch.full((2, 2), rank + 1.0), torch.eye(2), torch.tensor([0]), torch.tensor([99.0, 99.0])
    expected = step(*inputs)[1].tolist()
    with config.patch({"fx_graph_cache": False}):
        compiled = torch.compile(step, fullgraph=True, dynamic=False)
        compiled(*inputs)
    dist.barrier()
    # Rank 1 is late, and gloo has two threads: the gather of rank 0 waits in line behind two other collectives.
    if rank:
        time.sleep(2)
    ahead = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(4)]
    got = compiled(*inputs)[1].tolist()
    for work in ahead:
        work.wait()
    print(f"rank {rank}: expected {expected}, got {got}", flush=True)
    torch.save(got == expected, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
