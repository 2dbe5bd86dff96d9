"""How the values of a rewritten program relate to those of the original: equal, a shard of it, an addend of it, unrelated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tcverify.execution import Run
from tcverify.ops import RECORD, lookup
from tcverify.program import Program

#: Two values are equal up to this share of the original's largest magnitude: reordered sums differ by less.
TOLERANCE = 1e-9

#: Original values that a rewritten one is compared with, beyond the one of its own name.
MAX_CANDIDATES = 16

#: A value that more nodes read says little about what these stand for.
MAX_READERS = 8

#: Most members of a group whose chunks are told apart.
MAX_MEMBERS = 16

RankValues = Mapping[int, Any]
Grouping = tuple[str, Mapping[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Relation:
    """How the value of a rewritten node relates to the original's, over all ranks that have the node.

    Attributes:
        kind: "equal", "reshaped", "shard", "gathered", "partial" or "reduced", which explain the value on every rank;
            "scaled", "wrong-shard", "permuted", "other-rank" and "unrelated" do not.
        original: the original's node, None when unrelated to any.
        text: the relation in words, to follow "it is".
        dim: the dim of a shard or gather.
        ranks: where an unexplained value differs.
    """

    kind: str
    original: str | None
    text: str
    dim: int | None = None
    ranks: tuple[int, ...] = ()

    @property
    def explained(self) -> bool:
        return self.kind in ("equal", "reshaped", "shard", "gathered", "partial", "reduced")


def relate(program: Program, before: Run, rewritten: Program, after: Run, rank: int) -> dict[str, Relation]:
    """Return the relation of every node of `rank`'s rewritten graph that was computed there, in graph order; not of tokens.

    A node is compared with the original's node of its name, then with what its operands lead to in the original. Cost is
    linear in nodes and ranks.
    """
    old_graph = program.graphs[program.ranks[rank].graph]
    new_graph = rewritten.graphs[rewritten.ranks[rank].graph]
    old = _by_node(old_graph, before)
    new = _by_node(new_graph, after)
    originals = {node.name: node for node in old_graph.nodes}
    groupings = _groupings(program, before, after)
    found: dict[str, Relation] = {}
    for node in new_graph.nodes:
        values = new.get(node.name)
        if values is None or rank not in values or node.op == "output" or _is_token(node):
            continue
        relation = None
        nearest = None
        for candidate in _candidates(node, originals, found):
            relation = _relation(values, old.get(candidate, {}), candidate, groupings)
            if relation is not None and relation.explained:
                break
            nearest = nearest or relation
        found[node.name] = relation if relation is not None and relation.explained else nearest or _unrelated(node, old)
    return found


def relation_between(program: Program, before: Run, after: Run, node: str, original: str) -> Relation | None:
    """How the value of one rewritten node relates to that of one original node; None where it does not."""
    new = {r.rank: r.values[node] for r in after.ranks if r.values is not None and node in r.values}
    old = {r.rank: r.values[original] for r in before.ranks if r.values is not None and original in r.values}
    return _relation(new, old, original, _groupings(program, before, after))


def _is_token(node: fx.Node) -> bool:
    """Whether a node records that an op is complete: its value says nothing."""
    return node.op == "call_function" and lookup(node.target).name == RECORD


def _by_node(graph: fx.Graph, run: Run) -> dict[str, dict[int, Any]]:
    """Per node name the values by rank."""
    found: dict[str, dict[int, Any]] = {node.name: {} for node in graph.nodes}
    for result in run.ranks:
        for name, value in (result.values or {}).items():
            if name in found:
                found[name][result.rank] = value
    return found


def _groupings(program: Program, before: Run, after: Run) -> list[Grouping]:
    """The groups over which values may be split: those of the mesh dims, then others that the collectives name."""
    found: list[Grouping] = []
    known: set[tuple[int, ...]] = set()
    for dim in program.mesh.dims:
        groups = {rank: group for group in dim.groups if 1 < len(group) <= MAX_MEMBERS for rank in group}
        if groups:
            found.append((f"over {dim.name} {_groups(groups)}".rstrip(), groups))
            known.update(groups.values())
    named = {call.collective.communicator for run in (before, after) for result in run.ranks for call in result.calls}
    rest: dict[int, tuple[int, ...]] = {}
    for group in sorted(named - known):
        if 1 < len(group) <= MAX_MEMBERS and not set(group) & rest.keys():
            rest.update(dict.fromkeys(group, group))
    if rest:
        found.append((f"over {_groups(rest) or 'groups of the graph'}", rest))
    return found


def _groups(groups: Mapping[int, tuple[int, ...]]) -> str:
    """The groups as text, where they are few."""
    return " ".join(str(list(group)) for group in dict.fromkeys(groups.values())) if len(groups) <= MAX_MEMBERS else ""


def _candidates(node: fx.Node, originals: Mapping[str, fx.Node], found: Mapping[str, Relation]) -> Iterator[str]:
    """Names of original nodes that a rewritten node may stand for: its namesake, what its operands stand for, and what
    the original makes of that."""
    seen: set[str] = set()
    known = [found[o.name] for o in node.all_input_nodes if o.name in found]
    roots = [originals[r.original] for r in known if r.explained and r.original is not None]
    users = [user for root in roots if len(root.users) <= MAX_READERS for user in root.users]
    further = [user for near in users if len(near.users) <= MAX_READERS for user in near.users]
    namesake = [originals[node.name]] if node.name in originals else []
    for candidate in (*namesake, *roots, *users, *further):
        if candidate.op != "output" and candidate.name not in seen:
            seen.add(candidate.name)
            yield candidate.name
            if len(seen) > MAX_CANDIDATES:
                return


def _unrelated(node: fx.Node, old: Mapping[str, RankValues]) -> Relation:
    if old.get(node.name):
        return Relation("unrelated", node.name, f"unrelated to the original's '{node.name}'")
    return Relation("unrelated", None, "unrelated to any value of the original near it")


def _relation(values: RankValues, expected: RankValues, name: str, groupings: Sequence[Grouping]) -> Relation | None:
    """How one value relates to one of the original, or None."""
    ranks = sorted(values.keys() & expected.keys())
    if not ranks or len(ranks) < len(values):
        return None
    first, other = values[ranks[0]], expected[ranks[0]]
    if isinstance(first, (tuple, list)):
        return _tuple_relation(values, expected, name, groupings, ranks)
    if not isinstance(first, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = all(type(values[r]) is type(expected[r]) and values[r] == expected[r] for r in ranks)
        return Relation("equal", name, f"equal to the original's '{name}'") if same else None
    if not all(isinstance(v, torch.Tensor) for side in (values, expected) for v in side.values()):
        return None
    differing = tuple(r for r in ranks if not _same(values[r], expected[r]))
    if not differing:
        return Relation("equal", name, f"equal to the original's '{name}'")
    if all(_same(values[r].reshape(-1), expected[r].reshape(-1)) for r in ranks):
        return Relation("reshaped", name, f"the original's '{name}' in another shape")
    new, old = _squeezed(values, expected)
    for where, groups in groupings:
        if groups.keys() >= values.keys() and groups.keys() <= expected.keys():
            found = _group_relation(new, old, name, where, groups)
            if found is not None:
                return found
    return _twisted(values, expected, name, differing, groupings)


def _tuple_relation(
    values: RankValues, expected: RankValues, name: str, groupings: Sequence[Grouping], ranks: Sequence[int]
) -> Relation | None:
    length = len(values[ranks[0]])
    sides = (values, expected)
    if not all(isinstance(side[r], (tuple, list)) and len(side[r]) == length for side in sides for r in side):
        return None
    parts = []
    for i in range(length):
        part = _relation({r: values[r][i] for r in values}, {r: expected[r][i] for r in expected}, name, groupings)
        if part is None or not part.explained:
            return None
        parts.append(part)
    if len({p.kind for p in parts}) == 1:
        return parts[0]
    text = "; ".join(f"in element {i} {p.text}" for i, p in enumerate(parts))
    return Relation("reshaped", name, text)


def _squeezed(values: RankValues, expected: RankValues) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Make the number of dims agree where one side has leading dims of size 1."""

    def drop(value: torch.Tensor, rank: int, other: RankValues) -> torch.Tensor:
        wanted = other[rank].dim() if rank in other else value.dim()
        while value.dim() > wanted and value.shape[0] == 1:
            value = value[0]
        return value

    return {r: drop(v, r, expected) for r, v in values.items()}, {r: drop(v, r, values) for r, v in expected.items()}


