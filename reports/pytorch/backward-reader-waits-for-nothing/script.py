"""A gradient is read on two streams in the backward of compiled code. Only the first reader waits for the stream that computes it.

AOTAutograd traces forward and backward here as it does for torch.compile. Operands have the device "meta", events are numbers, and streams
have been annotated as TorchDynamo annotates `with torch.cuda.stream(s)`: none of it needs a GPU. Every node of the backward runs on
the stream of the forward node that it differentiates. Exit code 1: a reader on another stream does not wait.
"""

import contextlib
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


def step(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with traceback.annotate({"stream": 1}):
        left = x @ v
    with traceback.annotate({"stream": 2}):
        right = x @ w
    with traceback.annotate({"stream": 0}):
        return (left + right).exp()


def joint_graph(step, *inputs: torch.Tensor) -> fx.Graph:
    """The graph of forward and backward, as partitioners get it."""
    graphs: list[fx.Graph] = []

    def partition(joint: fx.GraphModule, *args, **kwargs):
        graphs.append(joint.graph)
        return default_partition(joint, *args, **kwargs)

    numbers = itertools.count()
    stand_in = {
        "new_event": lambda: next(numbers),
        "sync_deallocations": lambda _: None,  # asks for the bandwidth of a GPU; it concerns memory alone
        "wrap_all_sync_nodes_with_control_deps": lambda _: None,  # waits are easier to read as they are
    }
    with contextlib.ExitStack() as stack:
        for module, name in itertools.product((graph_capture, sys.modules[insert_backward_syncs.__module__]), stand_in):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, stand_in[name]))
        stack.enter_context(traceback.preserve_node_meta())
        aot_function(step, fw_compiler=nop, partition_fn=partition)(*inputs)
    return graphs[0]


def unordered(graph: fx.Graph) -> list[str]:
    """What the backward reads of another stream without a wait for it. The host issues nodes in the order of the graph."""
    recorded: dict[int, set[fx.Node]] = {}  # event -> nodes that have run when it happens
    done: dict[int, set[fx.Node]] = {}  # stream -> nodes that have run before what comes next on it
    found = []
    for node in graph.nodes:
        if node.target == torch.ops.streams.record_event.default:
            recorded[node.args[0]] = set(done.setdefault(node.args[1], set()))
        elif node.target == torch.ops.streams.wait_event.default:
            done.setdefault(node.args[1], set()).update(recorded[node.args[0]])
        elif in_backward(node):
            before = done.setdefault(stream_of(node), set())
            for one in filter(in_backward, node.all_input_nodes):
                if one not in before:
                    found.append(f"{node} on stream {stream_of(node)} reads {one} of stream {stream_of(one)}")
            before.add(node)
    return found


def in_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def stream_of(node: fx.Node) -> int:
    return node.meta.get("custom", {}).get("stream", 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    graph = joint_graph(step, *(torch.empty(4, 4, device="meta", requires_grad=True) for _ in range(3)))
    for node in filter(in_backward, graph.nodes):
        where = "" if node.target.namespace == "streams" else f"stream {stream_of(node)}"
        print(f"    {where:9} {node} = {node.target}{node.args}")
    wrong = unordered(graph)
    print(f"torch {torch.__version__}: expected every reader on another stream to wait")
    print(f"torch {torch.__version__}: got      {'; '.join(wrong) or 'that'}{', without a wait' if wrong else ''}")
    sys.exit(int(bool(wrong)))
