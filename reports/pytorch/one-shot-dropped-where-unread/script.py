"""Only one rank reads a sum, such as a loss that it prints: where nobody reads it, a one-shot all_reduce is dropped.

Nothing runs: code for symmetric memory needs CUDA. What is lowered is looked at in the scheduler, behind fusion.
"""

import sys
import warnings
from unittest import mock

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

try:
    from torch.distributed._symmetric_memory import _test_mode
except ImportError:
    sys.exit(2)


class Seen(BaseException):
    """Ends the compilation."""


def step(x, reads):
    total = fc.all_reduce(x.relu(), "sum", dist.group.WORLD)
    total = torch.ops._c10d_functional.wait_tensor(total)  # not to be dropped, says torch.fx
    return total + x if reads else x * 2


def look(nodes):
    called = [getattr(leaf.node, "python_kernel_name", None) or "" for node in nodes for leaf in node.get_nodes()]
    raise Seen([name for name in called if "all_reduce" in name])


def lowered(reads, one_shot):
    settings = {"_collective.auto_select": one_shot, "_post_fusion_custom_pass": look, "fx_graph_cache": False}
    torch._dynamo.reset()
    with _test_mode(), mock.patch.object(dist, "is_nccl_available", return_value=True), config.patch(settings):
        try:
            torch.compile(step)(torch.ones(4), reads)
        except Seen as seen:
            return seen.args[0]
    sys.exit(2)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    plain = lowered(False, False)
    read, unread = lowered(True, True), lowered(False, True)
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: without one-shot kernels, the rank that does not read the sum calls {plain}")
    print(f"the rank that reads it calls {read}; expected as many calls on the one that does not, got {unread}")
    if not plain or not any("one_shot" in name for name in read):
        sys.exit(2)
    sys.exit(int(len(unread) != len(read)))
