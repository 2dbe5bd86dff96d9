import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

c10d = torch.ops._c10d_functional


def inductor_passes(gm, inputs):
    """Inductor's passes on the graph of AOTAutograd, and no code generation."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(gm, is_inference=True)
    gm.recompile()
    return make_boxed_func(gm.forward)


def model(g, h, y):
    group = dist.group.WORLD.group_name
    x = c10d.wait_tensor(c10d.reduce_scatter_tensor(g, "sum", 2, group)) * 2
    a = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))
    b = c10d.wait_tensor(c10d.all_gather_into_tensor(y, 2, group))
    r = c10d.wait_tensor(c10d.reduce_scatter_tensor(h, "sum", 2, group))
    return a, b, r


def inputs(rank):
    return torch.arange(4.0) + rank, torch.arange(6.0) + rank, torch.ones(3) * (rank + 1)


def worker(rank, store, failed):
    torch.use_deterministic_algorithms(True)  # fills memory that nobody has written with NaN
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    expected = model(*inputs(rank))
    got = torch.compile(model, backend=aot_autograd(fw_compiler=inductor_passes), fullgraph=True)(*inputs(rank))
    if rank == 0:
        print(f"torch {torch.__version__}\nexpected {expected}\ngot      {got}")
        if any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(expected, got)):
            failed.value = 1
    dist.destroy_process_group()


if __name__ == "__main__":
    config.bucket_all_gathers_fx = config.bucket_reduce_scatters_fx = "all"
    failed = mp.get_context("fork").Value("i", 0)
    store = os.path.join(tempfile.mkdtemp(), "store")
    mp.start_processes(worker, args=(store, failed), nprocs=2, start_method="fork")
    sys.exit(failed.value)
