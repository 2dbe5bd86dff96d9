"""torch.compile of a module in DistributedDataParallel reads a buffer behind a later write to it.

DDPOptimizer, which is on by default, splits the graph by the buckets of gradients. The tower that updates a buffer is run before the
tower in front of it, which reads the buffer. Any backend shows it; "eager" compiles nothing. Exit code 1: the results differ from eager's.
"""

import contextlib
import copy
import logging
import os
import socket
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 600  # a weight of 1.4 MB, which fills a bucket of 1 MB


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)
        self.register_buffer("scale", torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = self.first(x) * self.scale
        self.scale.mul_(2)
        return left, self.second(x) * self.scale


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # that DDP's markers for profilers are left out
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.manual_seed(0)
    eager = Towers()
    compiled = torch.compile(DistributedDataParallel(copy.deepcopy(eager), bucket_cap_mb=1), backend="eager")
    x = torch.randn(2, SIZE)
    names = ("first tower, before the write", "second tower, after the write")
    wrong = False
    for name, expected, got in zip(names, eager(x), compiled(x)):
        wrong = wrong or not torch.allclose(expected, got)
        print(f"torch {torch.__version__}: {name}")
        print(f"    expected {expected[0, :3].tolist()}")
        print(f"    got      {got[0, :3].tolist()}")
    dist.destroy_process_group()
    sys.exit(int(wrong))
