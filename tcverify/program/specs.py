"""Specs of the nodes of a graph, with the storage that each value has when the graph runs.

They are derived from the inputs by shape inference, which runs ops and inspects the results. Recorded storage is trusted
only for inputs: a record may keep the storage of an operand that a pass has replaced, or separate the result of an op from
what it writes into.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import TensorSpec, infer
from tcverify.ops.leaves import leaves
from tcverify.program.graph import RankConstant, constant_value, map_structure

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class InferredSpecs:
    """What the nodes of a graph produce. Nodes are added in graph order; equal numbers in `alias` mean one storage.

    Attributes:
        of: by node, a spec, or a tuple or list of specs; scalars are unchanged.
        fresh: returns an unused storage number.

    Args:
        groups: of the rank that runs the graph, by name; see `ops.infer`.
    """

    def __init__(self, groups: Mapping[str, Sequence[int]] = _NOTHING) -> None:
        self.of: dict[fx.Node, Any] = {}
        self.fresh = itertools.count().__next__
        self._groups = groups
        self._numbers: dict[int, int] = {}  # by the address of a recorded storage

    def keep(self, node: fx.Node, spec: Any) -> None:
        """Set the spec of a node."""
        self.of[node] = spec

    def keep_apart(self, node: fx.Node, recorded: Any) -> Any:
        """Set the spec of a node to the recorded one, with new storage for each tensor; returns it."""
        spec = self.of[node] = map_structure(self._apart, recorded)
        return spec

    def keep_recorded(self, node: fx.Node, recorded: Any) -> None:
        """Set the spec of an input to the recorded one: tensors that share storage keep sharing it. None for values that are not
        `is_concrete`."""
        self.of[node] = map_structure(self._recorded, recorded)

    def infer(self, node: fx.Node, constants: Mapping[str, Any] = _NOTHING) -> Any:
        """Return what a call produces, given that its operands are known.

        Raises:
            ShapeError: the operands do not fit together.
            UnsupportedOp: the op is in no table, or the size of its group is unknown.
        """

        def known(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.of[value]
            return constant_value(value, constants) if isinstance(value, RankConstant) else value

        kwargs = dict(map_aggregate(node.kwargs, known)) if node.kwargs else {}
        return infer(node.target, map_aggregate(node.args, known), kwargs, self.fresh, self._groups)

    def _apart(self, leaf: Any) -> Any:
        return leaf.stored(self.fresh()) if isinstance(leaf, TensorSpec) else leaf

    def _recorded(self, leaf: Any) -> Any:
        if not is_concrete(leaf):
            return None
        if not isinstance(leaf, torch.Tensor):
            return leaf
        address = leaf.untyped_storage()._cdata
        if address not in self._numbers:
            self._numbers[address] = self.fresh()
        return TensorSpec.of(leaf, self._numbers[address])


def is_concrete(leaf: Any) -> bool:
    """Whether a value is not a symbolic number, and not a symbolic or non-strided tensor.

    Evaluating a symbolic size would specialise it permanently.
    """
    if not isinstance(leaf, torch.Tensor):
        return not isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))
    if leaf.layout is not torch.strided:
        return False
    return all(type(size) is int for size in (*leaf.shape, *leaf.stride(), leaf.storage_offset()))


def storages_of(value: Any) -> tuple[int, ...]:
    """Return the storages of the specs in a nested value, each once."""
    if isinstance(value, TensorSpec):
        return () if value.alias is None else (value.alias,)
    if not isinstance(value, (tuple, list, dict)):
        return ()
    return tuple(dict.fromkeys(spec.alias for spec in leaves(value, TensorSpec) if spec.alias is not None))


def same_layout(first: Any, second: Any) -> bool:
    """Whether two values, specs or tensors, have the same shapes, relevant strides and dtypes; scalars must be equal."""
    if isinstance(first, TensorSpec) and isinstance(second, TensorSpec):
        if first.shape == second.shape and first.stride == second.stride:  # nearly always
            return first.dtype is second.dtype
        return first.layout == second.layout
    return bool(map_structure(_layout, first) == map_structure(_layout, second))


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        leaf = TensorSpec.of(leaf) if is_concrete(leaf) else None
    return leaf.layout if isinstance(leaf, TensorSpec) else leaf


__all__ = ["InferredSpecs", "is_concrete", "same_layout", "storages_of"]
