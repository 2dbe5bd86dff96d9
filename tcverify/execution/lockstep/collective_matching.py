"""Matching: which ranks' calls of collectives meet, and who waits for whom. Calls of a communicator meet in order of issue."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from tcverify.execution.asynchrony import PendingCollective
from tcverify.execution.executor import CollectiveWait, Hang
from tcverify.execution.interpreter import CollectiveCall
from tcverify.ops import Collective

Channel: TypeAlias = tuple[str | None, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class MatchEntry:
    """A rank's call of a collective.

    Attributes:
        ordinal: its number, from 1, among the calls of its rank of this kind on this communicator.
        under_way: of asynchronous calls.
        met: whether all members have issued theirs.
        done: whether it has been carried out.
    """

    rank: int
    call: CollectiveCall
    tensor: torch.Tensor
    ordinal: int
    under_way: PendingCollective | None = None
    met: bool = False
    done: bool = False


@dataclass(slots=True)
class Matcher:
    """Calls that wait for others, and ranks that wait for calls.

    Attributes:
        parked: what each blocked rank waits for; it continues when all of it is done.
        lingering: ranks that stay at a start although they could continue.
    """

    parked: dict[int, list[MatchEntry]] = field(default_factory=dict)
    lingering: set[int] = field(default_factory=set)
    _queues: dict[Channel, dict[int, deque[MatchEntry]]] = field(default_factory=lambda: defaultdict(dict))
    _counts: dict[tuple[int, Channel, str], int] = field(default_factory=lambda: defaultdict(int))

    def enter(
        self, rank: int, node: str, collective: Collective, tensor: torch.Tensor, under_way: PendingCollective | None
    ) -> tuple[MatchEntry, list[MatchEntry]]:
        """Let a rank issue a call. Returns it, and the members' calls, in group order, where it was the last to come."""
        key = rank, collective.channel, collective.kind
        self._counts[key] += 1
        entry = MatchEntry(rank, CollectiveCall(node, collective), tensor, self._counts[key], under_way)
        queues = self._queues[collective.channel]
        queues.setdefault(rank, deque()).append(entry)
        if not all(queues.get(member) for member in collective.communicator):
            return entry, []
        members = [queues[member].popleft() for member in collective.communicator]
        for member in members:
            member.met = True
        return entry, members

    def hang(self) -> Hang | None:
        """Describe the ranks that still wait, by following the wait-for relation; also for calls that no rank waits for."""
        waiting = {rank: next(e for e in entries if not e.met) for rank, entries in self.parked.items()}
        if not waiting:
            left = [queue[0] for queues in self._queues.values() for queue in queues.values() if queue]
            if not left:
                return None
            first = min(left, key=lambda entry: entry.rank)
            waiting[first.rank] = first
        path: list[int] = []
        rank = min(waiting)
        while rank in waiting and rank not in path:
            path.append(rank)
            rank = self._missing(waiting[rank])
        cycle = rank in waiting
        ranks = path[path.index(rank) :] if cycle else path
        waits = tuple(CollectiveWait(r, waiting[r].call, waiting[r].ordinal) for r in ranks)
        return Hang(waits, cycle, None if cycle else rank)

    def _missing(self, entry: MatchEntry) -> int:
        """The first member that has not issued what an entry waits for."""
        queues = self._queues[entry.call.collective.channel]
        place = queues[entry.rank].index(entry)
        return next(m for m in entry.call.collective.communicator if len(queues.get(m, ())) <= place)


__all__ = ["MatchEntry", "Matcher"]
