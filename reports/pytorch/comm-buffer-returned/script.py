"""What goes into a one-shot all_reduce is also returned: the graph returns memory that its next call writes into.

Nothing runs: code for symmetric memory needs CUDA. What is lowered is looked at in the scheduler, where lowering has ended.
"""

import sys
import warnings
from unittest import mock

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor import ir
from torch._inductor.virtualized import V

try:
    from torch.distributed._symmetric_memory import _test_mode
except ImportError:
    sys.exit(2)


class Seen(BaseException):
    """Ends the compilation."""


def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = x.relu()
    return value, fc.all_reduce(value, "sum", dist.group.WORLD)


def look(nodes):
    returned = V.graph.get_output_names()
    leaves = [leaf for node in nodes for leaf in node.get_nodes()]
    mapped = [leaf for leaf in leaves if isinstance(getattr(leaf.node, "layout", None), ir.CommBufferLayout)]
    raise Seen([leaf.node.get_name() for leaf in mapped], [leaf.node.get_name() for leaf in mapped if leaf.node.get_name() in returned])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    settings = {"_collective.auto_select": True, "_pre_fusion_custom_pass": look, "fx_graph_cache": False}
    mapped, leaked = [], []
    with _test_mode(), mock.patch.object(dist, "is_nccl_available", return_value=True), config.patch(settings):
        try:
            torch.compile(step)(torch.ones(4))
        except Seen as seen:
            mapped, leaked = seen.args
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: comm buffers {mapped}; expected none of them to be returned, got {leaked}")
    sys.exit(int(bool(leaked)) if mapped else 2)
