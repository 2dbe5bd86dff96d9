"""A reduce_scatter and an all_reduce of one dtype in overlap scheduling with buckets. Exit code 1: the pass raises."""

import os
import sys
import tempfile
from inspect import signature

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
OP = torch.ops._c10d_functional


def step(x, y):
    group = dist.group.WORLD.group_name
    shard, total = OP.reduce_scatter_tensor(x, "sum", RANKS, group), OP.all_reduce(y, "sum", group)
    return OP.wait_tensor(shard), OP.wait_tensor(total)


def gather(found, mine, *_, **__):
    """What ranks estimate is the same here; torch's own all_gather_object needs NumPy."""
    found[:] = [mine] * len(found)


def main(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
    from torch.fx.experimental.proxy_tensor import make_fx

    dist.all_gather_object = gather
    x, y = torch.arange(4.0) + rank, torch.ones(2)
    expected = step(x, y)
    module = make_fx(step, tracing_mode="fake")(x, y)
    try:
        told = {"custom_runtime_estimation": lambda node, size: 1.0, "compute_estimator": "analytical"}
        told = {name: value for name, value in told.items() if name in signature(schedule_overlap_bucketing).parameters}
        schedule_overlap_bucketing(module, collective_bucketing=True, **told)
        module.recompile()
        got = module(x, y)
        good = all(torch.allclose(a, b) for a, b in zip(expected, got))
        print(f"rank {rank}: expected equal results, got {good}", flush=True)
    except Exception as error:
        good = False
        print(f"rank {rank}: expected a schedule, got {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.save(good, f"{folder}/{rank}")
    os._exit(0)


if __name__ == "__main__":
    try:
        import torch._inductor.fx_passes.overlap_scheduling
    except ImportError:
        print("this torch has no overlap scheduling")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
