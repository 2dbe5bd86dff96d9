"""A step on Gram matrices of a DTensor that torch.chunk leaves nothing of for the last rank. Exit code 1: the compiled step hangs."""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import ProcessException

RANKS, ROWS = 3, 4  # shards of 2, 2 and 0 rows
SETTING = "aten_distributed_optimizations.allow_comms_decompositions"


def step(update, mesh):
    x = update.full_tensor()
    for _ in range(2):
        x = x @ (x.t() @ x)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)]).to_local()


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    update = distribute_tensor(whole, mesh, [Shard(0)])
    expected = step(update, mesh)
    with config.patch({SETTING: True, "fallback_by_default": True, "fx_graph_cache": False, "compile_threads": 1}):
        compiled = torch.compile(lambda x: step(x, mesh), fullgraph=True, dynamic=False)
        got = compiled(update)
    dist.barrier()
    print(f"rank {rank}: expected {expected.shape}, got {got.shape}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if SETTING not in config.get_config_copy():
        print("this torch has no decomp_comms")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork", join=False)
        end, failed = time.time() + 35, "does not return within 35 s"
        try:
            while time.time() < end and not ranks.join(timeout=1):
                pass
            if all(process.exitcode == 0 for process in ranks.processes):
                sys.exit(0)
        except ProcessException as error:
            failed = str(error).strip().splitlines()[-1]
        for process in ranks.processes:
            process.kill()
        print(f"expected: the step returns on all ranks; got: it {failed}")
        sys.exit(1)
