"""Values put side by side, as a bucket of several collectives has them, and what is computed of all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tcverify.explain.relations.relation import Relation
from tcverify.explain.relations.tensors import Values
from tcverify.ops import lookup

#: Limits on values that are tracked together, and on those that are listed.
MAX_PARTS, MAX_TOLD = 32, 3

#: How a part of a value relates to the original, when the part of the operand that it comes from relates to it like that.
PartRelation = Callable[[Values, Relation], Relation | None]


def bundle(
    node: fx.Node, new: Mapping[str, Mapping[int, Any]], found: Mapping[str, Relation], related: PartRelation
) -> Relation | None:
    """Relate an inserted node part by part: a concatenation of explained values, or what has the shape of such a one it reads.

    Args:
        new: values of the rewritten nodes, by rank.
        found: relations of earlier nodes.
        related: relates a part.
    """
    values = new[node.name]
    if not all(isinstance(value, torch.Tensor) for value in values.values()):
        return None
    bundles = [found[o.name] for o in node.all_input_nodes if o.name in found and found[o.name].kind == "bundle"]
    if len(bundles) == 1:
        return _followed(bundles[0], values, related)
    return None if bundles else _concatenated(node, new, found)


def _concatenated(
    node: fx.Node, new: Mapping[str, Mapping[int, Any]], found: Mapping[str, Relation]
) -> Relation | None:
    if node.op != "call_function" or lookup(node.target).name.split("::")[-1].split(".")[0] != "cat":
        return None
    operands = node.args[0] if node.args else None
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(operands, (list, tuple)) or not 1 < len(operands) <= MAX_PARTS or not isinstance(dim, int):
        return None
    parts: list[Relation] = []
    sizes: list[int] = []
    for operand in operands:
        relation = found.get(operand.name) if isinstance(operand, fx.Node) else None
        if relation is None or not relation.explained or relation.kind == "bundle":
            return None
        values = new[operand.name] if isinstance(operand, fx.Node) else {}
        lengths = {v.shape[dim] if -v.dim() <= dim < v.dim() else -1 for v in values.values()}
        if len(lengths) != 1:
            return None
        parts.append(relation)
        sizes.append(lengths.pop())
    return _of_parts(parts, sizes, dim % next(iter(new[node.name].values())).dim())


def _followed(operand: Relation, values: Values, related: PartRelation) -> Relation | None:
    """What is as long as what it reads, with each part related as the operand's part leads to."""
    dim = operand.dim or 0
    if any(value.dim() <= dim or value.shape[dim] != sum(operand.sizes) for value in values.values()):
        return None
    parts: list[Relation] = []
    start = 0
    for size, part in zip(operand.sizes, operand.parts, strict=True):
        relation = related({rank: value.narrow(dim, start, size) for rank, value in values.items()}, part)
        if relation is None:
            return None
        parts.append(relation)
        start += size
    return _of_parts(parts, operand.sizes, dim)


def _of_parts(parts: Sequence[Relation], sizes: Sequence[int], dim: int) -> Relation:
    told = "; ".join(part.text for part in parts[:MAX_TOLD])
    more = f"; and {len(parts) - MAX_TOLD} more" if len(parts) > MAX_TOLD else ""
    text = f"several values side by side along dim {dim}: {told}{more}"
    loses = any(part.loses for part in parts)
    return Relation("bundle", None, text, dim, loses=loses, parts=tuple(parts), sizes=tuple(sizes))
