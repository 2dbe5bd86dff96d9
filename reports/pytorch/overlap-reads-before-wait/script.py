"""A product reads what an all_gather returned, behind the wait for it. Compiled with overlap scheduling, it comes before the wait."""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
SETTING = "aten_distributed_optimizations.enable_overlap_scheduling"
OP = torch.ops._c10d_functional


def step(shard, w, group):
    """wait_tensor completes its operand, and returns it."""
    whole = OP.all_gather_into_tensor(shard, RANKS, group)
    OP.wait_tensor(whole)
    return whole @ w


def gather(found, mine, *_, **__):
    """What ranks estimate is the same here; torch's own all_gather_object needs NumPy."""
    found[:] = [mine] * len(found)


def milliseconds(node, size=None):
    return 1.0


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    dist.all_gather_object = gather
    group = dist.group.WORLD.group_name
    shard, w = torch.full((4, 8), rank + 1.0), torch.eye(8)
    expected = step(2 * shard, w, group)
    from torch.utils import _runtime_estimation  # 2.9 has none

    # Speeds of a GPU, which estimates ask for: here is none.
    for name in ("get_device_tflops", "get_gpu_dram_gbps", "get_device_dram_gbps"):
        setattr(_runtime_estimation, name, lambda *_, **__: 1000.0)
    told = {"custom_runtime_estimation": milliseconds, "compute_estimator": "analytical"}
    told = {f"aten_distributed_optimizations.{name}": value for name, value in told.items()}
    told = {name: value for name, value in told.items() if name in config.get_config_copy()}
    options = {SETTING: True, **told, "fallback_by_default": True, "fx_graph_cache": False, "compile_threads": 1}
    with config.patch(options):
        compiled = torch.compile(step, fullgraph=True, dynamic=False)
        compiled(shard, w, group)
    dist.barrier()
    if rank:
        time.sleep(2)  # rank 0 has its product before the shard of rank 1 is there
    got = compiled(2 * shard, w, group)
    good = torch.allclose(expected, got)
    wrong = int((expected != got).sum())
    print(f"rank {rank}: expected equal results, got {wrong} of {got.numel()} elements that differ", flush=True)
    torch.save(good, f"{folder}/{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if SETTING not in config.get_config_copy():
        print("this torch has no overlap scheduling")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(int(not all(torch.load(f"{folder}/{rank}") for rank in range(RANKS))))
