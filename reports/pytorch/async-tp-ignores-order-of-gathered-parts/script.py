"""Parts of a sequence are gathered, each rank's own part first; the fused op gathers them by rank.

torch.compile with `_micro_pipeline_tp`, the setting of asynchronous tensor parallelism. Fused ops need GPUs with symmetric memory; here
they run in the reference form that torch's own tests use. Exit code 1: the compiled step gives other values.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
OP = torch.ops._c10d_functional


def step(x, w, rank):
    """Gather [batch, part, width] along the sequence, beginning with the part of this rank."""
    gathered = OP.wait_tensor(OP.all_gather_into_tensor(x, RANKS, dist.group.WORLD.group_name))
    parts = gathered.split(x.shape[0])
    ordered = torch.cat([parts[(rank + place) % RANKS] for place in range(RANKS)], 1)
    return ordered @ w


def compiled(*inputs):
    dist.is_nccl_available = lambda: True  # as in any build for GPUs
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric_memory, f"_{name}"), "CPU")
    with symmetric_memory._test_mode(), config.patch({"_micro_pipeline_tp": True, "fx_graph_cache": False}):
        return torch.compile(step, fullgraph=True)(*inputs)


def main(rank, folder):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    x, w = torch.full((2, 1, 3), rank + 1.0), torch.ones(3, 4)
    expected = step(x, w, rank)
    got = compiled(x, w, rank)
    good = got.shape == expected.shape and torch.allclose(got, expected)
    shown = [(list(one.shape), one[0].select(-1, 0).tolist()) for one in (expected, got)]
    print(f"rank {rank}: expected {shown[0]}, got {shown[1]}", flush=True)
    torch.save(good, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
