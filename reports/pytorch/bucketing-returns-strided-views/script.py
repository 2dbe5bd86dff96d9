"""A gathered value that is viewed as one row, behind bucketing. Exit code 1: the view fails.

Run on the graph of make_fx, as the pass leaves it. Code that Inductor generates copies where a view does not fit.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor.fx_passes.bucketing import bucket_all_gather
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.proxy_tensor import make_fx

c10d = torch.ops._c10d_functional


def step(x, y):
    group = dist.group.WORLD.group_name
    first = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))
    second = c10d.wait_tensor(c10d.all_gather_into_tensor(y, 2, group))
    return first.view(-1), second


def worker(rank, store, failed):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    arguments = torch.arange(2.0).view(1, 2) + rank, torch.ones(2) * rank
    expected = step(*arguments)
    gm = make_fx(step, tracing_mode="fake")(*arguments)
    bucket_all_gather(gm, lambda _: 2000.0, mode="default")
    stable_topological_sort(gm.graph)  # as post_grad_passes does behind it
    gm.recompile()
    try:
        got = gm(*arguments)
    except RuntimeError as error:
        got = f"RuntimeError: {str(error).splitlines()[0]}"
    if rank == 0:
        print(f"torch {torch.__version__}\nexpected {expected}\ngot      {got}")
        failed.value = int(isinstance(got, str) or not all(map(torch.equal, expected, got)))
    dist.destroy_process_group()


if __name__ == "__main__":
    failed = mp.get_context("fork").Value("i", 0)
    store = os.path.join(tempfile.mkdtemp(), "store")
    mp.start_processes(worker, args=(store, failed), nprocs=2, start_method="fork")
    sys.exit(failed.value)
