"""Writes the collectives that eager code calls on process groups (`c10d::allreduce_`, …) as functional ones on named groups.

make_fx records them where code calls `torch.distributed` itself: FSDP2, DDP-like averaging, a user's own loop. Their process
group and reduce op are objects of the process that captures. What is waited for where is not recorded: each is waited for
where it starts, so that races between the two cannot show.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tcverify.errors import ProgramError
from tcverify.ops import define_ops, qualified_name
from tcverify.ops.reductions import REDUCTIONS
from tcverify.program.graph import lazy_module

#: Why some of them are not rewritten.
REASONS = {
    "allgather_coalesced_": "torch.distributed no longer calls it",
    "check_for_nan": "it only checks values",
    "gather_": "no functional collective gathers on one rank",
    "gather_into_tensor_": "no functional collective gathers on one rank",
    "monitored_barrier_": "it depends on a timeout",
    "recv_any_source_": "its peer depends on timing",
    "reduce_": "no functional collective reduces on one rank",
}


def to_functional_collectives(module: fx.GraphModule) -> fx.GraphModule:
    """Return `module` with functional collectives in place of those of process groups; itself, if it has none of them.

    Raises:
        ProgramError: a collective has no functional form; the message says which, and why.
    """
    if not any(_is_eager(node) for node in module.graph.nodes):
        return module
    define_ops()  # among them the barrier, which functional collectives lack
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    made = graph.output(result)
    last = next(node for node in module.graph.nodes if node.op == "output")
    made.meta.update(last.meta)
    for node, copy in copies.items():
        copy.meta.update(node.meta)
    found = lazy_module(module, graph)
    _Rewriter(found).run()
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    found.recompile()
    return found


def _is_eager(node: fx.Node) -> bool:
    return node.op == "call_function" and qualified_name(node.target).startswith("c10d::")


class _Rewriter:
    """Rewrites the calls, in place."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._graph = module.graph
        self._results: dict[fx.Node, Any] = {}  # what a call returned, or a part of it

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "call_function" and node.target is operator.getitem and node.args[0] in self._results:
                part = self._results[node.args[0]][node.args[1]]
                self._results[node] = part
                if isinstance(part, fx.Node):
                    node.replace_all_uses_with(part)
            elif _is_eager(node):
                with self._graph.inserting_before(node):
                    self._results[node] = self._call(node)
        for node in reversed(self._results):
            if node.users:
                raise ProgramError(
                    f"node '{next(iter(node.users)).name}' reads the list of results of '{node.name}' as a whole",
                    "give the collective as a functional one (torch.distributed._functional_collectives)",
                )
            self._graph.erase_node(node)

    def _call(self, node: fx.Node) -> Any:
        base = qualified_name(node.target).removeprefix("c10d::").split(".")[0]
        write: Callable[..., Any] | None = getattr(self, f"_{base.strip('_')}", None) if base not in REASONS else None
        if write is None:
            raise ProgramError(
                f"node '{node.name}' calls c10d::{base}: {REASONS.get(base, 'it is not supported')}",
                "use another collective, or a functional one (torch.distributed._functional_collectives)",
            )
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        group = self._object(node, given["process_group"])
        self._group = dist.ProcessGroup.unbox(group)
        self._name, self._size = self._group.group_name, self._group.size()
        return write(node, given)

    def _object(self, node: fx.Node, value: Any) -> Any:
        found = (
            getattr(self._module, str(value.target)) if isinstance(value, fx.Node) and value.op == "get_attr" else value
        )
        if not isinstance(found, torch.ScriptObject):
            raise ProgramError(f"node '{node.name}' is given a {type(found).__name__} instead of a process group")
        return found

    def _reduction(self, node: fx.Node, given: dict[str, Any]) -> str:
        reduce_op = self._object(node, given["reduce_op"])
        if not reduce_op._has_method("op"):
            raise ProgramError(
                f"node '{node.name}' reduces, and torch {torch.__version__} does not tell how",
                "use torch 2.10 or later",
            )
        kind = str(dist.ReduceOp.RedOpType(reduce_op.op()).name).lower()
        if kind not in REDUCTIONS:
            raise ProgramError(
                f"node '{node.name}' reduces by {kind.upper()}, which has no meaning here",
                f"use one of {', '.join(REDUCTIONS)}",
            )
        return kind

    # ------------------------------------------------------------------------------------------------- pieces

    def _add(self, op: str, val: Any, *args: Any, **kwargs: Any) -> fx.Node:
        namespace, _, name = op.partition("::")
        base, _, overload = name.partition(".")
        target = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        made = self._graph.call_function(target, args, kwargs)
        if val is not None:
            made.meta["val"] = val
        return made

    def _start(self, op: str, val: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A collective and its wait."""
        return self._wait(self._add(f"_c10d_functional::{op}", val, *args, self._name, **kwargs), val)

    def _wait(self, started: fx.Node, val: Any) -> fx.Node:
        return self._add("_c10d_functional::wait_tensor", val, started)

    def _copy(self, target: fx.Node, source: Any) -> fx.Node:
        return self._add("aten::copy_", _val(target), target, source)

    # -------------------------------------------------------------------------------------------------- calls

    def _allreduce(self, node: fx.Node, given: dict[str, Any]) -> Any:
        if given.get("sparse_indices") is not None:
            raise ProgramError(f"node '{node.name}' reduces a sparse tensor", "use dense gradients")
        op = self._reduction(node, given)
        return [self._start("all_reduce_", _val(x), x, op) for x in given["tensors"]], None

    def _allreduce_coalesced(self, node: fx.Node, given: dict[str, Any]) -> None:
        self._allreduce(node, given)

    def _broadcast(self, node: fx.Node, given: dict[str, Any]) -> Any:
        return [self._start("broadcast_", _val(x), x, given["root_rank"]) for x in given["tensors"]], None

    def _gathered(self, out: fx.Node, x: fx.Node) -> fx.Node:
        flat = _val(out) is not None and _val(x) is not None and _val(out).dim() > max(_val(x).dim(), 1)
        if not flat:
            return self._start("all_gather_into_tensor_out", _val(out), x, self._size, out=out)
        shape = [self._size, *_val(x).shape]  # the stacked form
        whole = _val(x).new_empty([self._size * max(_val(x).shape[0], 1), *_val(x).shape[1:]])
        made = self._start("all_gather_into_tensor", whole, x, self._size)
        return self._copy(out, self._add("aten::view", whole.view(shape), made, shape))

    def _allgather_base(self, node: fx.Node, given: dict[str, Any]) -> Any:
        return self._gathered(given["output_tensor"], given["input_tensor"]), None

    def _allgather_into_tensor_coalesced(self, node: fx.Node, given: dict[str, Any]) -> None:
        for out, x in zip(given["outputs"], given["inputs"], strict=True):
            self._gathered(out, x)

    def _scattered(self, out: fx.Node, x: fx.Node, op: str) -> fx.Node:
        if _val(x) is not None and _val(x).dim() > max(_val(out).dim(), 1):  # the stacked form
            shape = [self._size * _val(x).shape[1], *_val(x).shape[2:]]
            x = self._add("aten::reshape", _val(x).reshape(shape), x, shape)
        return self._start("reduce_scatter_tensor_out", _val(out), x, op, self._size, out=out)

    def _reduce_scatter_base(self, node: fx.Node, given: dict[str, Any]) -> Any:
        return self._scattered(given["output_tensor"], given["input_tensor"], self._reduction(node, given)), None

    def _reduce_scatter_tensor_coalesced(self, node: fx.Node, given: dict[str, Any]) -> None:
        op = self._reduction(node, given)
        for out, x in zip(given["outputs"], given["inputs"], strict=True):
            self._scattered(out, x, op)

    def _joined(self, node: fx.Node, tensors: Sequence[fx.Node]) -> tuple[fx.Node, list[int]]:
        """Tensors one behind the other, and the sizes of dim 0."""
        vals = [_val(x) for x in tensors]
        if any(v is None or not v.dim() or v.shape[1:] != vals[0].shape[1:] for v in vals):
            raise ProgramError(
                f"node '{node.name}' communicates a list of tensors that cannot be concatenated",
                "use the form with one tensor",
            )
        sizes = [v.shape[0] for v in vals]
        return self._add("aten::cat", vals[0].new_empty([sum(sizes), *vals[0].shape[1:]]), list(tensors)), sizes

    def _given_out(self, whole: fx.Node, outs: Sequence[fx.Node], sizes: Sequence[int]) -> list[fx.Node]:
        """Copy the parts of a tensor along dim 0 where they belong."""
        parts = list(_val(whole).split(list(sizes)))
        pieces = self._add("aten::split_with_sizes", parts, whole, list(sizes))
        made = []
        for i, (out, part) in enumerate(zip(outs, parts, strict=True)):
            piece = self._graph.call_function(operator.getitem, (pieces, i))
            piece.meta["val"] = part
            made.append(self._copy(out, piece))
        return made

    def _allgather(self, node: fx.Node, given: dict[str, Any]) -> Any:
        results = []
        for outs, x in zip(given["output_tensors"], given["input_tensors"], strict=True):
            if _val(x) is None or not _val(x).dim():
                raise ProgramError(f"node '{node.name}' gathers a tensor without dims", "use all_gather_into_tensor")
            rows = _val(x).shape[0]
            val = _val(x).new_empty([rows * self._size, *_val(x).shape[1:]])
            whole = self._start("all_gather_into_tensor", val, x, self._size)
            results.append(self._given_out(whole, outs, [rows] * self._size))
        return results, None

    def _reduce_scatter(self, node: fx.Node, given: dict[str, Any]) -> Any:
        op, results = self._reduction(node, given), []
        for out, parts in zip(given["output_tensors"], given["input_tensors"], strict=True):
            joined, _ = self._joined(node, parts)
            results.append(self._start("reduce_scatter_tensor_out", _val(out), joined, op, self._size, out=out))
        return results, None

    def _alltoall_base(self, node: fx.Node, given: dict[str, Any]) -> None:
        out, x = given["output"], given["input"]
        received = list(given["output_split_sizes"]) or [_val(out).shape[0] // self._size] * self._size
        sent = list(given["input_split_sizes"]) or [_val(x).shape[0] // self._size] * self._size
        val = _val(x).new_empty([sum(received), *_val(x).shape[1:]])
        self._copy(out, self._start("all_to_all_single", val, x, received, sent))

    def _alltoall(self, node: fx.Node, given: dict[str, Any]) -> Any:
        joined, sent = self._joined(node, given["input_tensors"])
        received = [_val(out).shape[0] for out in given["output_tensors"]]
        val = _val(joined).new_empty([sum(received), *_val(joined).shape[1:]])
        whole = self._start("all_to_all_single", val, joined, received, sent)
        return self._given_out(whole, given["output_tensors"], received), None

    def _scatter(self, node: fx.Node, given: dict[str, Any]) -> Any:
        """As an all_to_all to which only the root contributes."""
        (out,), root = given["output_tensors"], given["root_rank"]
        if _val(out) is None or not _val(out).dim():
            raise ProgramError(
                f"node '{node.name}' scatters to a tensor without dims", "scatter tensors of one element"
            )
        if self._group.rank() == root:
            x, sent = self._joined(node, given["input_tensors"][0])
        else:
            x, sent = self._add("aten::slice.Tensor", _val(out)[:0], out, 0, 0, 0), [0] * self._size
        received = [_val(out).shape[0] if rank == root else 0 for rank in range(self._size)]
        return [self._copy(out, self._start("all_to_all_single", _val(out), x, received, sent))], None

    def _barrier(self, node: fx.Node, given: dict[str, Any]) -> None:
        self._add("p2p::barrier", None, self._name)

    def _send(self, node: fx.Node, given: dict[str, Any]) -> None:
        for x in given["tensors"]:
            val = None if _val(x) is None else _val(x).new_empty(0)
            self._wait(self._add("_c10d_functional::isend", val, x, given["dst"], given["tag"], self._name), val)

    def _recv(self, node: fx.Node, given: dict[str, Any]) -> None:
        for x in given["tensors"]:
            started = self._add("_c10d_functional::irecv", _val(x), x, given["src"], given["tag"], self._name)
            self._wait(started, _val(x))


def _val(value: Any) -> Any:
    """What is known of the tensor that a node gives."""
    return value.meta.get("val") if isinstance(value, fx.Node) else None


__all__ = ["REASONS", "to_functional_collectives"]
