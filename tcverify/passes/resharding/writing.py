"""Writes host IR into a graph: ops with the metadata that their operands imply, before a node."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from tcverify.ops import TensorSpec, fake_tensor, infer, new_fake_mode, resolve
from tcverify.ops.dialects.host_ir import CURRENT_STREAM, DEALLOCATE, SET_STREAM, STREAM, SYNCHRONIZE
from tcverify.passes.editing import infer_metadata


class HostWriter:
    """Inserts ops, one behind the other, before the node that it is set to.

    Args:
        graph: whose nodes have fake tensors in `meta["val"]`.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._mode: FakeTensorMode | None = None

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Insert before `node` inside the block."""
        with self.graph.inserting_before(node):
            yield

    def call(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of an op by qualified name. Raises `ShapeError` where the operands do not fit together."""
        name = op.split("::")[1].split(".")[0]
        node = self.graph.create_node("call_function", resolve(op), args, kwargs, name)
        known = (leaf for operand in node.all_input_nodes for leaf in pytree.tree_leaves(operand.meta.get("val")))
        if any(isinstance(leaf, FakeTensor) for leaf in known):
            infer_metadata(node)
        else:
            count = itertools.count()
            implied = infer(node.target, args, kwargs, count.__next__)
            described = isinstance(implied, TensorSpec)
            node.meta["val"] = fake_tensor(implied, self._fake_mode()) if described else implied
        return node

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Insert an allocation: its contents are uninitialised."""
        return self.call("aten::empty.memory_format", list(shape), dtype=dtype)

    def communicate(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a communication ("all_gather", …) and its wait. Returns the communication."""
        posted = self.call(f"host_ir::{op}", *args, **kwargs)
        self.wait(posted)
        return posted

    def wait(self, posted: fx.Node) -> fx.Node:
        """Make the current stream wait for a communication."""
        return self.call("host_ir::wait", posted)

    def current_stream(self) -> fx.Node:
        """The stream that is current here."""
        return self.call(CURRENT_STREAM)

    def stream(self, index: int) -> fx.Node:
        """The worker stream of an index."""
        return self.call(STREAM, index)

    def set_stream(self, stream: fx.Node) -> fx.Node:
        """Make a stream current."""
        return self.call(SET_STREAM, stream)

    def synchronize(self, stream: fx.Node) -> fx.Node:
        """Make the current stream wait for what is queued on another one."""
        return self.call(SYNCHRONIZE, stream)

    def deallocate(self, value: fx.Node) -> fx.Node:
        """Free the storage of a value."""
        return self.call(DEALLOCATE, value)

    def _fake_mode(self) -> FakeTensorMode:
        if self._mode is None:
            vals = (leaf for node in self.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
            sample = next((leaf for leaf in vals if isinstance(leaf, FakeTensor)), None)
            self._mode = sample.fake_mode if sample is not None else new_fake_mode()
        return self._mode


__all__ = ["HostWriter"]
