"""A reduce_scatter and an all_reduce of one dtype, compiled with enable_overlap_scheduling and buckets. Exit code 1: the compiler raises."""

import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
SETTING = "aten_distributed_optimizations.enable_overlap_scheduling"
OP = torch.ops._c10d_functional


def step(x, y):
    group = dist.group.WORLD.group_name
    shard, total = OP.reduce_scatter_tensor(x, "sum", RANKS, group), OP.all_reduce(y, "sum", group)
    return OP.wait_tensor(shard), OP.wait_tensor(total)


def gather(found, mine, *_, **__):
    """What ranks estimate is the same here; torch's own all_gather_object needs NumPy."""
    found[:] = [mine] * len(found)


def main(rank, folder):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    dist.all_gather_object = gather
    x, y = torch.arange(4.0) + rank, torch.ones(2)
    expected = step(x, y)
    # Estimates ask for the speed of a GPU: here is none.
    told = {"collective_bucketing": True, "custom_runtime_estimation": lambda node, size: 1.0, "compute_estimator": "analytical"}
    told = {f"aten_distributed_optimizations.{name}": value for name, value in told.items()}
    told = {name: value for name, value in told.items() if name in config.get_config_copy()}
    try:
        with config.patch({SETTING: True, **told, "fx_graph_cache": False}):
            got = torch.compile(step, fullgraph=True, dynamic=False)(x, y)
        good = all(torch.allclose(a, b) for a, b in zip(expected, got))
        print(f"rank {rank}: expected equal results, got {good}", flush=True)
    except Exception as error:
        if "AssertionError" not in str(error) or "bucketing.py" not in traceback.format_exc():
            raise  # another error is not this defect
        good = False
        print(f"rank {rank}: expected compiled code, got {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.save(good, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if SETTING not in config.get_config_copy():
        print("this torch has no overlap scheduling")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
