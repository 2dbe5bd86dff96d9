"""torch._inductor.standalone_compile of a graph with `dist.all_reduce`: what is written into the tensor later does not reach it.

make_fx traces a step that averages a gradient in place: all_reduce, then a division. Of the compiled step, the caller's tensor holds
the sum. Exit code 1: it differs from what the step leaves there.
"""

import contextlib
import logging
import os
import socket
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.fx.experimental.proxy_tensor import make_fx

WORLD_SIZE = 2


def average(gradient: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(gradient)
    gradient.div_(WORLD_SIZE)
    return gradient.sum()


def run(rank: int, port: int, wrong) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # that the compiled code cannot be cached
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    given = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    traced = make_fx(average)(given.clone())
    expected, got = given.clone(), given.clone()
    average(expected)
    torch._inductor.standalone_compile(traced, [got.clone()], dynamic_shapes="from_example_inputs")(got)
    if rank == 0:
        print(f"torch {torch.__version__}: expected the gradient to be {expected.tolist()}")
        print(f"torch {torch.__version__}: got                         {got.tolist()}")
    dist.barrier()
    dist.destroy_process_group()
    wrong[rank] = not torch.allclose(expected, got)


if __name__ == "__main__":
    try:
        import torch._inductor._functionalize_collectives  # noqa: F401
    except ImportError:  # this version compiles no such graphs
        sys.exit(2)
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wrong = mp.get_context("spawn").Array("b", WORLD_SIZE)
    mp.spawn(run, (port, wrong), nprocs=WORLD_SIZE)
    sys.exit(int(any(wrong)))
