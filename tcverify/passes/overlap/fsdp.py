"""Common parts of the three passes on graphs of FSDP: pattern matching, and correct metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from tcverify.ops import RESIZE, lookup
from tcverify.passes.editing import infer_metadata, named_arguments, op_name

COPY_IN = "fsdp::all_gather_copy_in"
COPY_OUT = "fsdp::split_with_sizes_copy"
CHUNK_CAT = "fsdp::chunk_cat"
COPY = "fsdp::copy_"
GATHER = "_c10d_functional::all_gather_into_tensor"
GATHER_OUT = "_c10d_functional::all_gather_into_tensor_out"
SCATTERS = ("_c10d_functional::reduce_scatter_tensor", "_c10d_functional::reduce_scatter_tensor_out")


def find_copy_in(node: Any) -> fx.Node | None:
    """The `all_gather_copy_in` whose first result, this rank's slice of the buffer, `node` is; None if it is something else."""
    if op_name_of(node) != "python::getitem" or node.args[1] not in (0, -2):
        return None
    source = node.args[0]
    return source if op_name_of(source) == COPY_IN else None


def op_name_of(node: Any) -> str:
    """Qualified name of the op that a node calls, "" for other nodes."""
    return op_name(node) if isinstance(node, fx.Node) else ""


def read_resize(node: fx.Node) -> tuple[Any, Any] | None:
    """(tensor, number of bytes) of a resizing of a storage; None for all other nodes."""
    if op_name(node) != RESIZE:
        return None
    found = named_arguments(node)
    return found.get("variable"), found.get("new_size")


def annotate_aliases(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Set the metadata of all nodes whose storage has changed: `changed` nodes, and their aliases."""
    touched = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        reached = node in touched or (touched.intersection(node.all_input_nodes) and lookup(node.target).aliases)
        if reached and any(True for _ in tensors_in(node.meta["val"])):
            infer_metadata(node)
            touched.add(node)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


__all__ = [
    "CHUNK_CAT", "COPY", "COPY_IN", "COPY_OUT", "GATHER", "GATHER_OUT", "SCATTERS", "annotate_aliases", "find_copy_in",
    "op_name_of", "read_resize",
]  # fmt: skip