def _group_relation(
    new: Mapping[int, torch.Tensor],
    old: Mapping[int, torch.Tensor],
    name: str,
    where: str,
    groups: Mapping[int, tuple[int, ...]],
) -> Relation | None:
    ranks = sorted(new)
    rank = ranks[0]
    for dim in _dims_that_differ(new[rank], old[rank]):
        if all(_same(new[r], _chunk(old[r], dim, len(groups[r]), groups[r].index(r))) for r in ranks):
            return Relation("shard", name, f"a shard of the original's '{name}' along dim {dim} {where}", dim)
        if all(
            _joins([old[m] for m in groups[r]], dim) and _same(new[r], torch.cat([old[m] for m in groups[r]], dim))
            for r in ranks
        ):
            return Relation("gathered", name, f"the original's '{name}' gathered along dim {dim} {where}", dim)
        positions = {r: _position(new[r], old[r], dim, len(groups[r])) for r in ranks}
        wrong = tuple(r for r in ranks if positions[r] != groups[r].index(r))
        if all(position is not None for position in positions.values()):
            r = wrong[0]
            text = (
                f"shard {positions[r]} of the original's '{name}' along dim {dim} on rank {r}, "
                f"whose position {where} is {groups[r].index(r)}"
            )
            return Relation("wrong-shard", name, text, dim, wrong)
    if new[rank].shape != old[rank].shape:
        return None
    whole = all(m in new for r in ranks for m in groups[r])
    if whole and all(_same(_sum([new[m] for m in groups[r]]), old[r]) for r in ranks):
        return Relation("partial", name, f"a partial sum of the original's '{name}' {where}")
    varying = not all(_same(old[m], old[r]) for r in ranks for m in groups[r])
    if varying and all(_same(new[r], _sum([old[m] for m in groups[r]])) for r in ranks):
        return Relation("reduced", name, f"the sum of the original's '{name}' {where}")
    return None


