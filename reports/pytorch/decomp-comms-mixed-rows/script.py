"""A step with another product over the rows, compiled with allow_comms_decompositions. Exit code 1: the compiled step is wrong."""

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


def step(shard, rank):
    x = WAIT(GATHER(shard, RANKS, "0"))
    for _ in range(2):
        x = x @ (x.t() @ x)
    x = x @ (torch.tanh(x).t() @ x)  # adds up over the rows, and is no Gram matrix
    return x.split(shard.shape[0])[rank]


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    shard = 0.3 * torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    expected = step(shard, rank)
    with config.patch({SETTING: True, "fallback_by_default": True, "fx_graph_cache": False, "compile_threads": 1}):
        got = torch.compile(step, fullgraph=True, dynamic=False)(shard, rank)
    print(f"rank {rank}: expected {expected[0].tolist()}, got {got[0].tolist()}", flush=True)
    torch.save(bool(torch.allclose(got, expected, rtol=1e-3)), f"{folder}/{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if SETTING not in config.get_config_copy():
        print("this torch has no decomp_comms")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
