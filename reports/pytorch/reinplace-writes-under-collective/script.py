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


def step(x, place, value):
    """Nothing is written in place here."""
    sent = x * 2
    flying = OP.all_gather_into_tensor(sent, RANKS, dist.group.WORLD.group_name)
    changed = torch.index_put(sent, [place], value)
    return changed, OP.wait_tensor(flying)


def main(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    inputs = torch.full((4,), rank + 1.0), torch.tensor([0]), torch.tensor([99.0])
    expected = step(*inputs)[1].tolist()
    told = {"fallback_by_default": True, "fx_graph_cache": False, "compile_threads": 1}
    with config.patch({name: value for name, value in told.items() if name in config.get_config_copy()}):
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
    if "fallback_by_default" not in config.get_config_copy():
        print("this torch compiles C++ for it, which is not measured")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
