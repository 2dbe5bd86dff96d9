"""Ranks that do not meet: which call of a collective others lack, or make in another order."""

from __future__ import annotations

from tcverify.diagnosis.divergence import Divergence
from tcverify.diagnosis.versions import Versions
from tcverify.ops import lookup, schema_of
from tcverify.program import RankConstant
from tcverify.program.graph import constant_value, same_structure
from tcverify.relations import Relation


def disagreement(of: Versions) -> Divergence | None:
    """The call that not all members of a group make, where the ranks' graphs say so."""
    calls = _calls(of)
    for original in (True, False):
        for rank, node in calls.items():
            for other in calls:
                if node is not None and other != rank and not _joins(of, rank, other, node):
                    known = _has(of, other, node, rewritten=False)
                    if known is original:
                        shown = other if _changed(of, other) and not _changed(of, rank) else rank
                        return _unmet(rank, node, other, calls[other], known, shown)
    for rank, node in calls.items():
        for other, instead in calls.items():
            if node is not None and instead is not None and node != instead:
                text = f"what rank {rank} calls next, where rank {other} calls '{instead}' first"
                return Divergence(node, Relation("unmet", None, text, None, (rank,)), None, (), rank=rank)
    return None


def _calls(of: Versions) -> dict[int, str | None]:
    """Where the ranks that disagree stand, by rank: the node of their call; None for a rank that has finished.

    Ranks whose graphs the pass has changed come first: there is the cause.
    """
    found: dict[int, str | None] = {}
    if of.after.mismatch is not None:
        found = {rank: call.node for rank, call in sorted(of.after.mismatch[1].items())}
    elif of.after.hang is not None:
        found = {wait.rank: wait.call.node for wait in of.after.hang.waits}
        if of.after.hang.finished is not None:
            found[of.after.hang.finished] = None
    changed = [rank for rank in found if _changed(of, rank)]
    return {rank: found[rank] for rank in [*changed, *(r for r in found if r not in changed)]}


def _changed(of: Versions, rank: int) -> bool:
    """Whether the pass has changed a rank's graph."""
    before, after = (p.graphs[p.ranks[rank].graph] for p in (of.program, of.rewritten))
    return not same_structure(before, after)


def _has(of: Versions, rank: int, name: str, *, rewritten: bool) -> bool:
    program = of.rewritten if rewritten else of.program
    return any(node.name == name for node in program.graphs[program.ranks[rank].graph].nodes)


def _joins(of: Versions, rank: int, other: int, name: str) -> bool:
    """Whether another rank's rewritten graph has what a rank's node calls for. In host IR, where ranks have graphs of their own,
    as many communications of that kind with the same team as the rank's graph has up to there; else a node of that name."""
    mine = _communications(of, rank)
    if name not in mine:
        return _has(of, other, name, rewritten=True)
    wanted = mine[name]
    earlier = list(mine)[: list(mine).index(name) + 1]
    needed = sum(mine[node] == wanted for node in earlier)
    return sum(found == wanted for found in _communications(of, other).values()) >= needed


def _communications(of: Versions, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The communications of host IR in a rank's rewritten graph: node → kind and team; of messages, sender and receiver."""
    binding = of.rewritten.ranks[rank]
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for node in of.rewritten.graphs[binding.graph].nodes:
        op = lookup(node.target) if node.op == "call_function" else None
        if op is None or op.phase != "start" or not op.name.startswith("host_ir::"):
            continue
        schema = schema_of(node.target)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        known = {
            key: constant_value(value, binding.constants) if isinstance(value, RankConstant) else value
            for key, value in given.items()
            if key in ("team", "peer")
        }
        kind = op.name.removeprefix("host_ir::")
        if kind in ("send", "recv"):
            peer = known["peer"]
            found[node.name] = "message", (rank, peer) if kind == "send" else (peer, rank)
        else:
            found[node.name] = kind, tuple(known["team"])
    return found


def _unmet(rank: int, node: str, other: int, instead: str | None, known: bool, shown: int) -> Divergence:
    meanwhile = f"it calls '{instead}' there" if instead is not None else "it comes to its end"
    lacks = "no longer has it" if known else "has no such node"
    text = f"called by rank {rank}, but the graph of rank {other} {lacks}: {meanwhile}"
    return Divergence(node, Relation("unmet", None, text, None, (shown,)), None, (), rank=shown)
