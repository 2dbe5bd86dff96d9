"""How AOTAutograd divides a graph of forward and backward in two, and what it takes for the same computation.

A program is read as such a graph: what comes before a cut is forward, what comes behind is backward, and inputs that only the
latter reads are the gradients of outputs. The two parts are then joined again, the backward behind the forward: as autograd runs
them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.ops import lookup, schema_of
from tcverify.program.graph import lazy_module
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.cutting import find_cut
from tcverify.pytorch.effects import define_shapes
from tcverify.pytorch.end_to_end.pipeline import Pipeline, imported
from tcverify.pytorch.functional import functional_copy


class MergeEqual(TorchPass):
    """`fx_graph_cse`, which runs in the default partitioner of torch.compile."""

    name = "torch:fx_graph_cse"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        from torch._functorch.compile_utils import fx_graph_cse

        define_shapes()
        module = _copied(gm)
        _flatten_output(module.graph)
        graph = fx_graph_cse(module.graph)
        return lazy_module(module, _returning(graph, gm))

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(
            backend="aot_eager",
            training="beside",
            call=(
                imported("torch._functorch.compile_utils", "fx_graph_cse"),
                "gm.graph = fx_graph_cse(gm.graph)",
            ),
        )


class Partition(TorchPass):
    """Divides a graph and joins the parts.

    Options:
        cut: how much of the graph is forward.
    """

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        define_shapes()
        module = _copied(gm)
        joint = _joint(module, options["cut"])
        graph = _joined(*self.divide(joint.module, joint.forward, options), joint)
        return lazy_module(torch.nn.Module(), _returning(graph, gm))

    #: What torch.compile calls it for.
    backend: ClassVar[str]

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(backend=cls.backend, training="cut", cut=options["cut"])

    def divide(
        self, module: fx.GraphModule, outputs: int, options: Mapping[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Call the partitioner. `outputs` says how many of the results, the first ones, are those of the forward."""
        raise NotImplementedError


class DefaultPartition(Partition):
    """`default_partition`, which backends built on AOTAutograd use unless they name another. Options as of `Partition`."""

    name = "torch:default_partition"
    backend = "aot_eager_default_partitioner"

    def divide(
        self, module: fx.GraphModule, outputs: int, options: Mapping[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import default_partition

        return default_partition(module, (), num_fwd_outputs=outputs)


class MinCutPartition(Partition):
    """`min_cut_rematerialization_partition`, which Inductor uses. Options as of `Partition`."""

    name = "torch:min_cut_partition"
    backend = "aot_eager"

    def divide(
        self, module: fx.GraphModule, outputs: int, options: Mapping[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return min_cut_rematerialization_partition(module, (), num_fwd_outputs=outputs)


class _Joint:
    """A graph of forward and backward.

    Attributes:
        module: holds it.
        forward: how many results the forward has. They come first.
        order: which of the results of the program each of its results is.
    """

    def __init__(self, module: fx.GraphModule, forward: int, order: list[int]) -> None:
        self.module, self.forward, self.order = module, forward, order


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A functional copy, with the metadata that partitioners read."""
    module = functional_copy(gm)
    values = {node.name: node.meta["val"] for node in gm.graph.nodes if "val" in node.meta}
    for node in module.graph.nodes:
        _require_functional(node)
        if node.name in values:
            node.meta["val"] = values[node.name]
            if isinstance(node.meta["val"], torch.Tensor):  # torch 2.9 asks for it
                node.meta["tensor_meta"] = _extract_tensor_metadata(node.meta["val"])
        elif node.op == "call_function":
            raise Unsupported(f"node '{node.name}' is not in the graph of the program, but made of a write")
    return module


def _require_functional(node: fx.Node) -> None:
    """Raise where a node writes into what the graph has made: graphs of AOTAutograd write into inputs alone, by `copy_`."""
    schema = schema_of(node.target) if node.op == "call_function" else None
    if schema is None or not schema.is_mutable or lookup(node.target).phase == "wait":
        return
    written = node.args[0] if node.args else None
    if lookup(node.target).name != "aten::copy_" or not isinstance(written, fx.Node) or written.op != "placeholder":
        raise Unsupported(f"node '{node.name}' writes in place: such graphs are functional")


def _flatten_output(graph: fx.Graph) -> list[fx.Node]:
    output = next(node for node in graph.nodes if node.op == "output")
    results = pytree.tree_leaves(fx.node.map_aggregate(output.args[0], lambda x: x))
    if not all(isinstance(one, fx.Node) for one in results):
        raise Unsupported("the graph returns something that no node makes")
    for one in results:
        if not isinstance(one.meta.get("val"), torch.Tensor):
            raise Unsupported(
                f"the graph returns '{one}', which is not one tensor: graphs of AOTAutograd return tensors"
            )
    output.args = (tuple(results),)
    return results


def _joint(module: fx.GraphModule, share: float) -> _Joint:
    graph = module.graph
    results = _flatten_output(graph)
    cut = find_cut(graph, results, share)
    backward, tangents = cut.backward, cut.tangents
    ahead = [k for k, one in enumerate(results) if one not in backward and one not in tangents]
    behind = [k for k in range(len(results)) if k not in ahead]
    for node in graph.nodes:
        if node in tangents:
            node.target = f"tangents_{node.target}"
            node._rename(node.target)  # parts of the partitioners go by the one, parts by the other
        elif node.op == "placeholder":
            node.target = f"primals_{node.target}"
        elif node in backward:
            node.meta["partitioner_tag"] = "is_backward"
        elif node.op == "call_function":
            node.meta["partitioner_tag"] = "is_forward"
    order = ahead + behind
    next(iter(reversed(graph.nodes))).args = (tuple(results[k] for k in order),)
    module.recompile()
    return _Joint(module, len(ahead), order)


def _joined(forward: fx.GraphModule, backward: fx.GraphModule, joint: _Joint) -> fx.Graph:
    """One graph that runs the forward, then the backward, and returns their results in the order of the program."""
    graph, env = fx.Graph(), {}
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            name = node.target.removeprefix("primals_").removeprefix("tangents_")
            env[node.name] = graph.placeholder(name)
            env[node.name].meta = dict(node.meta)
    ahead = _inlined(graph, forward, dict(env))
    names = [node.name for node in _results(forward)]
    behind = _inlined(graph, backward, {**env, **dict(zip(names, ahead, strict=True))})
    made = [*ahead[: joint.forward], *behind]
    results: list[Any] = [None] * len(joint.order)
    for place, one in zip(joint.order, made, strict=True):
        results[place] = one
    graph.output(tuple(results))
    return graph


def _results(module: fx.GraphModule) -> list[Any]:
    return list(next(iter(reversed(module.graph.nodes))).args[0])


def _inlined(graph: fx.Graph, module: fx.GraphModule, known: dict[str, fx.Node]) -> list[Any]:
    """Copy the calls of a part; its inputs are known by name."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = known[node.name]
        elif node.op != "output":
            copies[node] = graph.node_copy(node, lambda one: copies[one])
            copies[node].meta = copy.copy(node.meta)
    return [copies[one] if isinstance(one, fx.Node) else one for one in _results(module)]


def _returning(graph: fx.Graph, gm: fx.GraphModule) -> fx.Graph:
    """Bring the results into the containers that the program returns."""
    wanted = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    _, tree = pytree.tree_flatten(fx.node.map_aggregate(wanted, lambda x: x))
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = (pytree.tree_unflatten(pytree.tree_leaves(output.args[0]), tree),)
    graph.lint()
    return graph


__all__ = ["DefaultPartition", "MergeEqual", "MinCutPartition", "Partition"]
