"""Where in a program to search first for the cause of a finding: hints that a verdict gives for free.

Only a heuristic: if nothing is found near a suspect, `reduce` searches everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.program import Finding, Program, RankBinding
from tcverify.shrink.graph.named_groups import held_value
from tcverify.verification.verifier import Verdict

#: Steps along the flow of data that are taken from a node of the rewritten graph to nodes that the original has.
FAR = 4

#: Suspects that are named.
MOST = 6

#: Names as sentences quote them, and as fx prints them.
_QUOTED = re.compile(r"'([A-Za-z_]\w*)'|%([A-Za-z_]\w*)")


def suspects_of(verdict: Verdict, kind: str) -> tuple[str, ...]:
    """The names of nodes of the original program near which findings of a kind show, the likeliest first.

    They are the node that the finding names, or the nearest ones that the original has too; nodes that its text quotes; and the
    first, the last and the middle one of those that the pass has redefined or taken away.
    """
    original, rewritten = verdict.pair.original, verdict.pair.rewritten
    found: dict[str, None] = {}
    for finding in verdict.findings:
        if finding.kind == kind:
            rank = finding.rank if finding.rank is not None and 0 <= finding.rank < original.world_size else 0
            found.update(dict.fromkeys(_named(finding, original, rewritten, rank)))
    if rewritten is not None and rewritten is not original:
        found.update(dict.fromkeys(_some(_changed(original, rewritten))))
    return tuple(found)[:MOST]


def _nodes(program: Program, rank: int) -> dict[str, fx.Node]:
    return {node.name: node for node in program.graphs[program.ranks[rank].graph].nodes}


def _named(finding: Finding, original: Program, rewritten: Program | None, rank: int) -> Iterator[str]:
    """The nodes that a finding names."""
    ranks = dict.fromkeys((rank, *range(original.world_size)))
    known = set().union(*(_nodes(original, number) for number in ranks))
    if finding.node is not None:
        graphs = [_nodes(rewritten, number) for number in ranks] if rewritten is not None else []
        start = next((nodes[finding.node] for nodes in graphs if finding.node in nodes), None)
        if finding.node in known:
            yield finding.node
        elif start is not None:
            yield from _nearest(start, known)
    for match in _QUOTED.finditer(f"{finding.title}\n{finding.detail}"):
        name = match[1] or match[2]
        if name in known:
            yield name


def _nearest(start: fx.Node, known: set[str]) -> Iterator[str]:
    """The nodes nearest to one, along the flow of data, that have names which are known."""
    seen, level = {start}, [start]
    for _ in range(FAR):
        level = [
            n for node in level for n in (*node.all_input_nodes, *node.users) if n.op != "output" and n not in seen
        ]
        level = list(dict.fromkeys(level))
        seen.update(level)
        found = [node.name for node in level if node.name in known and node.op != "placeholder"]
        if found:
            yield from found
            return


def _changed(original: Program, rewritten: Program) -> list[str]:
    """The calls of the original that the rewritten program has otherwise, or not at all, in order."""
    found: dict[str, None] = {}
    pairs = {(a.graph, b.graph): (a, b) for a, b in zip(original.ranks, rewritten.ranks, strict=True)}
    for before, after in pairs.values():
        made = _definitions(rewritten, after)
        for name, definition in _definitions(original, before).items():
            if made.get(name) != definition:
                found[name] = None
    return list(found)


def _definitions(program: Program, binding: RankBinding) -> dict[str, tuple[object, str]]:
    """What the calls of a graph compute, from operands by name, as a rank runs it."""

    def leaf(value: Any) -> Any:
        return f"%{value.name}" if isinstance(value, fx.Node) else held_value(value, binding.constants)

    def definition(node: fx.Node) -> tuple[object, str]:
        return node.target, repr((map_aggregate(node.args, leaf), dict(map_aggregate(node.kwargs, leaf))))

    return {n.name: definition(n) for n in program.graphs[binding.graph].nodes if n.op.startswith("call")}


def _some(names: list[str]) -> list[str]:
    return [names[0], names[-1], names[len(names) // 2]] if names else []


__all__ = ["suspects_of"]