def _twisted(
    values: RankValues, expected: RankValues, name: str, differing: tuple[int, ...], groupings: Sequence[Grouping]
) -> Relation | None:
    """Relations of equal shapes that no sound rewrite leaves behind, but that say what went wrong."""
    if any(values[r].shape != expected[r].shape or not values[r].is_floating_point() for r in values):
        return None
    rank = differing[0]
    for where, groups in groupings:
        if rank not in groups:
            continue
        group = groups[rank]
        n = len(group)
        for factor, words in ((float(n), f"{n} times"), (1.0 / n, f"1/{n} of")):
            if all(_same(values[r], expected[r] * factor) for r in differing):
                return Relation("scaled", name, f"{words} the original's '{name}' {where}", None, differing)
        order = next((o for d in range(values[rank].dim()) if (o := _order(values[rank], expected[rank], d, n))), None)
        if order is not None:
            dim, chunks = order
            text = f"the original's '{name}' with its chunks along dim {dim} in order {chunks} on rank {rank} {where}"
            return Relation("permuted", name, text, dim, differing)
        for member in group:
            if member != rank and member in expected and _same(values[rank], expected[member]):
                text = f"on rank {rank} what the original's '{name}' is on rank {member}"
                return Relation("other-rank", name, text, None, differing)
    return None


def _same(value: torch.Tensor, expected: torch.Tensor) -> bool:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return bool(torch.equal(value, expected))
    scale = float(expected.abs().max())
    if math.isfinite(scale):
        return float((value - expected).abs().max()) <= TOLERANCE * scale
    return bool(torch.allclose(value, expected, rtol=TOLERANCE, atol=0.0, equal_nan=True))


def _dims_that_differ(value: torch.Tensor, expected: torch.Tensor) -> list[int]:
    """The one dim whose size differs, if all others agree."""
    if value.dim() != expected.dim():
        return []
    differing = [i for i, (a, b) in enumerate(zip(value.shape, expected.shape, strict=True)) if a != b]
    return differing if len(differing) == 1 else []


def _chunk(value: torch.Tensor, dim: int, parts: int, position: int) -> torch.Tensor:
    chunks = value.chunk(parts, dim)
    return chunks[position] if position < len(chunks) else value.narrow(dim, 0, 0)


def _joins(values: Sequence[torch.Tensor], dim: int) -> bool:
    shapes = {(*v.shape[:dim], *v.shape[dim + 1 :]) for v in values}
    return len(shapes) == 1 and len({v.dtype for v in values}) == 1


def _position(value: torch.Tensor, whole: torch.Tensor, dim: int, parts: int) -> int | None:
    """Which chunk of a value this is."""
    if value.dim() != whole.dim():
        return None
    return next((i for i, chunk in enumerate(whole.chunk(parts, dim)) if _same(value, chunk)), None)


def _order(value: torch.Tensor, expected: torch.Tensor, dim: int, parts: int) -> tuple[int, list[int]] | None:
    """In which order the chunks of `expected` stand in `value`, where that is all that differs."""
    if parts > value.shape[dim] or value.shape[dim] % parts:
        return None
    positions = [_position(chunk, expected, dim, parts) for chunk in value.chunk(parts, dim)]
    known = [p for p in positions if p is not None]
    return (dim, known) if len(known) == parts else None


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({v.shape for v in values}) > 1:
        return torch.empty(0)
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


__all__ = ["Relation", "relate", "relation_between"]
