"""`torch.distributed.pipelining.pipeline`: a model is traced and split into stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.program.graph import lazy_module
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compiling import example_inputs
from tcverify.pytorch.cutting import quiet_places
from tcverify.pytorch.effects import define_shapes
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.functional_graphs import require_functional
from tcverify.pytorch.splitting import consecutive_parts, inline_submodules


class TracedStages(TorchPass):
    """`pipeline`, and the stages that `Pipe.build_stage` makes, in one graph: each stands where its sends and receives put it.

    Inputs that the first stage alone reads are those of the model; if there is none, it hands a view of one on. The others are
    buffers.

    Options:
        run: how many calls a stage has at least. No collective is under way between stages.
    """

    name = "torch:pipeline"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        from torch.distributed.pipelining import pipeline

        require_functional(gm.graph)
        define_shapes()
        stages_of = _stages(gm.graph, options["run"])
        inputs = _inputs_of_first(gm.graph, stages_of)
        model, given = _model(gm, stages_of, inputs)
        with torch.no_grad():
            pipe = pipeline(model, tuple(given))
        if pipe.num_stages < gm.meta["world_size"]:
            raise Unsupported(f"it has {pipe.num_stages} stages for {gm.meta['world_size']} ranks")
        stages = [pipe.build_stage(number, torch.device("cpu")) for number in range(pipe.num_stages)]
        for stage in stages:
            stage._create_act_recv_info()  # pairs the inputs of its module with what its node is given
        whole = fx.GraphModule(torch.nn.Module(), fx.Graph())
        whole.graph = _joined(pipe.split_gm.graph, stages, whole)
        inline_submodules(whole)
        return lazy_module(torch.nn.Module(), _as_before(gm.graph, inputs, whole.graph))

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="torch.compile makes no pipelines")


def _model(
    gm: fx.GraphModule, stages: Mapping[fx.Node, int], inputs: Collection[fx.Node]
) -> tuple[fx.GraphModule, list[Any]]:
    """A model that computes what a graph computes, with a split point in front of each stage but the first.

    Args:
        inputs: those of the graph that are inputs of the model. The others are its buffers.

    Returns:
        The model, and values for its inputs.
    """
    from torch.distributed.pipelining import pipe_split

    graph, root = fx.Graph(), torch.nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    given = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs(gm), strict=True):
        if node in inputs:
            given.append(value)
            copies[node] = graph.placeholder(node.name)
        else:
            root.register_buffer(_BUFFER + node.name, value)
            copies[node] = graph.get_attr(_BUFFER + node.name)
    read_later = [node for node in inputs if any(stages.get(user, 0) for user in node.users)]
    handed_on = {node: graph.call_method("view", (copies[node], node.meta["val"].shape)) for node in read_later}
    stage = 0
    for node in gm.graph.nodes:
        if node.op == "call_function":
            if stages[node] != stage:
                graph.call_function(pipe_split)
                stage = stages[node]
                copies |= handed_on
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[one] for one in gm.graph.output_node().all_input_nodes if one.op != "placeholder"))
    return fx.GraphModule(root, graph), given


#: How buffers that were inputs are called, in front of their names.
_BUFFER = "input_"


def _stages(graph: fx.Graph, run: int) -> dict[fx.Node, int]:
    """The stage of each call.

    Raises:
        Unsupported: nobody reads what a stage computes, so that it would be dropped; or the module has constants.
    """
    constant = next((node for node in graph.nodes if node.op == "get_attr"), None)
    if constant is not None:
        raise Unsupported(f"node '{constant.name}' is a constant of the module")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = consecutive_parts(calls, run, {*quiet_places(calls)})
    handing_on = {found[node] for node in calls for user in node.users if found.get(user) != found[node]}
    if handing_on != {*found.values()}:
        raise Unsupported("a stage hands nothing on")
    return found


def _inputs_of_first(graph: fx.Graph, stages: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The inputs that the first stage alone reads; if there is none, the first one that it reads.

    Raises:
        Unsupported: it reads none.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    readers = {node: {stages[user] for user in node.users if user.op != "output"} for node in inputs}
    found = [node for node in inputs if readers[node] == {0}] or [node for node in inputs if 0 in readers[node]][:1]
    if not found:
        raise Unsupported("the first stage reads no input")
    return found


def _joined(graph: fx.Graph, stages: list[Any], whole: fx.GraphModule) -> fx.Graph:
    """The graph that calls the stages, with the module of each stage where its node is. The modules become those of `whole`."""
    by_node = {stage.node.name: stage for stage in stages}
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copy = copies[node] = made.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            stage = by_node[node.name]
            copy.target = f"stage_{stage.stage_index}"
            whole.add_submodule(copy.target, stage.submod)
    return made


def _as_before(original: fx.Graph, inputs: list[fx.Node], graph: fx.Graph) -> fx.Graph:
    """A graph of a model with all inputs of the original, and its results in the containers that they had there."""
    made = fx.Graph()
    named = {node.name: made.node_copy(node) for node in original.nodes if node.op == "placeholder"}
    given = iter(inputs)
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = named[next(given).name]
        elif node.op == "get_attr":
            copies[node] = named[str(node.target).removeprefix(_BUFFER)]
        elif node.op == "output":
            end = original.output_node()
            computed = [one for one in end.all_input_nodes if one.op != "placeholder"]
            results = fx.node.map_arg(pytree.tree_leaves(node.args[0]), copies.__getitem__)
            named.update(zip((one.name for one in computed), results, strict=True))
            made.output(_renamed(end.args[0], named))
        else:
            copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def _renamed(results: Any, named: Mapping[str, fx.Node]) -> Any:
    return fx.node.map_arg(results, lambda one: named[one.name])


__all__ = ["TracedStages"]
