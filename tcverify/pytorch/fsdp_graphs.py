"""Passes of `torch._inductor.comms` on FX graphs of FSDP2; torch dropped them with its tracing of FSDP2."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import qualified_name
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import Pipeline, imported
from tcverify.pytorch.functional_graphs import require_functional, torch_metadata


class ReinplaceFsdpAllGather(TorchPass):
    """`reinplace_fsdp_all_gather`."""

    name = "torch:reinplace_fsdp_all_gather"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor import comms

        comms.reinplace_fsdp_all_gather(gm.graph)  # type: ignore[attr-defined, unused-ignore]

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return _pipeline("reinplace_fsdp_all_gather")


class RemoveUnsharded(TorchPass):
    """`remove_fsdp2_unsharded_param_graph_input_usage`, which begins `post_grad_passes`.

    AOTAutograd leaves the copies into parameters in full and the resizing of their storages, and makes every other op
    functional. So it is done here to the ops of FSDP2 that write into `out`; what else writes in place is declined. FSDP2
    hands over parameters in full whose memory has been freed: where a program begins with that, the pass gets the rest of it,
    and where it does not, it is declined.
    """

    name = "torch:remove_fsdp2_unsharded_param_graph_input_usage"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor import comms

        without_out(gm.graph)
        require_functional(gm.graph, allowed=_of_parameters)
        with torch_metadata(gm):
            freed = _without_prologue(gm.graph)
            comms.remove_fsdp2_unsharded_param_graph_input_usage(gm.graph)  # type: ignore[attr-defined, unused-ignore]
            first = next(node for node in gm.graph.nodes if node.op != "placeholder")
            with gm.graph.inserting_before(first):
                for parameter in freed:
                    gm.graph.call_function(torch.ops.inductor.resize_storage_bytes_.default, (parameter, 0))

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return _pipeline("remove_fsdp2_unsharded_param_graph_input_usage")


def _pipeline(name: str) -> Pipeline:
    reason = "torch.compile calls it on graphs of FSDP2's hooks alone, which a function does not have"
    return Pipeline(unreachable=reason, call=(imported("torch._inductor.comms", name), f"{name}(gm.graph)"))


def _of_parameters(node: fx.Node) -> bool:
    written = node.args[0] if node.args else None
    named = qualified_name(node.target).startswith(("fsdp::copy_", "inductor::resize_storage_bytes_"))
    return named and getattr(written, "op", "") == "placeholder"


def _without_prologue(graph: fx.Graph) -> list[fx.Node]:
    """Take off what frees parameters at the beginning, and return those."""
    resize = torch.ops.inductor.resize_storage_bytes_.default
    found = []
    for parameter in graph.find_nodes(op="placeholder"):
        users = sorted(parameter.users)
        if all(user.target is not resize for user in users):
            continue
        if users[0].target is not resize or users[0].args[1] != 0:
            raise Unsupported(f"parameter '{parameter.name}' comes with memory: FSDP2 hands over freed ones")
        found.append(parameter)
        graph.erase_node(users[0])
    return found


def without_out(graph: fx.Graph) -> None:
    """Write ops of FSDP2 that write into new memory as ops that return it.

    Raises:
        Unsupported: one of them writes into what is not new, or whose content before matters; the message names it.
    """
    for node in list(graph.nodes):
        name = qualified_name(node.target) if node.op == "call_function" else ""
        if name.startswith("fsdp::split_with_sizes_copy"):
            _split(graph, node)
        elif name.startswith("fsdp::chunk_cat"):
            _concatenated(graph, node)
        elif name.startswith("_c10d_functional::all_gather_into_tensor_out"):
            _gathered(graph, node)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    views: Any = node.kwargs["out"]
    with graph.inserting_before(node):
        pieces = graph.call_function(torch.ops.aten.split_with_sizes_copy.default, node.args)
        made = [graph.call_function(operator.getitem, (pieces, number)) for number in range(len(views))]
        for view, piece in zip(views, made, strict=True):
            _put(graph, node, view, piece)
    _erase(graph, node, *views)


def _concatenated(graph: fx.Graph, node: fx.Node) -> None:
    view: Any = node.kwargs["out"]
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops.aten._chunk_cat.default, node.args)
        wanted, given = view.meta["val"].dtype, node.args[0][0].meta["val"].dtype  # type: ignore[index, union-attr]
        if wanted != given:
            made = graph.call_function(torch.ops.aten._to_copy.default, (made,), {"dtype": wanted})
        _put(graph, node, view, made)
    _erase(graph, node, view)


def _gathered(graph: fx.Graph, node: fx.Node) -> None:
    """The memory is that of the copy-in, which must not have other readers."""
    out: Any = node.kwargs["out"]
    buffer = out.args[0].args[1]
    if set(out.users) != {node} or set(buffer.users) != {out.args[0]}:
        raise Unsupported(f"node '{node.name}' gathers into memory that others read")
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, node.args)
    node.replace_all_uses_with(made)
    _erase(graph, node, out)


def _put(graph: fx.Graph, node: fx.Node, view: fx.Node, made: fx.Node) -> None:
    """Let a result take the place of the new memory of which a view was to be written."""
    base = view.args[0] if qualified_name(view.target).startswith("aten::view") else None
    if not isinstance(base, fx.Node) or not qualified_name(base.target).startswith("aten::empty"):
        raise Unsupported(f"node '{node.name}' writes into '{view.name}', which is not a view of new memory")
    if set(view.users) != {node} or any(user < node for user in base.users if user is not view):
        raise Unsupported(f"node '{node.name}' writes into '{base.name}', which others read before")
    flat = graph.call_function(torch.ops.aten.view.default, (made, list(base.meta["val"].shape)))
    base.replace_all_uses_with(flat, delete_user_cb=lambda user: user is not view)


def _erase(graph: fx.Graph, node: fx.Node, *written: fx.Node) -> None:
    """Erase an op that writes, with what only it needs."""
    graph.erase_node(node)
    for one in written:
        base = one.args[0]
        graph.erase_node(one)
        if isinstance(base, fx.Node) and not base.users:
            graph.erase_node(base)


__all__ = ["ReinplaceFsdpAllGather", "RemoveUnsharded", "without_out"]
