"""An op that communicates by itself, and is registered as ordered, before an all_reduce. On rank 1 the second needs the first."""

import os
import sys
import tempfile

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.multiprocessing as mp
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op


@torch.library.custom_op("demo::total", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, by communication of which the compiler knows nothing."""
    result = x.clone()
    dist.all_reduce(result)
    return result


total.register_fake(torch.empty_like)
_register_effectful_op(torch.ops.demo.total.default, _EffectType.ORDERED)


def step(a: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.ops.demo.total(a)
    if rank == 1:
        b = b + first
    second = fc.all_reduce(b, "sum", dist.group.WORLD)
    return first, second


def main(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    a, b = torch.full((4,), 1.0), torch.full((4,), 100.0)
    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms"],
        "fx_graph_cache": False,
        "compile_threads": 1,
    }
    expected = [float(one[0]) for one in step(a, b, rank)]
    with config.patch(settings):
        got = [float(one[0]) for one in torch.compile(step, fullgraph=True)(a, b, rank)]
    print(f"torch {torch.__version__}, rank {rank}: expected {expected}, got {got}", flush=True)
    dist.barrier()
    os._exit(int(expected != got))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(main, args=(f"{folder}/store",), nprocs=2, start_method="spawn", join=False)
        for process in ranks.processes:
            process.join()
        sys.exit(max(process.exitcode for process in ranks.processes))
