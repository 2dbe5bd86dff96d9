"""A product reads two rows of a tensor that is summed over ranks afterwards. Where the all_reduce is one-shot, it reads the sum.

Nothing runs: code for symmetric memory needs CUDA. What each kernel reads is looked at in the scheduler, behind fusion.
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


SEEN = []


def step(x, w):
    y = x @ w
    product = y[:2] @ w
    first = fc.wait_tensor(fc.all_reduce(product, "sum", dist.group.WORLD))
    return first, fc.wait_tensor(fc.all_reduce(y, "sum", dist.group.WORLD))


def look(nodes):
    """Note for each kernel the kernels whose results it reads, and end the compilation."""
    leaves = [leaf for node in nodes for leaf in node.get_nodes()]
    called = {leaf: str(getattr(leaf.node, "python_kernel_name", None)) for leaf in leaves}
    makes = {name: called[leaf] for leaf in leaves for name in leaf.get_buffer_names()}
    SEEN[:] = [(called[leaf], [makes.get(dep.name, "input") for dep in leaf.read_writes.reads]) for leaf in leaves]
    raise RuntimeError("seen")


def products(one_shot):
    """What the products read."""
    settings = {"_collective.auto_select": one_shot, "_post_fusion_custom_pass": look, "fx_graph_cache": False}
    torch._dynamo.reset()
    SEEN.clear()
    with _test_mode(), mock.patch.object(dist, "is_nccl_available", return_value=True), config.patch(settings):
        try:
            torch.compile(step)(torch.ones(4, 4), torch.ones(4, 4))
        except Exception:
            if not SEEN:
                raise
    if not SEEN or (one_shot and not any("one_shot" in name for name, _ in SEEN)):
        print("this torch does not lower to one-shot kernels")
        sys.exit(2)
    return [read for name, read in SEEN if name.endswith(".mm")]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    plain, one_shot = products(False), products(True)
    dist.destroy_process_group()
    print(
        f"torch {torch.__version__}: expected the products to read {plain}, as without one-shot kernels, got {one_shot}"
    )
    if any("all_reduce" in name for read in plain for name in read) or len(plain) != len(one_shot):
        sys.exit(2)
    sys.exit(int(any("all_reduce" in name for read in one_shot for name in read)))
