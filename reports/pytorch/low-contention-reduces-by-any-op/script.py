"""A reduce_scatter by maximum, compiled with low-contention collectives. Exit code 1: it becomes an op that cannot take one.

The op needs GPUs with symmetric memory. Here it runs on CPU, by its own code: streams do nothing, and memory is that of this process.
"""

import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor import config

c10d = torch.ops._c10d_functional
SETTINGS = {
    "aten_distributed_optimizations.enable_low_contention_collectives": True,
    "aten_distributed_optimizations.low_contention_min_bytes_per_rank": 0,  # this tensor is small,
    "aten_distributed_optimizations.low_contention_skip_overlap_check": True,  # and there is no compute to overlap with
    "fx_graph_cache": False,
}


class Memory:
    """Symmetric memory of one rank."""

    rank, world_size = 0, 1

    def __init__(self, tensor):
        self.tensor = tensor

    def barrier(self):
        pass

    def get_buffer(self, rank, sizes, dtype, offset=0):
        return self.tensor.flatten()[offset:].view(dtype)[: torch.Size(sizes).numel()].view(sizes)


def step(x):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "max", 1, dist.group.WORLD.group_name))


def compiled(x, form):
    """The compiled step, where the op finds its operand in symmetric memory, or where it does not and takes a workspace."""
    stream = mock.MagicMock()
    found = Memory(x) if form == "operand" else None
    torch._dynamo.reset()
    with (
        config.patch(SETTINGS),
        symmetric_memory._test_mode(),
        mock.patch.object(symmetric_memory, "rendezvous", lambda *_: found),
        mock.patch.object(symmetric_memory, "get_symm_mem_workspace", lambda *_: Memory(torch.empty_like(x))),
        mock.patch.object(symmetric_memory, "_get_backend_stream", lambda *_: stream),
        mock.patch.object(torch.accelerator, "current_stream", lambda *_: stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: stream),
        mock.patch.object(symmetric_memory, "Work"),
        mock.patch.object(torch._C._distributed_c10d, "_register_work", lambda *_: None),
    ):
        return torch.compile(step, fullgraph=True)(x)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not SETTINGS.keys() <= config.get_config_copy().keys():
        print("this torch has no low-contention collectives")
        sys.exit(2)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("_low_contention_reduce_scatter", symmetric_memory._low_contention_reduce_scatter, "CPU")
    x = torch.arange(4.0)
    expected = step(x)
    good = True
    for form in ("operand", "workspace"):
        try:
            got = compiled(x, form)
            good = good and torch.equal(got, expected)
        except ValueError as error:
            got, good = f"ValueError: {error}", False
        print(f"torch {torch.__version__}, {form} in symmetric memory: expected {expected}, got {got}")
    dist.destroy_process_group()
    sys.exit(int(not good))
