"""Ranks in host IR that do not meet: their graphs differ, and names say nothing across them. Who posts what how often does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from tcverify.execution import CollectiveCall
from tcverify.explain.diagnosis.communications import fault
from tcverify.explain.diagnosis.divergence import Divergence
from tcverify.explain.diagnosis.versions import Versions
from tcverify.explain.relations import Relation
from tcverify.explain.relations.storages import is_communication
from tcverify.ops import Collective, lookup
from tcverify.program.graph import RankConstant, constant_value


def find_unlike_post(of: Versions) -> Divergence | None:
    """The communication that not all of its team post alike, or at all."""
    if of.after.mismatch is not None:
        return _unlike(of, of.after.mismatch[1])
    hang = of.after.hang
    if hang is None:
        return None
    for wait in hang.waits:
        call = wait.call
        mine = _posted(of, wait.rank, call.collective)
        for other in call.collective.communicator:
            theirs = _posted(of, other, call.collective)
            if len(theirs) < len(mine):
                text = f"posted by rank {wait.rank}, but rank {other} {_lacks(call.collective, other, mine, theirs)}"
                return Divergence(
                    call.node, Relation("unmet", None, text, None, (wait.rank,)), None, (), rank=wait.rank
                )
    standing = {wait.rank: wait.call for wait in hang.waits}
    for rank, call in standing.items():
        for other in call.collective.communicator:
            instead = standing.get(other)
            if instead is not None and instead.collective.channel != call.collective.channel:
                text = f"what rank {rank} calls next, where rank {other} calls '{instead.node}' first"
                return Divergence(call.node, Relation("unmet", None, text, None, (rank,)), None, (), rank=rank)
    return None


def _unlike(of: Versions, calls: dict[int, CollectiveCall]) -> Divergence | None:
    """Of a team that disagrees, the member whose communication is not what the original's layouts ask for; else who is alone."""
    for rank, call in calls.items():
        there = replace(of, rank=rank, relations={})
        node = there.new_nodes.get(call.node)
        _, why = fault(there, node) if node is not None else ("", "")
        if why:
            return _disagrees(rank, call.node, calls, why)
    signatures = {rank: (call.collective.kind, *call.collective.signature[1:]) for rank, call in calls.items()}
    first = next(iter(calls), None)
    if first is None:
        return None
    counts = {rank: sum(other == mine for other in signatures.values()) for rank, mine in signatures.items()}
    odd = min(calls, key=lambda rank: counts[rank])
    if counts[odd] == max(counts.values()):
        return None
    return _disagrees(odd, calls[odd].node, calls, "")


def _disagrees(rank: int, node: str, calls: dict[int, CollectiveCall], why: str) -> Divergence:
    others = ", ".join(str(other) for other in calls if other != rank)
    text = f"not what rank{'s' if len(calls) > 2 else ''} {others} {'post' if len(calls) > 2 else 'posts'}"
    return Divergence(node, Relation("unmet", None, text, None, (rank,)), None, (), cause=why, rank=rank)


def _lacks(call: Collective, other: int, mine: Sequence[fx.Node], theirs: Sequence[fx.Node]) -> str:
    if call.kind == "send_recv":
        what, peer = ("receive", call.root) if other != call.root else ("send", _peer(call))
        link = f"from rank {peer}" if what == "receive" else f"to rank {peer}"
        return f"posts no {what} {link}" if not theirs else f"posts {len(theirs)} of {len(mine)} {what}s {link}"
    team = list(call.communicator)
    if not theirs:
        return f"posts no {call.kind} of team {team}"
    return f"posts {len(theirs)} of {len(mine)} of kind {call.kind} of team {team}"


def _peer(call: Collective) -> int:
    return next(rank for rank in call.communicator if rank != call.root)


def _posted(of: Versions, rank: int, call: Collective) -> list[fx.Node]:
    """The communications of a kind and a team that a rank's graph posts."""
    binding = of.rewritten.ranks[rank]
    found = []
    for node in of.rewritten.graphs[binding.graph].nodes:
        if is_communication(node):
            name = lookup(node.target).name.removeprefix("host_ir::")
            peer = _plain(node.args[-1], binding.constants)
            if name in ("send", "recv"):
                kind, team = "send_recv", (rank, peer) if name == "send" else (peer, rank)
            else:
                kind, team = name, tuple(peer)
            if (kind, team) == (call.kind, call.communicator):
                found.append(node)
    return found


def _plain(value: Any, constants: Any) -> Any:
    return constant_value(value, constants) if isinstance(value, RankConstant) else value


__all__ = ["find_unlike_post"]
