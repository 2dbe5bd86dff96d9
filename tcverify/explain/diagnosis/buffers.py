"""Allocations that others write into: what each part should contain, which writes are wrong, and what is not written."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.explain.diagnosis.versions import Versions, storage_root, written_operands
from tcverify.explain.relations.chunks import index_in_whole
from tcverify.explain.relations.storages import allocates, is_view
from tcverify.explain.relations.tensors import values_close
from tcverify.ops import TensorSpec

#: Allocations with more elements are not looked into part by part.
MAX_ELEMENTS = 1 << 18


def original_of_allocation(of: Versions, root: fx.Node) -> str | None:
    """The original's node whose value an allocation holds, in any shape."""
    relation = of.relations.get(root.name)
    return of.stands.get(root.name) or (relation.original if relation is not None else None)


def destination(node: fx.Node) -> fx.Node | None:
    """What a node writes into, if that belongs to an allocation."""
    into = next(written_operands(node), None)
    return into if into is not None and allocates(storage_root(into)) else None


def expected_write(of: Versions, node: fx.Node) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """What a node should write into an allocation: the original's node, its value, and the part of it that belongs there."""
    into = destination(node)
    if into is None:
        return None
    name = original_of_allocation(of, storage_root(into))
    whole = (of.before.ranks[of.rank].values or {}).get(name or "")
    places = _places(into)
    spec = storage_root(into).meta.get("val")
    if name is None or places is None or not isinstance(whole, torch.Tensor) or not isinstance(spec, TensorSpec):
        return None
    if whole.numel() != spec.numel:
        return None
    return name, whole, whole.reshape(-1)[places]


def writes_wrong_part(of: Versions, node: fx.Node) -> bool:
    """Whether a node writes into an allocation what does not belong there."""
    belongs, value = expected_write(of, node), _value(of, node)
    if belongs is None or value is None or belongs[2].numel() != value.numel():
        return False
    return not values_close(value.reshape(belongs[2].shape), belongs[2], of.measure)


def describe_wrong_place(of: Versions, node: fx.Node) -> str:
    """Where what a node writes belongs, if it belongs to the original's value, but elsewhere."""
    relation, belongs = of.relations.get(node.name), expected_write(of, node)
    if relation is None or relation.kind != "chunk" or belongs is None or not writes_wrong_part(of, node):
        return ""
    name, whole, part = belongs
    place = index_in_whole(part, whole, of.measure)
    there = f"chunk {place} of '{name}'" if place is not None else f"another part of '{name}'"
    return f"it is written to where {there} belongs"


def describe_unwritten(of: Versions, root: fx.Node) -> str:
    """The unwritten parts of an allocation, in words; "" if all of it is written."""
    instead = f", where the original has '{name}'" if (name := original_of_allocation(of, root)) is not None else ""
    writing = of.all_writers(root)
    if not writing:
        return f"nothing writes into it{instead}"
    shape = tuple(root.meta["val"].shape)
    missing = torch.ones(root.meta["val"].numel, dtype=torch.bool)
    for node in writing:
        into = next(operand for operand in written_operands(node) if storage_root(operand) is root)
        places = _places(into)
        if places is None:
            return ""
        missing[places.reshape(-1)] = False
    missing = missing.view(shape)
    if not bool(missing.any()):
        return ""
    for dim in range(len(shape)):
        rows = missing.movedim(dim, 0).reshape(shape[dim], -1)
        if bool((rows.all(1) == rows.any(1)).all()):
            listed = ", ".join(str(row) for row in rows.any(1).nonzero().flatten().tolist()[:8])
            return f"nothing writes into it at {listed} along dim {dim}{instead}"
    return f"nothing writes into {int(missing.sum())} of its {missing.numel()} elements{instead}"


def _value(of: Versions, node: fx.Node) -> torch.Tensor | None:
    value = (of.after.ranks[of.rank].values or {}).get(node.name)
    return value if isinstance(value, torch.Tensor) else None


@lru_cache(maxsize=4096)
def _places(value: fx.Node) -> torch.Tensor | None:
    """Which elements of an allocation a view of it shows; None if unknown."""
    chain: list[fx.Node] = []
    while not allocates(value):
        source = next((o for o in value.all_input_nodes if storage_root(o) is storage_root(value)), None)
        if source is None:
            return None
        if is_view(value):
            chain.append(value)
        value = source
    spec = value.meta.get("val")
    if not isinstance(spec, TensorSpec) or spec.numel > MAX_ELEMENTS:
        return None
    seen = torch.arange(spec.numel).view(tuple(spec.shape))
    for view in reversed(chain):
        seen = _shown(view, seen)
        if not isinstance(seen, torch.Tensor):
            return None
    return seen


def _shown(view: fx.Node, value: torch.Tensor) -> Any:
    def given(leaf: Any) -> Any:
        return value if isinstance(leaf, fx.Node) else leaf

    try:
        return view.target(*map_aggregate(view.args, given), **map_aggregate(dict(view.kwargs), given))  # type: ignore
    except Exception:  # noqa: BLE001 - sizes that are known on a rank alone: nothing is said
        return None


__all__ = [
    "describe_unwritten",
    "describe_wrong_place",
    "destination",
    "expected_write",
    "original_of_allocation",
    "writes_wrong_part",
]
