"""A reduce_scatter by maximum, with low-contention collectives. Exit code 1: it becomes an op that cannot take one.

The op itself needs GPUs with symmetric memory. Its two forms are called here with memory of this process in the place of that.
"""

import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

try:
    from torch._inductor.fx_passes.low_contention_collectives import replace_collectives_with_low_contention
except ImportError:
    print("this torch has no low-contention collectives")
    sys.exit(2)

c10d = torch.ops._c10d_functional


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


def run(node, x):
    """What the op does on a GPU, in both of its forms."""
    stream = mock.MagicMock()
    with (
        mock.patch.object(symmetric_memory, "_get_backend_stream", lambda *_: stream),
        mock.patch.object(torch.accelerator, "current_stream", lambda *_: stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: stream),
        mock.patch.object(torch._C._distributed_c10d, "_register_work", lambda *_: None),
    ):
        for form, memory in (("symm_mem_input", Memory(x)), ("workspace", Memory(torch.empty_like(x)))):
            call = getattr(symmetric_memory, f"_low_contention_reduce_scatter_with_{form}")
            try:
                yield call(x, node.args[1], memory)
            except ValueError as error:
                yield f"ValueError: {error}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    x = torch.arange(4.0)
    expected = step(x)
    gm = make_fx(step)(x)
    settings = {"low_contention_min_bytes_per_rank": 0, "low_contention_skip_overlap_check": True}
    with (
        config.patch({f"aten_distributed_optimizations.{name}": value for name, value in settings.items()}),
        mock.patch.object(symmetric_memory, "is_symm_mem_enabled_for_group", lambda _: True),
    ):
        replace_collectives_with_low_contention(gm.graph)
    replaced = [node for node in gm.graph.nodes if "_low_contention_reduce_scatter" in str(node.target)]
    got = list(run(replaced[0], x)) if replaced else [step(x)]
    dist.destroy_process_group()
    print(f"torch {torch.__version__}\nexpected {expected}\ngot      {got}")
    sys.exit(int(not all(isinstance(one, torch.Tensor) and torch.equal(one, expected) for one in got)))
