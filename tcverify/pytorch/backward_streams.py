"""How AOTAutograd orders the streams of a backward graph.

Where a user runs parts of a model on CUDA streams of their own, every node of the backward runs on the stream of the forward node
that it differentiates. AOTAutograd then puts an event between a node and its reader where their streams differ. The nodes of a
program are read as such a backward; options say which stream each was annotated with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.ops import lookup
from tcverify.program.contract import Contract
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.streams import (
    COMMUNICATION,
    Anchored,
    behind_last_reads,
    device,
    is_annotated,
    reorder,
    require_traced,
)


class BackwardStreams(TorchPass):
    """`assign_backward_streams`, `insert_backward_syncs` and `sync_deallocations`.

    Options:
        streams: how many there are.
        run: how many nodes in a row have the same stream.
        sums: whether sums count as accumulations of gradients, which take the stream of a reader or of an addend.
        order: in which the host issues the nodes. "traced": as they are traced. "late", "early": when events are tied to nodes by
            `wrap_all_sync_nodes_with_control_deps`, they are moved as far as the ties allow, as a compiler may do.
        reuse: whether memory is used again: once the host has issued the last node that reads a value, the stream that
            allocated it may overwrite it.
    """

    name = "torch:backward_streams"
    contract = Contract(metadata=False, boundary="lenient")

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._functorch._aot_autograd import streams

        if is_annotated(gm.graph):
            return
        work = [node for node in gm.graph.nodes if node.op == "call_function"]
        for number, node in enumerate(work):
            require_traced(node)
            op = lookup(node.target)
            accumulates = options["sums"] and op.name == "aten::add.Tensor"
            stream = COMMUNICATION if op.collective else number // options["run"] % options["streams"]
            node.meta |= {"partitioner_tag": "is_backward", "is_gradient_acc": accumulates}
            node.meta["custom"] = {} if accumulates else {"stream": stream}
        with device():
            streams.assign_backward_streams(gm)
            streams.insert_backward_syncs(gm)
            if options["reuse"]:
                streams.sync_deallocations(gm)
            if options["order"] != "traced":
                reorder(gm, options["order"])
        Anchored(gm.graph, behind_last_reads(gm.graph) if options["reuse"] else {}).write()
        gm.recompile()

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="compiled code runs on several streams on a GPU alone")


__all__ = ["BackwardStreams"]
