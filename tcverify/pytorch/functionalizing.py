"""`torch._inductor._functionalize_collectives`: collectives that write in place become functional ones, and copies."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tcverify.ops import lookup
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import Pipeline

#: Attributes of the module that holds a traced graph: the group of a collective, and its reduction.
_GROUP, _REDUCTION = "_group_", "_reduction_"


class FunctionalizeCollectives(TorchPass):
    """`_functionalize_inplace_collectives`, as `torch._inductor.standalone_compile` runs it.

    In-place all_reduces become calls of `c10d.allreduce_`, as make_fx traces `torch.distributed.all_reduce`. That returns when
    the collective has ended, and what follows reads its result.
    """

    name = "torch:functionalize_collectives"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        from torch._inductor._functionalize_collectives import _functionalize_inplace_collectives

        for node in gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce_.default):
            _as_traced(gm, node)
        made = _functionalize_inplace_collectives(gm)
        _with_group_names(made)
        return made

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(
            unreachable="users reach it by torch._inductor.standalone_compile, on a graph that make_fx traced"
        )


def _as_traced(gm: fx.GraphModule, start: fx.Node) -> None:
    """Replace an in-place all_reduce and its wait. What names it later may wait for another collective in the same memory."""
    value, reduction, group = start.args
    setattr(gm, f"{_GROUP}{start.name}", group)
    setattr(gm, f"{_REDUCTION}{start.name}", getattr(dist.ReduceOp.RedOpType, str(reduction).upper()))
    graph = gm.graph
    with graph.inserting_before(start):
        held = [graph.create_node("get_attr", f"{kind}{start.name}") for kind in (_GROUP, _REDUCTION)]
        call = graph.call_function(torch.ops.c10d.allreduce_.default, ([value], *held, None, False))
        tensors = graph.call_function(operator.getitem, (call, 0))
        result = graph.call_function(operator.getitem, (tensors, 0))
    result.meta = start.meta
    waits = sorted(user for user in start.users if lookup(user.target).phase == "wait")
    for node in (*waits[:1], start):
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    assert isinstance(value, fx.Node)
    value.replace_all_uses_with(result, delete_user_cb=result.__lt__)


def _with_group_names(gm: fx.GraphModule) -> None:
    """Let collectives name their groups, as they do once a graph is compiled."""
    for node in list(gm.graph.nodes):
        if node.op == "get_attr" and str(node.target).startswith(_GROUP):
            node.replace_all_uses_with(getattr(gm, str(node.target)))
            gm.graph.erase_node(node)
    gm.recompile()


__all__ = ["FunctionalizeCollectives"]
