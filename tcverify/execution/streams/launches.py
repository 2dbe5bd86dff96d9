"""What a host issues to the streams of a device, in order: which op goes where, after which events, and with which delay.

Nothing here touches a device. An order (see `StreamOrder`) that prefers some ops to others becomes delays before those others:
one cannot tell a device which stream to run next, but a stream that sleeps lets the others overtake it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from tcverify.errors import UsageError
from tcverify.execution.streams.exploration import StreamOrder
from tcverify.execution.streams.queues import StreamOp
from tcverify.program.stream_options import MAIN_STREAM

#: Shortest delay. The host needs some 10 µs to issue an op: what it issues meanwhile overtakes the op that sleeps.
SHORTEST_S = 0.005
#: Most that all delays of one order take together, where the shortest ones do not take more.
MOST_S = 2.0
#: Share of the ops that a random order holds back.
HELD_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Launch:
    """One item that the host issues to a stream.

    Attributes:
        op: number of the op in issue order.
        part: "run"; a collective comes in two, "enter" (it reads and communicates) and "leave" (it writes its result).
        waits: ops of other streams whose events the stream waits for first.
        delay_s: its delay, after the waits.
        event: whether an event that other streams wait for is recorded after it.
    """

    op: int
    part: Literal["run", "enter", "leave"]
    stream: int
    waits: tuple[int, ...]
    delay_s: float
    event: bool


def launches(ops: Sequence[StreamOp], held: Collection[int] = (), delay_s: float = 0.0) -> list[Launch]:
    """Plan the launches of a rank.

    Args:
        ops: in issue order.
        held: numbers of the ops that are delayed, each by `delay_s`. A collective is delayed twice: before it reads, and before
            it writes, since one that is staged through the host stops the host in between.
    """
    waits = [tuple(before for before in op.after if ops[before].stream != op.stream) for op in ops]
    marked = {before for befores in waits for before in befores}
    plan = []
    for number, op in enumerate(ops):
        delay = delay_s if number in held else 0.0
        event = number in marked
        if op.communicators:
            plan.append(Launch(number, "enter", op.stream, waits[number], delay, False))
            plan.append(Launch(number, "leave", op.stream, (), delay, event))
        else:
            plan.append(Launch(number, "run", op.stream, waits[number], delay, event))
    return plan


def in_one_stream(ops: Sequence[StreamOp]) -> list[Launch]:
    """Plan the launches of a rank that has no streams: all ops one after the other on the main one."""
    return [Launch(number, "run", MAIN_STREAM, (), 0.0, False) for number in range(len(ops))]


def held_back(order: StreamOrder, ops: Sequence[StreamOp], rank: int = 0) -> frozenset[int]:
    """Return the numbers of the ops of a rank that an order holds back.

    Raises:
        UsageError: an order of an unknown kind.
    """
    numbers = range(len(ops))
    if order.kind == "issue":
        return frozenset()
    if order.kind == "starve":
        return frozenset(n for n in numbers if ops[n].stream == order.stream)
    if order.kind == "rush":
        return frozenset(n for n in numbers if ops[n].stream != order.stream)
    if order.kind == "random":
        draw = random.Random(f"{order.seed}, rank {rank}")
        return frozenset(n for n in numbers if draw.random() < HELD_SHARE)
    if order.kind == "early":
        if order.rank != rank:
            return frozenset()
        needed: set[int] = set()
        stack = [order.op]
        while stack:
            number = stack.pop()
            if number not in needed:
                needed.add(number)
                stack.extend(ops[number].after)
        return frozenset(numbers) - needed
    raise UsageError(f"there is no order '{order.kind}'", "orders are issue, random, starve, rush and early")


def delay_seconds(issue_s: float, held: int) -> float:
    """Return the delay of each op: longer than the host needs for the program, with a bounded sum.

    Args:
        issue_s: seconds that the program takes without delays.
        held: number of delayed ops.
    """
    return max(SHORTEST_S, min(2 * issue_s, MOST_S / max(held, 1)))


__all__ = ["Launch", "delay_seconds", "held_back", "in_one_stream", "launches"]
