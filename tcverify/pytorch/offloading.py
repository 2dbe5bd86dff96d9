"""How AOTAutograd moves what the forward saves for the backward to the host, and back when it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx

from tcverify.ops import lookup, resolve
from tcverify.ops.dialects.fsdp import RESIZE
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.partitioning import DefaultPartition, MinCutPartition, Partition


class ActivationOffload(Partition):
    """`enable_activation_offloading`, which both partitioners call.

    Copies to the host and back become clones. A wait for one frees what has been copied, as it does on a device (torch 2.13).

    Options: as of `Partition`, and
        partitioner: which one divides the graph.
        marked: which nodes a user has marked: all, or every second one from the first or the second on.
        inputs: whether inputs are marked, too.
        separate_stream, sink_wait, prefetch: of `torch._functorch.config`.
    """

    name = "torch:activation_offloading"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        made = super().rewrite(gm, options)
        _on_one_device(made.graph)
        made.recompile()
        return made

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="there is no other device on which activations could be kept")

    def divide(
        self, module: fx.GraphModule, outputs: int, options: Mapping[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        module.graph.eliminate_dead_code()  # as AOTAutograd does before
        first, step = {"all": (0, 1), "even": (0, 2), "odd": (1, 2)}[options["marked"]]
        kinds = ("call_function", "placeholder") if options["inputs"] else ("call_function",)
        needed = _needed(module.graph)
        for node in [node for node in module.graph.nodes if node.op in kinds][first::step]:
            # Not what only a collective would read that nothing reads: partitioners drop it, as torch:default_partition shows.
            readers = {user for user in node.users if user.meta.get("partitioner_tag") == "is_backward"}
            node.meta["should_offload"] = not needed.isdisjoint(readers)
        partition = {"default": DefaultPartition, "min_cut": MinCutPartition}[options["partitioner"]]
        with _offloading(options):
            return partition().divide(module, outputs, options)


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that results are computed from."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            node.op == "output"
            or node in found
            or (node.op == "call_function" and node.is_impure() and not _is_wait(node))
        ):
            found.update(node.all_input_nodes)
            found.add(node)
    return found


def _is_wait(node: fx.Node) -> bool:
    return lookup(node.target).phase == "wait"


@contextlib.contextmanager
def _offloading(options: Mapping[str, Any]) -> Iterator[None]:
    """Move what is marked; every op takes a millisecond, and copies a little longer."""
    from torch._functorch import config
    from torch._functorch._activation_offloading import activation_offloading

    told = {
        "enable_activation_offloading": True,
        "activation_offload_separate_stream": options["separate_stream"],
        "activation_offload_sink_wait": options["sink_wait"],
        "activation_reload_prefetch": options["prefetch"],
        "activation_offload_cpu_gpu_bw": 1e-6,
    }
    with config.patch(told), mock.patch.object(activation_offloading, "benchmark_node", return_value=1.0):
        yield


def _on_one_device(graph: fx.Graph) -> None:
    """Let copies between host and device be clones, and a wait for one free what it has copied, where this torch does."""
    ops = torch.ops
    frees = waits_free()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (ops.ao.offload.default, ops.ao.reload.default, ops.prims.device_put.default):
            node.target, node.args, node.kwargs = ops.aten.clone.default, node.args[:1], {}
        elif node.target == ops.ao.wait_tensor.default:
            copied, *freed = node.args[:2]
            if frees:
                with graph.inserting_before(node):
                    graph.call_function(resolve(RESIZE), (*freed, 0))
            node.replace_all_uses_with(copied)
            graph.erase_node(node)


def waits_free() -> bool:
    """Whether a wait frees what has been copied; in torch 2.12 it only keeps it alive."""
    from torch._functorch._activation_offloading import offload_ops

    return hasattr(offload_ops, "pinned_memory_pool")


__all__ = ["ActivationOffload", "waits_free"]
