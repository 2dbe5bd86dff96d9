"""Reductions on two groups, compiled with enable_overlap_scheduling. Exit code 1: the compiler raises RecursionError."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config

RANKS = 2
SETTING = "aten_distributed_optimizations.enable_overlap_scheduling"
OP = torch.ops._c10d_functional


def step(x, y, first, second):
    """The second reduce_scatter, on another group, reads what the all_reduce made."""
    reduced = OP.wait_tensor(OP.all_reduce(x + 1, "sum", first))
    scattered = OP.wait_tensor(OP.reduce_scatter_tensor(y, "sum", RANKS, first))
    return scattered, OP.wait_tensor(OP.reduce_scatter_tensor(reduced, "sum", RANKS, second))


def gather(found, mine, *_, **__):
    """What ranks estimate is the same here; torch's own all_gather_object needs NumPy."""
    found[:] = [mine] * len(found)


def milliseconds(node, size=None):
    """Estimated times: of the three collectives, the first takes the shortest."""
    return {"all_reduce": 2.0, "reduce_scatter_tensor": 10.0, "reduce_scatter_tensor_1": 7.0}.get(node.name, 1.0)


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    dist.all_gather_object = gather
    groups = [dist.new_group(list(range(RANKS))).group_name for _ in range(2)]
    x, y = torch.full((2, 2), rank + 1.0), torch.ones(2)
    expected = step(x, y, *groups)
    from torch.utils import _runtime_estimation  # 2.9 has none

    # Speeds of a GPU, which estimates ask for: here is none.
    for name in ("get_device_tflops", "get_gpu_dram_gbps", "get_device_dram_gbps"):
        setattr(_runtime_estimation, name, lambda *_, **__: 1000.0)
    told = {"custom_runtime_estimation": milliseconds, "compute_estimator": "analytical"}
    told = {f"aten_distributed_optimizations.{name}": value for name, value in told.items()}
    told = {name: value for name, value in told.items() if name in config.get_config_copy()}
    options = {SETTING: True, **told, "fallback_by_default": True, "fx_graph_cache": False, "compile_threads": 1}
    try:
        with config.patch(options):
            got = torch.compile(step, fullgraph=True, dynamic=False)(x, y, *groups)
        good = all(torch.allclose(a, b) for a, b in zip(expected, got))
        print(f"rank {rank}: expected equal results, got {good}", flush=True)
    except Exception as error:
        good = False if "RecursionError" in str(error) else None
        print(f"rank {rank}: expected compiled code, got {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.save(good, f"{folder}/{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if SETTING not in config.get_config_copy():
        print("this torch has no overlap scheduling")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        found = [torch.load(f"{folder}/{rank}") for rank in range(RANKS)]
    if None in found:
        print("this torch fails by something else")
        sys.exit(3)
    sys.exit(0 if all(found) else 1)
