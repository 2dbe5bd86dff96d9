"""A parameter is scaled, and its square counted, before the parameters of two modules are gathered. Prefetching loses the order."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

try:
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
except ImportError:
    sys.exit(2)


def gathered(shard: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(shard, 1, group))


def step(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = second.sin()
    penalty = scaled.square().sum()  # of the own shard
    x = x * gathered(first)
    x = x * gathered(scaled)
    return x, penalty


def compiler(gm: torch.fx.GraphModule, _: object) -> object:
    """A backend that overlaps the gather of the second module with the compute of the first, and runs the graph."""
    gathers = [node for node in gm.graph.nodes if "all_gather_into_tensor" in str(node.target)]
    border = list(gm.graph.nodes).index(gathers[1])
    module_of = {node: "first" if place < border else "second" for place, node in enumerate(gm.graph.nodes)}
    manual_overlap_bucketing(
        gm,
        ["first", "second"],
        insert_overlap_deps=False,
        module_stack_fn=lambda node: [(module_of[node], torch.nn.Module)] if node in module_of else [],
    )
    gm.recompile()
    return make_boxed_func(gm.forward)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        given = [torch.ones(2, 2) for _ in range(3)]
        expected = step(*given)
        try:
            got = torch.compile(step, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*given)
        except Exception as error:  # TorchDynamo wraps what a backend raises
            if "before it has been defined" not in str(error):
                raise
            got = " ".join(str(error).split())[:120]
        said = "the same" if not isinstance(got, str) else got
        print(f"torch {torch.__version__}: expected {expected[0].tolist()}, got {said}")
        dist.destroy_process_group()
    sys.exit(int(isinstance(got, str)))
