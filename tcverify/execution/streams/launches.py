"""What a host issues to the streams of a device, in order: which op goes where, after which events, and with which delay.

Nothing here touches a device. An order (see `StreamOrder`) that prefers some ops to others becomes delays before those others:
one cannot tell a device which stream to run next, but a stream that sleeps lets the others overtake it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tcverify.errors import InternalError, UsageError
from tcverify.execution.streams.exploration import Half, Precedence, StreamOrder
from tcverify.execution.streams.issue import IssuedRank
from tcverify.execution.streams.queues import StreamOp
from tcverify.program.stream_options import MAIN_STREAM

#: Shortest delay. The host needs some 50 µs to issue an op, a device less to run it.
SHORTEST_S = 0.001
#: Most that all delays of one order take together, where the shortest ones do not take more.
MOST_S = 0.25
#: Share of the ops that a random order holds back.
HELD_SHARE = 0.3

#: A rank, the number of an op in its issue order, and a part of that op.
Point: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Launch:
    """One item that the host issues to a stream.

    Attributes:
        rank: whose op it is.
        op: number of the op in the issue order of its rank.
        part: 0 for a whole op. An op that calls n collectives has n + 1 parts: each ends where the op enters the next collective,
            and each but the first begins with the result of one.
        stream: the rank's stream.
        waits: the parts on other streams that must be complete first.
        members: of the collective whose result it begins with: the parts in which its members entered it, in group order.
        delay_s: its delay, after the waits.
        event: whether an event that other streams wait for is recorded after it.
    """

    rank: int
    op: int
    part: int
    stream: int
    waits: tuple[Point, ...] = ()
    members: tuple[Point, ...] = ()
    delay_s: float = 0.0
    event: bool = False

    @property
    def point(self) -> Point:
        return self.rank, self.op, self.part


def launches(issued: Sequence[IssuedRank], held: Collection[Half] = (), delay_s: float = 0.0) -> list[Launch]:
    """Plan the launches of all ranks, which share a device.

    Args:
        held: what is delayed, each time by `delay_s`: the begin of an op, and for collectives also its end.
    """
    ranks = [one.ops for one in issued]
    entered = _members(ranks)
    found: list[Launch] = []
    for rank, number, part in _host_order(ranks, entered):
        op = ranks[rank][number]
        members = entered.get((rank, number, part), ())
        waits = tuple(member for member in members if member[0] != rank)
        if not part:
            others = (before for before in op.after if ranks[rank][before].stream != op.stream)
            waits = tuple((rank, before, len(ranks[rank][before].communicators)) for before in others)
        delay = delay_s if ((rank, number), part > 0) in held else 0.0
        found.append(Launch(rank, number, part, op.stream, waits, members, delay))
    return _marked(found)


def in_one_stream(issued: Sequence[IssuedRank]) -> list[Launch]:
    """Plan the launches of ranks that have one stream each, so that only collectives wait."""
    plan = [replace(one, stream=MAIN_STREAM, waits=one.waits if one.part else ()) for one in launches(issued)]
    return _marked(plan)


def _marked(plan: Sequence[Launch]) -> list[Launch]:
    """The launches with the events that others wait for."""
    marked = {point for launch in plan for point in launch.waits}
    return [replace(launch, event=launch.point in marked) for launch in plan]


def _members(ranks: Sequence[Sequence[StreamOp]]) -> dict[Point, tuple[Point, ...]]:
    """By the part that begins with the result of a collective, the parts in which its members entered it, in group order.

    Calls of a communicator meet in the order in which each member issues them.
    """
    calls: dict[tuple[tuple[int, ...], int], list[Point]] = {}
    for rank, ops in enumerate(ranks):
        for number, op in enumerate(ops):
            for part, communicator in enumerate(op.communicators):
                calls.setdefault((communicator, rank), []).append((rank, number, part))
    found: dict[Point, tuple[Point, ...]] = {}
    for (communicator, _), own in calls.items():
        for (rank, number, part), *members in zip(own, *(calls[communicator, m] for m in communicator), strict=True):
            found[rank, number, part + 1] = tuple(members)
    return found


def _host_order(ranks: Sequence[Sequence[StreamOp]], entered: Mapping[Point, tuple[Point, ...]]) -> list[Point]:
    """All parts, those of a rank in issue order, and the end of a collective after all members have entered it."""
    parts = [
        [(r, n, p) for n, op in enumerate(ops) for p in range(len(op.communicators) + 1)] for r, ops in enumerate(ranks)
    ]
    found: dict[Point, None] = {}
    while any(parts):
        before = len(found)
        for own in parts:
            while own and all(member in found for member in entered.get(own[0], ())):
                found[own.pop(0)] = None
        if len(found) == before:
            raise InternalError("ranks that ran to their end wait for each other where they issue")
    return list(found)


def held_back(order: StreamOrder, issued: Sequence[IssuedRank]) -> frozenset[Half]:
    """Return what an order holds back: begins of ops, and ends of collectives.

    Raises:
        UsageError: an order of an unknown kind.
    """
    places = [(one.rank, number) for one in issued for number in range(len(one.ops))]
    streams = {(one.rank, number): op.stream for one in issued for number, op in enumerate(one.ops)}
    if order.kind == "issue":
        return frozenset()
    if order.kind in ("starve", "rush"):
        starved = order.kind == "starve"
        return frozenset((p, end) for p in places if (streams[p] == order.stream) == starved for end in (False, True))
    if order.kind == "random":
        draw = random.Random(order.seed)
        return frozenset((p, end) for p in places for end in (False, True) if draw.random() < HELD_SHARE)
    if order.kind == "early":
        target = order.rank, order.op
        needed = Precedence(issued).needs(target, ends=False) | {(target, False), (target, True)}
        return frozenset((p, end) for p in places for end in (False, True) if (p, end) not in needed)
    raise UsageError(f"there is no order '{order.kind}'", "orders are issue, random, starve, rush and early")


def delay_seconds(issue_s: float, held: int) -> float:
    """Return the delay of each launch: as long as the program takes without delays, with a bounded sum.

    Args:
        issue_s: seconds that the program takes without delays.
        held: number of delayed launches.
    """
    return max(SHORTEST_S, min(issue_s, MOST_S / max(held, 1)))


__all__ = ["Launch", "Point", "delay_seconds", "held_back", "in_one_stream", "launches"]
