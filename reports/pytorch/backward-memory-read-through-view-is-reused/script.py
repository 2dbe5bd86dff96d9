"""A gradient is read through a view on another stream in the backward of compiled code. Its memory is used again too early.

When the host has issued the last reader, the allocator gives the memory to the next result on the stream that it was allocated on. A
reader on another stream may not have run by then. AOTAutograd traces forward and backward here as it does for torch.compile.
Operands have the device "meta", events are numbers, and streams have been annotated as TorchDynamo annotates
`with torch.cuda.stream(s)`: none of it needs a GPU. Exit code 1: memory is overwritten that another stream may still read.
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


def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with traceback.annotate({"stream": 0}):
        other = y.sin()
    with traceback.annotate({"stream": 1}):
        right = (x @ w).view(16)
    with traceback.annotate({"stream": 0}):
        return right.exp() * 2, other


def joint_graph(step, *inputs: torch.Tensor) -> fx.Graph:
    """The graph of forward and backward, as partitioners get it."""
    graphs: list[fx.Graph] = []

    def partition(joint: fx.GraphModule, *args, **kwargs):
        graphs.append(joint.graph)
        return default_partition(joint, *args, **kwargs)

    numbers = itertools.count()
    stand_in = {
        "new_event": lambda: next(numbers),
        "get_roofline_estimate": lambda _: 1.0,  # asks for the bandwidth of a GPU
        "wrap_all_sync_nodes_with_control_deps": lambda _: None,  # waits are easier to read as they are
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


def overwritten(graph: fx.Graph) -> list[str]:
    """What the backward may overwrite while another stream has yet to read it. The host issues nodes in the order of the graph."""
    nodes = list(graph.nodes)
    recorded: dict[int, set[fx.Node]] = {}  # event -> nodes that have run when it happens
    done: dict[int, set[fx.Node]] = {}  # stream -> nodes that have run before what comes next on it
    found = []
    for place, node in enumerate(nodes):
        if node.target == torch.ops.streams.record_event.default:
            recorded[node.args[0]] = set(done.setdefault(node.args[1], set()))
        elif node.target in (torch.ops.streams.wait_event.default, torch.ops.streams.sync_dealloc.default):
            done.setdefault(node.args[1], set()).update(recorded[node.args[0]])
        elif in_backward(node):
            before = done.setdefault(stream_of(node), set())
            for value in filter(in_backward, nodes[:place]):
                readers = readers_of(value)
                free = not is_view(value) and stream_of(value) == stream_of(node) and not is_view(node)
                if not free or any(one.op == "output" or one not in nodes[:place] for one in readers):
                    continue
                for one in filter(in_backward, readers):
                    if not is_view(one) and one.target.namespace != "streams" and one not in before:
                        found.append(
                            f"{node} on stream {stream_of(node)} may overwrite {value}, which {one} reads on stream {stream_of(one)}"
                        )
            before.add(node)
    return found


def readers_of(node: fx.Node) -> list[fx.Node]:
    return [*node.users, *(one for user in node.users if is_view(user) for one in readers_of(user))]


def is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(one.alias_info for one in schema.returns)


def in_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def stream_of(node: fx.Node) -> int:
    return node.meta.get("custom", {}).get("stream", 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    x, *others = (torch.empty(4, 4, device="meta", requires_grad=number > 0) for number in range(3))
    graph = joint_graph(step, x, *others)
    for node in filter(in_backward, graph.nodes):
        where = "" if node.target.namespace == "streams" else f"stream {stream_of(node)}"
        print(f"    {where:9} {node} = {node.target}{node.args}")
    wrong = overwritten(graph)
    print(f"torch {torch.__version__}: expected memory to be used again behind all its readers")
    print(f"torch {torch.__version__}: got      {'; '.join(wrong) or 'that'}")
    sys.exit(int(bool(wrong)))
