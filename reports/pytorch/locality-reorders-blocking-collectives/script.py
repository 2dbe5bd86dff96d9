"""Two tensors are resharded from rows to columns. Both ranks do the first one first; rank 1 returns what came of it last.

torch.compile with its defaults, on gloo. Exit code 1: in the compiled step rank 1 issues the two collectives the other way round, and
each rank gets columns of the other tensor.
"""

import os
import queue
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor  # defines the op
import torch.multiprocessing as mp

RANKS, SECONDS = 2, 40


def step(x, y, group, rank):
    first, second = (torch.ops._dtensor.shard_dim_alltoall(one, 0, 1, group) * 2 for one in (x, y))
    return (first, second) if rank == 0 else (second, first)


def main(rank, folder, results):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    x, y, group = torch.full((1, 2), rank + 1.0), torch.full((1, 2), rank + 10.0), dist.group.WORLD.group_name
    expected = [one.tolist() for one in step(x, y, group, rank)]
    results.put((rank, "expected", expected))
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    try:
        results.put((rank, "got", [one.tolist() for one in compiled(x, y, group, rank)]))
    except RuntimeError as error:
        results.put((rank, "got", str(error).splitlines()[0]))
    results.close()
    results.join_thread()
    os._exit(0)


if __name__ == "__main__":
    results = mp.get_context("fork").Queue()
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(main, args=(folder, results), nprocs=RANKS, start_method="fork", join=False)
        try:
            while len(seen) < 2 * RANKS:
                rank, what, value = results.get(timeout=SECONDS)
                seen[rank, what] = value
        except queue.Empty:
            pass
        for process in ranks.processes:
            process.kill()
    print(f"torch {torch.__version__}")
    for rank in range(RANKS):
        got = seen.get((rank, "got"), f"nothing within {SECONDS} s")
        print(f"rank {rank}: expected {seen[rank, 'expected']}, got {got}")
    sys.exit(int(any(seen.get((rank, "got")) != seen[rank, "expected"] for rank in range(RANKS))))
