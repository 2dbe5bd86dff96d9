"""FSDP2's graph of a layer that joins two parameters: what joins them goes on reading what has been freed."""

import sys

import torch
from torch import fx
from torch._inductor import comms

try:
    import torch.distributed.fsdp._fully_shard._fsdp_param  # defines torch.ops.fsdp.copy_
except ImportError:
    sys.exit(2)

RESIZE = torch.ops.inductor.resize_storage_bytes_.default


def graph() -> fx.GraphModule:
    """As AOTAutograd leaves it: the parameters in full are inputs that are allocated, copied into, used and freed."""
    built = fx.Graph()
    query, key, first, second, x = (built.placeholder(name) for name in ("query", "key", "first", "second", "x"))
    for full, gathered in ((query, first), (key, second)):
        built.call_function(RESIZE, (full, 4 * 4))
        built.call_function(torch.ops.fsdp.copy_.default, (full, gathered))
    both = built.call_function(torch.ops.aten.cat.default, ([query, key],))
    made = built.call_function(torch.ops.aten.mm.default, (both, x))
    for full in (query, key):
        built.call_function(RESIZE, (full, 0))
    built.output((made,))
    module = fx.GraphModule(torch.nn.Module(), built)
    with torch._subclasses.FakeTensorMode():
        for node in built.nodes:
            if node.op == "placeholder":
                node.meta["val"] = torch.empty(2, 2)
    return module


def run(module: fx.GraphModule) -> list[list[float]]:
    # FSDP2 hands them over freed, and reading them ends the process. Here they have memory, so that it shows.
    stale = [torch.full((2, 2), -1.0) for _ in range(2)]
    (made,) = module(*stale, torch.ones(2, 2), torch.full((2, 2), 2.0), torch.eye(2))
    return made.tolist()


if __name__ == "__main__":
    if not hasattr(comms, "remove_fsdp2_unsharded_param_graph_input_usage"):
        sys.exit(2)
    module = graph()
    expected = run(module)
    comms.remove_fsdp2_unsharded_param_graph_input_usage(module.graph)
    module.recompile()
    got = run(module)
    print(f"torch {torch.__version__}: expected {expected}, got {got}", flush=True)
    sys.exit(int(expected != got))
