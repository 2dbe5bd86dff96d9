"""An activation is saved for the backward and gathered meanwhile. It is offloaded and freed while the collective may still read it.

The forward starts an all_gather, multiplies meanwhile, and then waits. `enable_activation_offloading` with
`activation_offload_separate_stream` copies the operand to the host behind its last user, and frees it behind the copy: in front of
the wait. AOTAutograd traces and divides the function here as it does for torch.compile; nothing is run. Exit code 1: the operand is
freed in front of the wait.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import fx
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import default_partition
from torch.testing._internal.distributed.fake_pg import FakeStore

OPS = torch.ops._c10d_functional


def step(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x @ v
    start = OPS.all_gather_into_tensor(hidden.detach(), 2, "0")
    meanwhile = hidden @ w
    return OPS.wait_tensor(start), meanwhile


def mark(joint: fx.GraphModule, *args: object) -> fx.GraphModule:
    for node in joint.graph.nodes:
        if node.name == "mm":  # hidden
            node.meta["should_offload"] = True
    return joint


def forward_graph() -> fx.Graph:
    graphs: list[fx.Graph] = []

    def partition(joint: fx.GraphModule, *args, **kwargs):
        forward, backward = default_partition(mark(joint), *args, **kwargs)
        graphs.append(forward.graph)
        return forward, backward

    x, *others = (torch.empty(2, 2, device="meta", requires_grad=number > 0) for number in range(3))
    with config.patch(enable_activation_offloading=True, activation_offload_separate_stream=True):
        aot_function(step, fw_compiler=nop, partition_fn=partition)(x, *others)
    return graphs[0]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        from torch._functorch._activation_offloading.offload_ops import pinned_memory_pool  # noqa: F401
    except ImportError:  # this version frees nothing
        sys.exit(2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    nodes = [node for node in forward_graph().nodes if node.op == "call_function"]
    for node in nodes:
        print(f"    {node} = {node.target}{node.args}")
    freed = next(place for place, node in enumerate(nodes) if node.target == torch.ops.ao.wait_tensor.default and len(node.args) > 1)
    waited = next(place for place, node in enumerate(nodes) if node.target == OPS.wait_tensor.default)
    print(f"torch {torch.__version__}: expected the operand of the all_gather to be freed behind the wait for it")
    print(f"torch {torch.__version__}: got      {'that' if freed > waited else f'it freed by {nodes[freed]}, in front of {nodes[waited]}'}")
    dist.destroy_process_group()
    sys.exit(int(freed < waited))
