"""torch.compile: of two waits for one collective, Inductor may keep the later one, and fails.

Two ranks. A value that is waited for twice, and read behind the second wait; the result of the first is returned. Exit code 1: the
function does not compile.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp

RANKS = 2


def function(x):
    started = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
    first, second = funcol.wait_tensor(started), funcol.wait_tensor(started)
    return second * 2, first


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    x = torch.arange(2.0) + rank
    expected = [one.tolist() for one in function(x)]
    try:
        got = [one.tolist() for one in torch.compile(function)(x)]
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "Argument" in line]
        got = f"{type(error).__name__}: {lines[0] if lines else error}"
    if rank == 0:
        found.put((expected, got))
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        expected, got = found.get(timeout=100)
        for one in ranks:
            one.join(10)
    print(f"torch {torch.__version__}: expected {expected}")
    print(f"torch {torch.__version__}: got      {got}")
    sys.exit(int(got != expected))
