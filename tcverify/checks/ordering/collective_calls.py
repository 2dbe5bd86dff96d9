"""Calls: which collectives of which communicators a rank's graph issues, and in which order, as far as the graph shows it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import Op, lookup, schema_of
from tcverify.program import Program, RankConstant
from tcverify.program.finding import Finding
from tcverify.program.graph import constant_value

CHECK = "order"

#: Kinds of collectives, as contained in the names of ops; the first match counts.
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "alltoall")


@dataclass(frozen=True, slots=True)
class OrderedCall:
    """One call: the node, its kind, its group as text, and whether it blocks until its peers take part."""

    node: str
    kind: str
    group: str
    blocks: bool = False


def calls_of(program: Program, rank: int) -> tuple[list[OrderedCall], list[OrderedCall]]:
    """The collectives of a rank, and its ops with side effects, each in graph order. Coalesced collectives count one by one."""
    binding = program.ranks[rank]
    collectives: list[OrderedCall] = []
    effects: list[OrderedCall] = []
    for node, op in _calling(program.graphs[binding.graph]):
        given = _given(node, binding.constants)
        if op.effect:
            blocks = op.phase is None and bool(op.resources) and (op.group is not None or "peer" in given)
            effects.append(OrderedCall(node.name, op.name.split("::")[-1], _group(op, given, program, rank), blocks))
            continue
        kind = next((kind for kind in _KINDS if kind in op.name), op.name.split("::")[-1])
        first = next(iter(given.values()), None)
        number = len(first) if op.phase == "start" and isinstance(first, (list, tuple)) else 1
        collectives += [OrderedCall(node.name, kind, _group(op, given, program, rank))] * number
    return collectives, effects


def _calling(graph: fx.Graph) -> Iterator[tuple[fx.Node, Op]]:
    """The nodes that communicate or have side effects, with their ops. Positions are cached: programs do not change."""
    found = _CALLING.get(graph)
    if found is None:
        ops = [(i, lookup(node.target)) for i, node in enumerate(graph.nodes) if node.op == "call_function"]
        found = {i: op for i, op in ops if (op.collective or op.effect) and op.phase != "wait"}
        _CALLING[graph] = found
    for position, node in enumerate(graph.nodes if found else ()):
        if position in found:
            yield node, found[position]


#: By position in the graph: nodes would keep the graph, and so the cache entry, alive forever.
_CALLING: weakref.WeakKeyDictionary[fx.Graph, dict[int, Op]] = weakref.WeakKeyDictionary()


def _given(node: fx.Node, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; nodes are kept."""

    def known(value: Any) -> Any:
        return constant_value(value, constants) if isinstance(value, RankConstant) else value

    schema = schema_of(node.target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return {**dict(zip(names, map_aggregate(node.args, known), strict=False)), **map_aggregate(node.kwargs, known)}


def _group(op: Op, given: Mapping[str, Any], program: Program, rank: int) -> str:
    if op.group is not None:
        name = given.get(op.group)
        ranks = next((list(dim.group(rank)) for dim in program.mesh.dims if dim.name == name), None)
        return f"'{name}'" if ranks is None else f"'{name}' {ranks}"
    if "peer" in given:
        return f"with rank {given['peer']}"
    group = given.get("rank_group", given.get("team"))
    if group is None and "source_rank" in given:
        group = [given["source_rank"], given.get("target_rank")]
    return str(list(group)) if isinstance(group, (list, tuple)) else str(group)


def _different(original: Program, rewritten: Program) -> Iterator[int]:
    """The lowest of the ranks that run the same graphs, before the pass and after it."""
    seen = set()
    for rank in range(original.world_size):
        old, new = original.ranks[rank], rewritten.ranks[rank]
        key = (old.graph, new.graph, repr(sorted(old.constants.items())), repr(sorted(new.constants.items())))
        if key not in seen:
            seen.add(key)
            yield rank


def reordered_collectives(original: Program, rewritten: Program) -> Finding | None:
    """The first collective of a communicator, or op with a side effect, that is out of order, on the lowest rank."""
    for rank in _different(original, rewritten):
        (before, before_effects), (after, after_effects) = calls_of(original, rank), calls_of(rewritten, rank)
        for group in dict.fromkeys(call.group for call in (*before, *after)):
            mine, theirs = ([call for call in calls if call.group == group] for calls in (before, after))
            finding = _compare(mine, theirs, f"collective of group {group}", rank)
            if finding is not None:
                return finding
        finding = _compare(before_effects, after_effects, "op with an effect", rank)
        if finding is not None:
            return finding
    return None


def changed_effects(original: Program, rewritten: Program) -> Finding | None:
    """An op with a side effect that a rank no longer runs, or runs more often, whatever the pass promises; on the lowest rank.

    Asynchronous sends and receives are left out: one op can replace several. So are ops on layouts and host
    IR, which lowerings replace.
    """
    graphs = (*original.graphs, *rewritten.graphs)
    if not any(op.effect for graph in graphs for _, op in _calling(graph)):
        return None
    for rank in _different(original, rewritten):
        before, after = (
            [call for call in calls_of(program, rank)[1] if call.blocks] for program in (original, rewritten)
        )
        had, has = (Counter((call.kind, call.group) for call in calls) for calls in (before, after))
        for what in dict.fromkeys([*had, *has]):
            if had[what] != has[what]:
                kind, group = what
                title = f"rank {rank} runs {kind} ({group}) {has[what]} times, and ran it {had[what]} times"
                calls = [call for call in (after if has[what] else before) if (call.kind, call.group) == what]
                lines = [f"{when}: {_listed(calls)}" for when, calls in (("before", before), ("after", after))]
                return Finding("changed-effects", CHECK, title, "\n".join(lines), calls[-1].node, rank)
    return None


def _listed(calls: list[OrderedCall]) -> str:
    return ", ".join(f"{call.node} ({call.kind} {call.group})" for call in calls) or "none"


def _compare(before: list[OrderedCall], after: list[OrderedCall], what: str, rank: int) -> Finding | None:
    same_nodes = {call.node for call in before} == {call.node for call in after}
    for number, (mine, theirs) in enumerate(zip(before, after, strict=False)):
        if (mine.kind, mine.group) == (theirs.kind, theirs.group) and (not same_nodes or mine.node == theirs.node):
            continue
        title = (
            f"'{theirs.node}' ({theirs.kind}) is now {what} number {number + 1}, where '{mine.node}' ({mine.kind}) was"
        )
        return _finding(title, before, after, number, theirs.node, rank)
    if len(before) == len(after):
        return None
    number = min(len(before), len(after))
    if len(before) > len(after):
        call = before[number]
        return _finding(
            f"{what} number {number + 1}, '{call.node}' ({call.kind}), is missing", before, after, number, None, rank
        )
    call = after[number]
    return _finding(f"'{call.node}' ({call.kind}) is an additional {what}", before, after, number, call.node, rank)


#: Number of calls that a detail shows around the call in question.
_AROUND = 4


def _finding(
    title: str, before: list[OrderedCall], after: list[OrderedCall], number: int, node: str | None, rank: int
) -> Finding:
    lines = ["the pass promises that the collectives of each communicator, and ops with an effect, keep their order"]
    start = max(0, number - _AROUND)
    for when, calls in (("before", before), ("after", after)):
        shown = [f"{call.kind} '{call.node}'" for call in calls[start : number + _AROUND]]
        more = " …" if len(calls) > number + _AROUND else ""
        lines.append(f"{when}: {'… ' if start else ''}{', '.join(shown)}{more}")
    data = {
        "number": number + 1,
        "before": [c.node for c in before[number : number + 1]],
        "after": [c.node for c in after[number : number + 1]],
    }
    return Finding("reordered-collectives", CHECK, title, "\n".join(lines), node, rank, data)


__all__ = ["OrderedCall", "calls_of", "changed_effects", "reordered_collectives"]
