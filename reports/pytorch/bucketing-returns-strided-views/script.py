"""Compiled code returns a gathered value with other strides than the step that was compiled: a view of it fails.

torch.compile with buckets of all_gathers. `keep_output_stride`, on by default, promises the strides of eager. Exit code 1: they differ.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
OP = torch.ops._c10d_functional


def step(x, y):
    group = dist.group.WORLD.group_name
    first = OP.wait_tensor(OP.all_gather_into_tensor(x, RANKS, group))
    second = OP.wait_tensor(OP.all_gather_into_tensor(y, RANKS, group))
    return first, second


def main(rank, folder):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    inputs = torch.arange(2.0).view(1, 2) + rank, torch.ones(2) * rank
    expected = step(*inputs)[0]
    with config.patch({"bucket_all_gathers_fx": "all", "fx_graph_cache": False}):
        got = torch.compile(step, fullgraph=True)(*inputs)[0]
    try:
        flat = got.view(-1).tolist()
    except RuntimeError as error:
        flat = f"RuntimeError: {str(error).splitlines()[0]}"
    print(f"rank {rank}: expected strides {expected.stride()}, and {expected.view(-1).tolist()}", flush=True)
    print(f"rank {rank}: got      strides {got.stride()}, and {flat}", flush=True)
    torch.save(got.stride() == expected.stride(), f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
