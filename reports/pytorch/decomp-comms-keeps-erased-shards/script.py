"""Rows are orthogonalised twice, each time gathered anew, compiled with allow_comms_decompositions. Exit code 1: the compiler raises."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
SETTING = "aten_distributed_optimizations.allow_comms_decompositions"
GATHER = torch.ops._c10d_functional.all_gather_into_tensor
WAIT = torch.ops._c10d_functional.wait_tensor


def orthogonalise(shard, rank):
    """Two steps of Newton-Schulz, X (X'X), of which each rank keeps its rows."""
    x = WAIT(GATHER(shard, RANKS, "0"))
    for _ in range(2):
        x = x @ (x.t() @ x)
    return x.split(shard.shape[0])[rank]


def step(shard, rank):
    return orthogonalise(orthogonalise(shard, rank), rank)


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    shard = 0.3 * torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    expected, good = step(shard, rank), False
    try:
        with config.patch({SETTING: True, "fallback_by_default": True, "fx_graph_cache": False, "compile_threads": 1}):
            made = torch.compile(step, fullgraph=True, dynamic=False)(shard, rank)
        good, got = bool(torch.allclose(made, expected, rtol=1e-3)), made[0].tolist()
    except Exception as error:
        if "used before it has been defined" not in str(error):
            raise
        got = " ".join(str(error).split())[:140]
    print(f"rank {rank}: expected {expected[0].tolist()}, got {got}", flush=True)
    torch.save(good, f"{folder}/{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if SETTING not in config.get_config_copy():
        print("this torch has no decomp_comms")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
