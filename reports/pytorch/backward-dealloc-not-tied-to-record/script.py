"""Memory of a gradient that another stream reads is freed behind an event. Nothing ties the freeing to the event.

Events are tied to nodes by control_deps, "to prevent reordering": partitioners and Inductor order nodes by what they read alone. `sync_dealloc`,
which waits for an event and then lets memory be freed, reads the value alone; in front of the record it waits for nothing. AOTAutograd
traces forward and backward here as it does for torch.compile. Operands have the device "meta", events are numbers, and streams have been
annotated as TorchDynamo annotates `with torch.cuda.stream(s)`: none of it needs a GPU. Exit code 1: the freeing does not depend on the event.
"""

import contextlib
import copy
import itertools
import sys
import warnings
from unittest import mock

import torch
from torch import fx
from torch._functorch._aot_autograd import graph_capture
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import default_partition
from torch.fx import traceback

try:
    from torch._functorch._aot_autograd.streams import insert_backward_syncs
except ImportError:  # this version puts no events into the backward
    sys.exit(2)


def step(x: torch.Tensor) -> torch.Tensor:
    with traceback.annotate({"stream": 1}):
        twice = x * 2
    with traceback.annotate({"stream": 0}):
        return twice.exp()


def joint_graph(step, *inputs: torch.Tensor) -> fx.Graph:
    """The graph of forward and backward, as partitioners get it."""
    graphs: list[fx.Graph] = []

    def partition(joint: fx.GraphModule, *args, **kwargs):
        graphs.append(copy.deepcopy(joint).graph)
        return default_partition(joint, *args, **kwargs)

    numbers = itertools.count()
    stand_in = {
        "new_event": lambda: next(numbers),
        "get_roofline_estimate": lambda _: 1.0,  # asks for the bandwidth of a GPU
    }
    with contextlib.ExitStack() as stack:
        for module, name in itertools.product((graph_capture, sys.modules[insert_backward_syncs.__module__]), stand_in):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, stand_in[name]))
        # Without an accelerator, tensors would be recorded on streams.
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(traceback.preserve_node_meta())
        aot_function(step, fw_compiler=nop, partition_fn=partition)(*inputs)
    return graphs[0]


def called_in(node: fx.Node) -> str:
    """What a node calls, or what it calls by control_deps."""
    if str(node.target) != "control_deps":
        return str(node.target)
    called = getattr(node.graph.owning_module, node.args[1].target)
    return next(str(one.target) for one in called.graph.nodes if one.op == "call_function")


def event_of(node: fx.Node) -> int:
    called = getattr(node.graph.owning_module, node.args[1].target)
    return next(one.args[0] for one in called.graph.nodes if one.op == "call_function")


def needed_by(node: fx.Node) -> set[fx.Node]:
    """All that has to come before a node, going by what is read."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for one in todo.pop().all_input_nodes:
            if one not in found:
                found.add(one)
                todo.append(one)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    graph = joint_graph(step, torch.empty(4, 4, device="meta", requires_grad=True))
    for node in graph.nodes:
        if node.op == "call_function":
            print(f"    {node} = {called_in(node)}{node.args}")
    freed = next(node for node in graph.nodes if called_in(node) == "streams.sync_dealloc.default")
    record = next(node for node in graph.nodes if called_in(node) == "streams.record_event.default" and event_of(node) == freed.args[0])
    tied = record in needed_by(freed)
    print(f"torch {torch.__version__}: expected {freed} to depend on {record}, which records event {freed.args[0]}")
    print(f"torch {torch.__version__}: got      {'that' if tied else 'that it does not'}")
    sys.exit(int(not tied))
