"""A reduce_scatter whose result is read itself, behind the wait for it. Fused with the product before it, it is waited for no more.

torch.compile with `_micro_pipeline_tp`, the setting of asynchronous tensor parallelism. Fused ops need GPUs with symmetric memory; here
they run in the reference form that torch's own tests use. Exit code 1: rank 0 reads before the parts of rank 1 are there.
"""

import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
OP = torch.ops._c10d_functional


def step(x, w, group):
    """wait_tensor completes its operand, and returns it."""
    part = OP.reduce_scatter_tensor(x @ w, "sum", RANKS, group)
    OP.wait_tensor(part)
    return part + 1


def prepared():
    dist.is_nccl_available = lambda: True  # as in any build for GPUs
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric_memory, f"_{name}"), "CPU")
    return library


def main(rank, folder):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    group = dist.group.WORLD.group_name
    inputs = torch.full((4, 2), rank + 1.0), torch.eye(2)
    expected = step(*inputs, group)
    library = prepared()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    with symmetric_memory._test_mode(), config.patch({"_micro_pipeline_tp": True, "fx_graph_cache": False}):
        compiled(*inputs, group)
        dist.barrier()
        if rank:
            time.sleep(2)  # rank 0 goes on before the product of rank 1 is there
        got = compiled(*inputs, group)
        first = got.flatten()[:4].tolist()
    print(f"rank {rank}: expected {expected.flatten()[:4].tolist()}, got {first}", flush=True)
    torch.save(torch.equal(expected, got), f"{folder}/{rank}")
    dist.barrier()
    del library
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
