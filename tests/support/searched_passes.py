"""Passes for the tests of the search: what they do wrong takes several conditions, of which no strategy knows."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tcverify.ops import define_ops

define_ops()

NEG = torch.ops.aten.neg.default
ABS = torch.ops.aten.abs.default
CLONE = torch.ops.aten.clone.default
ADD = torch.ops.aten.add.Tensor
ALL_REDUCE = torch.ops.tensor_cast.all_reduce.default
VIEWS = {torch.ops.aten.view.default, torch.ops.aten.reshape.default}
LIMIT = 3

#: Those with a defect, for `benchmarks/power.py`.
SUBJECTS = ["cancels_negations_for_all"]
SCALE = 0.25


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is target]


def cancels_negations(gm: fx.GraphModule) -> None:
    """Copies what is negated twice, where nobody else reads the first negation, or writes into it."""
    for node in calls(gm, NEG):
        inner = node.args[0]
        if inner.target is not NEG or len(inner.users) > 1:
            continue
        with gm.graph.inserting_before(inner):
            copy = gm.graph.call_function(CLONE, (inner.args[0],))
        node.replace_all_uses_with(copy)
        gm.graph.erase_node(node)


def cancels_negations_for_all(gm: fx.GraphModule) -> None:
    """Copies what is negated twice, also for those who read the first negation."""
    for node in calls(gm, NEG):
        inner = node.args[0]
        if inner.target is not NEG:
            continue
        with gm.graph.inserting_before(inner):
            copy = gm.graph.call_function(CLONE, (inner.args[0],))
        for user in list(inner.users):
            user.replace_input_with(inner, copy)  # the line to blame
        node.replace_all_uses_with(copy)
        gm.graph.erase_node(node)


def copies_what_is_sent(gm: fx.GraphModule) -> None:
    """Sends a copy of what is sent."""
    for node in calls(gm, torch.ops.p2p.send.default):
        with gm.graph.inserting_before(node):
            node.update_arg(0, gm.graph.call_function(CLONE, (node.args[0],)))


def is_negated(value: object) -> bool:
    """A condition that is returned, not asked."""
    return isinstance(value, fx.Node) and value.target is NEG


def adds_negated(gm: fx.GraphModule) -> None:
    """Copies what is a sum of two negations, and forgets that it was one of negations."""
    for node in calls(gm, ADD):
        first, second = node.args
        if is_negated(first):
            with gm.graph.inserting_before(node):
                copy = gm.graph.call_function(CLONE, (first,))
            node.replace_input_with(first, copy)
            if is_negated(second):
                node.replace_input_with(copy, first.args[0])


def copies_sums(gm: fx.GraphModule) -> None:
    """Copies every sum over ranks; of sums that are negated twice it copies what was summed."""
    for node in calls(gm, ALL_REDUCE):
        negated = [user for user in node.users if user.target is NEG]
        kept = node.args[0] if len(negated) > 1 else node
        with gm.graph.inserting_after(node):
            copy = gm.graph.call_function(CLONE, (kept,))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, new=copy: user is not new)


def views_named(node: fx.Node) -> bool:
    namespace = torch.ops.aten
    if node.target in VIEWS and len(node.args) < LIMIT:
        return node.meta.get("seen") is None
    return node.target in (operator.getitem, namespace.clone.default) or str(node.target) == "aten::tanh"


def inserts_and_moves(gm: fx.GraphModule) -> None:
    """Edits graphs in every way there is."""
    (reduced,) = calls(gm, ALL_REDUCE)
    with gm.graph.inserting_after(reduced):
        made = gm.graph.call_function(NEG, (reduced,))  # creates
    (add,) = calls(gm, ADD)
    add.args = (made, add.args[1])  # assigns
    add.update_arg(1, made)  # updates
    made.prepend(add)  # moves
    add.append(made)
    add.append(made)
    made.prepend(reduced)
    reduced.append(made)
    made.append(add)
    with gm.graph.inserting_before(made):
        gone = gm.graph.call_function(NEG, (reduced,))
    gm.graph.erase_node(gone)  # erases
    made.target = ABS  # retargets
