"""Passes of PyTorch that move parts of a graph into submodules: `split_module` and the regions of `regional_inductor`."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tcverify.errors import Unsupported
from tcverify.ops import lookup
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import Pipeline, imported
from tcverify.pytorch.functional_graphs import require_functional, torch_metadata


class SplitModule(TorchPass):
    """`torch.fx.passes.split_module.split_module`, as DDPOptimizer and vLLM call it: each part is a run of consecutive calls.

    Options:
        run: how many calls a part has at least; or "collectives": every one of them is a part, and so is what stands between.
        keep_original_order: of the pass. DDPOptimizer leaves it out, vLLM sets it.
    """

    name = "torch:split_module"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        from torch.fx.passes.split_module import split_module

        parts = _parts(gm.graph, options["run"])
        made = split_module(gm, gm, parts.__getitem__, keep_original_order=options["keep_original_order"])
        inline_submodules(made)
        return made

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        run, keep = options["run"], options["keep_original_order"]
        call = (
            imported("torch.fx.passes.split_module", "split_module"),
            "calls = [node for node in gm.graph.nodes if node.op == 'call_function']",
            f"split = split_module(gm, gm, lambda node: calls.index(node) // {run}, keep_original_order={keep!r})",
            "gm._modules.update(split._modules)",
            "gm.graph = split.graph",
        )
        return Pipeline(
            unreachable="torch.compile splits graphs of modules in DistributedDataParallel, with parameters of megabytes",
            call=() if run == "collectives" else call,
        )


def consecutive_parts(calls: Sequence[fx.Node], length: int, places: Container[int]) -> dict[fx.Node, int]:
    """The part of each call, in ascending order.

    Args:
        length: how many calls a part has at least.
        places: where a part may begin. What selects from several results stays with what makes them.
    """
    found: dict[fx.Node, int] = {}
    part = begin = 0
    for place, node in enumerate(calls):
        if place - begin >= length and place in places and node.target is not operator.getitem:
            part, begin = part + 1, place
        found[node] = part
    return found


def _parts(graph: fx.Graph, run: int | str) -> dict[fx.Node, int]:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if run != "collectives":
        return consecutive_parts(calls, int(run), range(len(calls)))
    apart = [lookup(node.target).phase is not None for node in calls]
    return consecutive_parts(calls, 1, {place for place in range(1, len(calls)) if apart[place - 1] or apart[place]})


class RegionalInductor(TorchPass):
    """`regional_inductor`, up to where its regions are compiled.

    Options:
        run: how many calls are marked, and then are not, by turns.
        regions: how many regions the marked runs belong to, by turns; those of one may be compiled together.
    """

    name = "torch:regional_inductor"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        from torch.fx.passes.regional_inductor import _create_inductor_marked_regions

        require_functional(gm.graph)
        with torch_metadata(gm):
            _mark(gm.graph, options["run"], options["regions"])
            made = _create_inductor_marked_regions(gm)
        inline_submodules(made)
        return made

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="users mark regions in their code, and programs have no such marks")


#: What users do not mark: AOTAutograd makes the copies into inputs at the end, and tracing marks items like what they come from.
_UNMARKED = (torch.ops.aten.copy_.default, operator.getitem)


def _mark(graph: fx.Graph, run: int, regions: int) -> None:
    """Mark runs of calls as annotations of users do."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target not in _UNMARKED]
    for place, node in enumerate(calls):
        turn, unmarked = divmod(place // run, 2)
        if not unmarked:
            _annotate(node, {"inductor_region": turn % regions} if regions > 1 else 0)


def _annotate(node: fx.Node, told: Any) -> None:
    node.meta["custom"] = {"compile_with_inductor": told}
    for user in node.users:
        if user.target is operator.getitem:
            _annotate(user, told)


def inline_submodules(gm: fx.GraphModule) -> None:
    """Put what submodules hold in the place of the calls of them.

    Raises:
        Unsupported: a called module is no graph.
    """
    for node in gm.graph.find_nodes(op="call_module"):
        inner = gm.get_submodule(node.target)
        if not isinstance(inner, fx.GraphModule):
            raise Unsupported(f"{node.name} calls a {type(inner).__name__}, which is no graph")
        _inline(gm.graph, node, inner.graph)
    gm.delete_all_unused_submodules()
    gm.recompile()


def _inline(graph: fx.Graph, node: fx.Node, inner: fx.Graph) -> None:
    values: dict[fx.Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), node.args, strict=True))
    result: Any = None
    with graph.inserting_before(node):
        for one in inner.nodes:
            if one.op == "output":
                result = map_arg(one.args[0], values.__getitem__)
            elif one.op != "placeholder":
                values[one] = graph.node_copy(one, values.__getitem__)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


__all__ = ["RegionalInductor", "SplitModule", "consecutive_parts", "inline_submodules"]
