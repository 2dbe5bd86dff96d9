"""Edits FX graphs so that every inserted or changed node carries the `meta["val"]` that its operands imply."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from tcverify.errors import InternalError
from tcverify.ops import ShapeError, TensorSpec, fake_tensor, infer, lookup, schema_of
from tcverify.program.graph import map_structure
from tcverify.program.specs import is_concrete, same_layout


def op_name(node: fx.Node) -> str:
    """Qualified name of the op that `node` calls, "" when it calls none."""
    return lookup(node.target).name if node.op == "call_function" else ""


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of a torch op, positional and keyword ones alike, by their names in its schema."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def declared_after(node: fx.Node) -> list[str]:
    """The names of nodes that `node` declares to follow (`meta["after"]`). Anything but a list of names is ignored."""
    declared = node.meta.get("after")
    return [name for name in declared if isinstance(name, str)] if isinstance(declared, (list, tuple)) else []


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Replace one argument of a call of a torch op, wherever it is passed."""
    if name in node.kwargs:
        node.update_kwarg(name, value)
        return
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    node.update_arg(names.index(name), value)


def known_spec(node: Any) -> TensorSpec | None:
    """Describe the one tensor that `node` produces, or None when its metadata is missing, symbolic or not a fake tensor."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return TensorSpec.of(val) if isinstance(val, FakeTensor) and is_concrete(val) else None


def infer_metadata(node: fx.Node) -> None:
    """Set `meta["val"]` of `node` to what its operands imply, in their fake mode; views share their operand's storage.

    Raises:
        ShapeError: the operands do not fit together.
        InternalError: no operand is a fake tensor.
    """
    implied, storages, sample = _implied(node)
    mode, device = sample.fake_mode, sample.device

    def fake(spec: Any) -> Any:
        if not isinstance(spec, TensorSpec):
            return spec
        tensor = fake_tensor(spec, mode, None if spec.alias is None else storages.get(spec.alias), device)
        if spec.alias is not None:
            storages.setdefault(spec.alias, tensor.untyped_storage())
        return tensor

    node.meta["val"] = map_structure(fake, implied)


def has_exact_metadata(node: fx.Node) -> bool:
    """Whether the recorded shapes, strides and dtypes of `node` are those that its operands' imply."""
    try:
        implied, _, _ = _implied(node)
    except (ShapeError, InternalError):
        return False
    return same_layout(implied, node.meta.get("val"))


def _implied(node: fx.Node) -> tuple[Any, dict[int, torch.UntypedStorage], FakeTensor]:
    """Infer what `node` produces from the metadata of its operands.

    Returns:
        Its specs, the operands' storages by the numbers that specs name, and one of the operands' fake tensors.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    numbers: dict[int, int] = {}
    count = itertools.count()
    sample: FakeTensor | None = None

    def describe(value: Any) -> Any:
        nonlocal sample
        if not isinstance(value, FakeTensor):
            return value
        sample = sample if sample is not None else value
        storage = value.untyped_storage()
        number = numbers.get(storage._cdata)
        if number is None:
            number = numbers[storage._cdata] = next(count)
            storages[number] = storage
        return TensorSpec.of(value, number)

    def operand(value: Any) -> Any:
        return map_structure(describe, value.meta.get("val")) if isinstance(value, fx.Node) else value

    args, kwargs = map_aggregate(node.args, operand), dict(map_aggregate(node.kwargs, operand))
    if sample is None:
        raise InternalError(f"node '{node.name}' has no operand with a fake tensor in its metadata")
    groups = getattr(node.graph.owning_module, "meta", {}).get("groups") or {}
    return infer(node.target, args, kwargs, count.__next__, groups), storages, sample


def erase_unused(graph: fx.Graph, candidates: Iterable[fx.Node]) -> None:
    """Erase the unused candidates, then nodes that only they used.

    Nothing else is touched: a value that was unused before the rewrite stays, since an unused collective is still a
    collective that other ranks wait for. Ops that write into an operand, and calls of unknown effect, stay too.
    """
    queue = list(dict.fromkeys(candidates))
    erased: set[fx.Node] = set()
    while queue:
        node = queue.pop()
        if node in erased or node.users or not _is_pure(node):
            continue
        operands = node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)
        queue += operands


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or lookup(node.target).run is None:
        return False
    schema = schema_of(node.target)
    return not (lookup(node.target).effect or (schema is not None and schema.is_mutable))
