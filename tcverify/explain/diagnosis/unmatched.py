"""Ranks that do not meet: which call of a collective others lack, or make in another order; calls that meet another one."""

from __future__ import annotations

from torch import fx

from tcverify.execution import Run
from tcverify.explain.diagnosis.divergence import Divergence
from tcverify.explain.diagnosis.host_ir import find_unlike_post
from tcverify.explain.diagnosis.versions import Versions
from tcverify.explain.relations import Relation


def disagreement(of: Versions) -> Divergence | None:
    """The call that not all members of a group make, where the ranks' graphs say so."""
    if of.hosts:
        return find_unlike_post(of)
    calls = _calls(of)
    for original in (True, False):
        for rank, node in calls.items():
            for other in calls:
                if node is not None and other != rank and not _has(of, other, node, rewritten=True):
                    known = _has(of, other, node, rewritten=False)
                    if known is original:
                        shown = other if of.changed(other) and not of.changed(rank) else rank
                        return _unmet(rank, node, other, calls[other], known, shown)
    for rank, node in calls.items():
        for other, instead in calls.items():
            if node is not None and instead is not None and node != instead:
                text = f"what rank {rank} calls next, where rank {other} calls '{instead}' first"
                return Divergence(node, Relation("unmet", None, text, None, (rank,)), None, (), rank=rank)
    return None


def describe_crossed_call(of: Versions, node: fx.Node) -> str:
    """Another call of a member than the one that a node's call meets in the original; "" where it meets the same ones."""
    met, meets = _partners(of.before, of.rank, node.name), _partners(of.after, of.rank, node.name)
    for rank in sorted(met.keys() & meets.keys()):
        if met[rank] != meets[rank] and _has(of, rank, meets[rank], rewritten=False):
            return f"it meets rank {rank}'s '{meets[rank]}', where the original's meets rank {rank}'s '{met[rank]}'"
    return ""


def _partners(run: Run, rank: int, name: str) -> dict[int, str]:
    """The nodes whose calls the first call of a node meets, by rank: calls on one channel meet in the order of issue."""
    call = next((call for call in run.ranks[rank].calls if call.node == name), None)
    if call is None:
        return {}

    def issued(member: int) -> list[str]:
        return [one.node for one in run.ranks[member].calls if one.collective.channel == call.collective.channel]

    number = issued(rank).index(name)
    others = {other: issued(other) for other in call.collective.communicator if other != rank}
    return {other: names[number] for other, names in others.items() if number < len(names)}


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
    changed = [rank for rank in found if of.changed(rank)]
    return {rank: found[rank] for rank in [*changed, *(r for r in found if r not in changed)]}


def _has(of: Versions, rank: int, name: str, *, rewritten: bool) -> bool:
    program = of.rewritten if rewritten else of.program
    return any(node.name == name for node in program.graphs[program.ranks[rank].graph].nodes)


def _unmet(rank: int, node: str, other: int, instead: str | None, known: bool, shown: int) -> Divergence:
    meanwhile = f"it calls '{instead}' there" if instead is not None else "it ends"
    lacks = "no longer has it" if known else "has no such node"
    text = f"called by rank {rank}, but the graph of rank {other} {lacks}: {meanwhile}"
    return Divergence(node, Relation("unmet", None, text, None, (shown,)), None, (), rank=shown)
