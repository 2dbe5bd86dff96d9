"""Passes with planted defects, for llama_tp.py: each looks right, and none raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

ATEN = torch.ops.aten
C10D = torch.ops._c10d_functional


def _call(gm: fx.GraphModule, target: Any, *args: Any) -> fx.Node:
    """Insert a call, with metadata."""
    made = gm.graph.call_function(target, args)
    made.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return made


def _waits(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is C10D.wait_tensor.default]


def residual_first(gm: fx.GraphModule) -> None:
    """all_reduce(x) + residual ⇒ all_reduce(x + residual): one op less after the collective."""
    for wait in _waits(gm):
        start, add = wait.args[0], next(iter(wait.users))
        if add.target is not ATEN.add.Tensor or len(wait.users) > 1:
            continue
        residual = next(arg for arg in add.args if arg is not wait)
        with gm.graph.inserting_before(start):
            addend = _call(gm, ATEN.add.Tensor, start.args[0], residual)
        start.replace_input_with(start.args[0], addend)
        add.replace_all_uses_with(wait)
        gm.graph.erase_node(add)


def own_rows(gm: fx.GraphModule) -> None:
    """all_reduce(x) ⇒ all_gather(own rows of x): each rank has its rows, so half of the traffic is enough."""
    for wait in _waits(gm):
        start = wait.args[0]
        addend, _, group = start.args
        ranks = gm.meta["groups"][group]
        rows, rest = divmod(addend.meta["val"].shape[0], len(ranks))
        if rest:
            continue
        place = ranks.index(gm.meta["rank"])
        with gm.graph.inserting_before(start):
            own = _call(gm, ATEN.slice.Tensor, addend, 0, place * rows, (place + 1) * rows)
            gathered = _call(gm, C10D.all_gather_into_tensor.default, own, len(ranks), group)
        start.replace_all_uses_with(gathered)
        gm.graph.erase_node(start)


def no_waits(gm: fx.GraphModule) -> None:
    """wait_tensor(all_reduce(x)) ⇒ all_reduce(x): the next op starts when its operand is there anyway."""
    for wait in _waits(gm):
        wait.replace_all_uses_with(wait.args[0])
        gm.graph.erase_node(wait)
