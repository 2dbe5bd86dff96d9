"""A stream records an event behind a product, and then views it. What reads the view on another stream does not depend on the wait in front of it.

AOTAutograd ties events to nodes by control_deps, so that nothing that orders nodes by what they read moves them. It traces here as for
torch.compile. Operands have the device "meta"; streams are annotated and events are called as TorchDynamo does it for torch.Stream and torch.Event: none
of it needs a GPU. Exit code 1: a reader does not depend on its wait.
"""

import contextlib
import sys
import warnings

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch.fx import traceback

try:
    from torch._functorch._aot_autograd.streams import wrap_all_sync_nodes_with_control_deps  # noqa: F401
except ImportError:  # this version ties events to nothing
    sys.exit(2)

ops = torch.ops.streams


def step(x: torch.Tensor) -> torch.Tensor:
    with traceback.annotate({"stream": 1}):
        made = x * 2
        ops.record_event(10, 1)
        viewed = made.view(16)
    ops.wait_event(10, 0)
    return viewed.exp()


def traced(step, *inputs: torch.Tensor) -> fx.Graph:
    """The graph that compilers get."""
    graphs: list[fx.Graph] = []

    def compiler(gm: fx.GraphModule, _):
        graphs.append(gm.graph)
        return lambda *args: [torch.empty(())] * 9

    with traceback.preserve_node_meta(), torch.no_grad(), contextlib.suppress(Exception):  # it is traced, and need not run
        aot_function(step, fw_compiler=compiler)(*inputs)
    return graphs[0]


def called_in(node: fx.Node) -> fx.Node:
    """The node itself, or what it calls by control_deps."""
    if str(node.target) != "control_deps":
        return node
    called = getattr(node.graph.owning_module, node.args[1].target)
    return next(one for one in called.graph.nodes if one.op == "call_function")


def found(graph: fx.Graph, name: str, *args: int) -> list[fx.Node]:
    """The calls of an op, in order."""
    calls = [node for node in graph.nodes if str(called_in(node).target) == name]
    return [node for node in calls if not args or called_in(node).args == args]


def needed_by(node: fx.Node) -> set[fx.Node]:
    """All that has to come before a node, going by what is read."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        for one in todo.pop().all_input_nodes:
            if one not in seen:
                seen.add(one)
                todo.append(one)
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    graph = traced(step, torch.empty(4, 4, device="meta"))
    for node in graph.nodes:
        if node.op == "call_function":
            print(f"    {node} = {called_in(node).target}{node.args}")
    (reader,), (wait,) = found(graph, "aten.exp.default"), found(graph, "streams.wait_event.default", 10, 0)
    tied = wait in needed_by(reader)
    print(f"torch {torch.__version__}: expected {reader} to depend on {wait}, which waits for stream 1")
    print(f"torch {torch.__version__}: got      {'that' if tied else 'that it does not'}")
    sys.exit(int(not tied))
