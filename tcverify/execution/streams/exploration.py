"""Explores the orders in which the streams of a lowered program can run.

`systematic` orders are complete. For an op b let N(b) be what has to happen before it: the ops before it in its queue, the
ops whose tokens it waits for, and so on; for a collective among them also that its members begin. The order of b does N(b),
then b, then the rest. An op a of the rank that is not in N(b) has not ended when b has. So if some order inverts a and b at
all, the order of b does, and if they touch one storage, one of them writing, or one communicator, it is observed there (see
`streams`). One order per op instead of all interleavings, whose number is exponential.

What a rank's own queues and tokens leave open can still be settled by its peers: a rank that has left a collective knows that
they have entered it. No order inverts such ops, though nothing on the rank orders them; `Exploration.settled` counts them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from tcverify.execution.executor import Run
from tcverify.execution.plan import plans_of
from tcverify.execution.streams.executor import Place, Priority, SimulatedStreams
from tcverify.execution.streams.host_issue import is_host_ir, issue_host
from tcverify.execution.streams.issue import IssuedRank, is_lowered, issue
from tcverify.execution.streams.observations import OrderObservation
from tcverify.execution.streams.queues import StreamOp
from tcverify.program import Contract, Program
from tcverify.program.contract import Boundary, InputsReady

#: Most ops of one rank for which systematic orders are played: their cost grows with the square of this.
SYSTEMATIC_OPS = 40
#: Most ops of all ranks for which any order is played: a second per order, about.
MOST_OPS = 20_000


#: (place, False) is the begin of an op, (place, True) its end.
Half: TypeAlias = tuple[Place, bool]

#: Kinds of orders; see `StreamOrder`.
OrderKind: TypeAlias = Literal["issue", "random", "starve", "rush", "early"]


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """How an adversary chooses among the streams that can go.

    Attributes:
        kind: "issue" (as the host issued), "random", "starve" (a stream goes when nothing else can), "rush" (it goes whenever
            it can), or "early" (one op, with nothing before it but what must be).
        seed: of "random".
        stream: of "starve" and "rush", on all ranks.
        rank, op: of "early": a rank and the number of an op in its issue order.
    """

    kind: OrderKind
    seed: int = 0
    stream: int = 0
    rank: int = 0
    op: int = 0

    def __str__(self) -> str:
        if self.kind in ("starve", "rush"):
            return f"{self.kind} stream {self.stream}"
        if self.kind == "early":
            return f"op {self.op} of rank {self.rank} as early as it can go"
        return f"random, seed {self.seed}" if self.kind == "random" else "as issued"


@dataclass(slots=True)
class Exploration:
    """What the orders of one program showed.

    Attributes:
        orders: that were played.
        observations: what went wrong, each thing once, in the first order that showed it.
        failing: the orders in which anything went wrong, by name.
        complete: whether every pair of ops that some order inverts was inverted.
        settled: pairs of ops of one rank that conflict, are not ordered by its queues and tokens, but are by its peers.
        streams: the stream of every op, by node, per rank.
    """

    orders: list[StreamOrder] = field(default_factory=list)
    observations: list[OrderObservation] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    complete: bool = False
    settled: int = 0
    streams: list[dict[str, int]] = field(default_factory=list)

    def shown(
        self, kinds: Collection[str], rank: int | None = None, node: str | None = None
    ) -> OrderObservation | None:
        """The observation of one of these kinds with the fewest events before it; one of this rank and node, if any."""
        return min(
            (o for o in self.observations if o.kind in kinds),
            key=lambda o: (o.rank != rank, node not in (o.node, o.other), len(o.events)),
            default=None,
        )


def explore(
    program: Program,
    *,
    reference: Run | None = None,
    boundary: Boundary = "strict",
    inputs: InputsReady = "ready",
    orders: Sequence[StreamOrder] | None = None,
    systematic: bool = False,
    seed: int = 0,
) -> Exploration | None:
    """Run a lowered program in many orders.

    Args:
        reference: the program's run in lockstep, whose outputs every order must have; by default that of the issue order.
        boundary, inputs: as a contract says, see `Contract`.
        orders: the orders to play, instead of few: see `few_orders`.
        systematic: play the orders of all ops as well, if no rank has more than `SYSTEMATIC_OPS` of them.
        seed: of the random order.

    Returns:
        None when the program is not lowered, does not run to its end in issue order, or is too large: too many ops, or buffers
        in too many pieces.

    Raises:
        UnsupportedOp: an op has no meaning.
    """
    plans = plans_of(program)
    host = any(map(is_host_ir, plans))
    if not host and not any(map(is_lowered, plans)):
        return None
    nodes = [len(graph.nodes) for graph in program.graphs]
    if sum(nodes[binding.graph] for binding in program.ranks) > MOST_OPS:
        return None
    Contract(boundary=boundary, inputs=inputs)  # refuses other words
    issued, run = issue_host(program, boundary, inputs) if host else issue(program, boundary, inputs)
    if not issued:
        return None
    reference = run if reference is None or not reference.finished else reference
    streams = SimulatedStreams(issued, reference.ranks)
    found = Exploration(streams=[{op.node: op.stream for op in rank.ops} for rank in issued])
    whole = Precedence(issued)
    chosen = list(few_orders(issued, seed) if orders is None else orders)
    if systematic and all(len(rank.ops) <= SYSTEMATIC_OPS for rank in issued):
        chosen += early_orders(issued)
        found.complete = True
        found.settled = whole.settled()
    names = {op.stream: op.place for rank in issued for op in rank.ops}
    for order in chosen:
        words = f"{order.kind} {names[order.stream]}" if host and order.kind in ("starve", "rush") else str(order)
        found.observations += streams.run(words, _priority(order, issued, whole))
        found.orders.append(order)
    found.failing = streams.failing
    return found


def few_orders(issued: Sequence[IssuedRank], seed: int = 0) -> list[StreamOrder]:
    """Each stream starved in turn, and one random order."""
    used = sorted({op.stream for rank in issued for op in rank.ops})
    return [*(StreamOrder("starve", stream=stream) for stream in used), StreamOrder("random", seed)]


def early_orders(issued: Sequence[IssuedRank]) -> Iterator[StreamOrder]:
    """For every op, the order in which it runs as early as possible. Of ranks that issue the same ops, for the first one."""
    known: set[tuple[StreamOp, ...]] = set()
    for rank, one in enumerate(issued):
        alike = tuple(_renamed(one.ops))
        if alike not in known:
            known.add(alike)
            yield from (StreamOrder("early", rank=rank, op=number) for number in range(len(one.ops)))


def _renamed(ops: Sequence[StreamOp]) -> Iterator[StreamOp]:
    """Ops with their communicators numbered as they come, so that ranks of other groups can be equal."""
    numbers: dict[tuple[int, ...], int] = {}
    for op in ops:
        if op.communicators:
            named = tuple((numbers.setdefault(c, len(numbers)),) for c in op.communicators)
            op = replace(op, communicators=named, on="")
        yield op


def _priority(order: StreamOrder, issued: Sequence[IssuedRank], whole: Precedence) -> Priority:
    if order.kind == "issue":
        return lambda place, ends: place[1]
    if order.kind == "random":
        draw = random.Random(order.seed)
        return lambda place, ends: draw.random()
    if order.kind == "early":
        target = order.rank, order.op
        begin = whole.needs(target, ends=False) | {(target, False)}
        end = whole.needs(target, ends=True) | {(target, True)}

        def early(place: Place, ends: bool) -> float:
            return 0 if (place, ends) in begin else 1 if (place, ends) in end else 2

        return early
    last = order.kind == "starve"

    def by_stream(place: Place, ends: bool) -> float:
        return (issued[place[0]].ops[place[1]].stream == order.stream) == last

    return by_stream


class Precedence:
    """What has to happen before what, over all ranks."""

    def __init__(self, issued: Sequence[IssuedRank]) -> None:
        self._issued = issued
        calls: dict[tuple[tuple[int, ...], int], list[int]] = {}  # ops that enter a communicator, by rank
        for rank, one in enumerate(issued):
            for number, op in enumerate(one.ops):
                for communicator in op.communicators:
                    calls.setdefault((communicator, rank), []).append(number)
        self._peers: dict[Place, set[Place]] = {}
        for (communicator, rank), numbers in calls.items():
            for i, number in enumerate(numbers):
                peers = self._peers.setdefault((rank, number), set())
                for member in communicator:
                    theirs = calls.get((communicator, member), [])
                    if member != rank and i < len(theirs):
                        peers.add((member, theirs[i]))

    def needs(self, place: Place, *, ends: bool) -> set[Half]:
        """All that happens before an op begins, or ends, in every order."""
        found: set[Half] = set()
        stack = [(place, ends)]
        while stack:
            (rank, number), end = stack.pop()
            if end:
                before = [((rank, number), False), *((peer, False) for peer in self._peers.get((rank, number), ()))]
            else:
                before = [((rank, a), True) for a in self._issued[rank].ops[number].after]
            for event in before:
                if event not in found:
                    found.add(event)
                    stack.append(event)
        return found

    def settled(self) -> int:
        """Count the conflicting pairs of ops of one rank that its peers order, but neither its queues nor its tokens."""
        count = 0
        for rank, one in enumerate(self._issued):
            ancestors: list[set[int]] = []
            for number, op in enumerate(one.ops):
                own: set[int] = set(op.after)
                for before in op.after:
                    own |= ancestors[before]
                ancestors.append(own)
                others = [a for a in range(number) if a not in own and _conflict(one.ops[a], op)]
                if others:
                    needed = self.needs((rank, number), ends=False)
                    count += sum(((rank, a), True) in needed for a in others)
        return count


def _conflict(first: StreamOp, second: StreamOp) -> bool:
    """Whether two ops touch one storage, one of them writing, or enter one communicator."""
    if set(first.communicators) & set(second.communicators):
        return True
    return bool(
        set(first.writes) & {*second.reads, *second.writes} or set(second.writes) & {*first.reads, *first.writes}
    )


__all__ = [
    "MOST_OPS",
    "SYSTEMATIC_OPS",
    "Exploration",
    "Half",
    "Precedence",
    "StreamOrder",
    "early_orders",
    "explore",
    "few_orders",
]
