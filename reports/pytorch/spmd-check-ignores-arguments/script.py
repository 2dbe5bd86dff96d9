"""Ranks compile steps whose collectives differ in group, reduction or operand, and spmd_check calls their graphs identical.

torch.compile with `spmd_check`, which raises on graphs that differ (`spmd_mismatch`). Exit code 1: it compiles them.
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
DIFFERENCES = ("reduction", "group", "operand", "dtype")
SETTINGS = {
    "aten_distributed_optimizations.spmd_check": True,
    "aten_distributed_optimizations.spmd_mismatch": "error",
    "reorder_for_compute_comm_overlap": True,  # graphs are compared where collectives are to be reordered
    "fx_graph_cache": False,
}


def step(difference, rank, groups):
    """Two all_reduces. Those of rank 1 differ: in their reductions, in their groups or in their operands."""
    ops = ("sum", "max") if difference == "reduction" and rank else ("sum", "sum")
    first, second = groups[::-1] if difference == "group" and rank else groups

    def call(x, y):
        if difference == "operand" and rank:
            x, y = y, x
        a, b = OP.all_reduce(x, ops[0], first), OP.all_reduce(y, ops[1], second)
        return OP.wait_tensor(a), OP.wait_tensor(b)

    return call


def gather(found, mine, group):
    """all_gather_object for a hash, and nothing for the report on a mismatch: torch's own needs NumPy."""
    if isinstance(mine, int):
        tensors = [torch.zeros(1, dtype=torch.int64) for _ in found]
        dist.all_gather(tensors, torch.tensor([mine]), group)
        found[:] = [int(one) for one in tensors]


def main(rank, folder):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    dist.all_gather_object = gather
    groups = [dist.new_group([0, 1]).group_name for _ in range(2)]
    refused = {}
    for difference in DIFFERENCES:
        dtype = torch.float64 if difference == "dtype" and rank else torch.float32  # which the check knows
        torch._dynamo.reset()
        try:
            with config.patch(SETTINGS):
                compiled = torch.compile(step(difference, rank, groups), fullgraph=True)
                compiled(torch.ones(2, dtype=dtype), torch.full((2,), 2.0, dtype=dtype))
            refused[difference] = False
        except Exception as error:
            if "SPMD graph verification failed" not in str(error):
                raise
            refused[difference] = True
        verdict = "an error" if refused[difference] else "compiled code"
        print(f"rank {rank}: steps differ in {difference}: expected an error, got {verdict}", flush=True)
    torch.save(refused, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if not SETTINGS.keys() <= config.get_config_copy().keys():
        print("this torch has no spmd_check")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        assert all(torch.load(f"{folder}/{rank}")["dtype"] for rank in range(RANKS)), "the check does not run"
        sys.exit(0 if all(all(torch.load(f"{folder}/{rank}").values()) for rank in range(RANKS)) else 1)
