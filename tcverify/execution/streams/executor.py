"""The adversarial stream executor: every stream of every rank is a queue, and an order decides which one advances.

An op can begin when the previous op in its queue and the ops whose tokens it waits for are complete; nothing else
delays it. The host never blocks. A collective begins (it reads, and joins its communicator) and, once all members have
begun, ends on each of them at an independent time; in between it occupies its stream, and may read at any time.

What an op reads is compared with what it would read in issue order: each storage records which op wrote it last.
So two accesses that an order inverts, one of them a write, are detected regardless of values: if every access
finds the write that it finds in issue order, then the writes of a storage run in issue order, and each read between the
same two writes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tcverify.errors import UnsupportedOp
from tcverify.execution.interpreter import RankResult
from tcverify.execution.plan import first_line
from tcverify.execution.streams.issue import IssuedRank
from tcverify.execution.streams.memory import RankMemory
from tcverify.execution.streams.observations import Event, OrderObservation
from tcverify.execution.streams.queues import BEFORE, StreamOp
from tcverify.ops import Request, Start, complete, mismatch

#: A rank's number, and that of an op in its issue order.
Place = tuple[int, int]
#: Says how soon an op goes, of those that can go: (place, whether a collective ends rather than begins) -> smallest first.
Priority = Callable[[Place, bool], float]


#: Most observations of one kind that are kept, each with all that led to it: a large graph can have very many.
MOST_OBSERVATIONS = 40


@dataclass(slots=True)
class _Joined:
    """A collective that a rank has begun."""

    place: Place
    steps: Generator[Request | Start, torch.Tensor | None, Any]
    request: Request | Start


class SimulatedStreams:
    """The streams of all ranks of a program that has been issued; every call of `run` plays one order.

    Args:
        reference: what the ranks return in issue order, to compare outputs with.

    Attributes:
        failing: names of the orders in which anything went wrong.
    """

    def __init__(self, issued: Sequence[IssuedRank], reference: Sequence[RankResult]) -> None:
        self.issued = issued
        self.failing: list[str] = []
        self._known: set[tuple[Any, ...]] = set()
        self._reference = reference
        self._memories = [RankMemory(rank) for rank in issued]
        self._users: list[list[list[int]]] = []
        self._earlier: list[dict[int, int]] = []  # op -> the one before it on the same communicator
        for rank in issued:
            users: list[list[int]] = [[] for _ in rank.ops]
            last: dict[tuple[int, ...], int] = {}
            earlier: dict[int, int] = {}
            for number, op in enumerate(rank.ops):
                for before in op.after:
                    users[before].append(number)
                for communicator in op.communicators:
                    if last.get(communicator, number) != number:
                        earlier[number] = last[communicator]
                    last[communicator] = number
            self._users.append(users)
            self._earlier.append(earlier)

    def run(self, name: str, priority: Priority) -> list[OrderObservation]:
        """Run all ops in the order that the priorities give; returns what went wrong, unless an earlier order showed it.

        Always ends: every step completes an op, or begins one, and when none can go what waits is a deadlock.

        Raises:
            UnsupportedOp: an op has no meaning for these arguments.
        """
        playing = _Playing(self, name, priority, self._known)
        with torch.no_grad():
            seen = playing.play()
        if playing.wrong:
            self.failing.append(name)
        return seen


class _Playing:
    """One order, being played."""

    def __init__(self, streams: SimulatedStreams, name: str, priority: Priority, known: set[tuple[Any, ...]]) -> None:
        self._issued = streams.issued
        self._memories = streams._memories
        self._reference = streams._reference
        self._users = streams._users
        self._earlier = streams._earlier
        self._name = name
        self._priority = priority
        self._seen: list[OrderObservation] = []
        self._known = known
        self.wrong = False
        self._events: list[tuple[Place, str]] = []
        self._done = [[False] * len(rank.ops) for rank in self._issued]
        self._missing = [[len(op.after) for op in rank.ops] for rank in self._issued]
        self._writer: list[list[int]] = [[BEFORE] * len(rank.names) for rank in self._issued]
        self._ready: list[tuple[float, int, Place, _Joined | None, torch.Tensor | None]] = []
        self._ticks = 0
        self._waiting: dict[tuple[int, ...], dict[int, deque[_Joined]]] = {}
        self._stopped = False
        self._phase = "runs"  # what the op does that is at work now

    def play(self) -> list[OrderObservation]:
        for memory in self._memories:
            memory.reset()
        for rank, issued in enumerate(self._issued):
            for number, op in enumerate(issued.ops):
                if not op.after:
                    self._push((rank, number))
        while self._ready and not self._stopped:
            _, _, place, joined, answer = heapq.heappop(self._ready)
            try:
                if joined is None:
                    self._begin(place)
                else:
                    self._go_on(joined, answer)
            except UnsupportedOp:
                raise
            except Exception as error:  # noqa: BLE001 - any error of a kernel is an observation about the program
                node = self._op(place).node
                self._observe("raised", place, None, f"'{node}' raises {type(error).__name__}: {first_line(error)}")
                self._stopped = True
        if not self._stopped and not all(map(all, self._done)):
            self._deadlock()
        return self._seen

    def _op(self, place: Place) -> StreamOp:
        return self._issued[place[0]].ops[place[1]]

    def _push(self, place: Place, joined: _Joined | None = None, answer: torch.Tensor | None = None) -> None:
        self._ticks += 1
        entry = self._priority(place, joined is not None), self._ticks, place, joined, answer
        heapq.heappush(self._ready, entry)

    # ------------------------------------------------------------------------------------------------ one op

    def _begin(self, place: Place) -> None:
        rank, number = place
        op = self._op(place)
        self._phase = "begins" if op.communicators else "runs"
        self._look(place, op)
        memory = self._memories[rank]
        call = memory.begin(op)
        value: Any = None
        if call is not None:
            step, args, kwargs = call
            if step.op.collective:
                steps = step.run(rank, *args, **kwargs)
                try:
                    request = next(steps)
                except StopIteration as stop:
                    value = stop.value
                else:
                    self._events.append((place, "begins"))
                    self._join(_Joined(place, steps, request))
                    return
            else:
                value = step.run(*args, **kwargs)
        elif number == len(self._issued[rank].ops) - 1:
            self._compare(place)
        self._events.append((place, "runs"))
        self._finish(place, op, value)

    def _go_on(self, joined: _Joined, answer: torch.Tensor | None) -> None:
        """Let a collective end, or enter the next one that its op calls."""
        op = self._op(joined.place)
        self._phase = "ends"
        self._look(joined.place, op)
        assert answer is not None
        asked = joined.request
        if isinstance(asked, Start) and asked.output.numel():
            asked.output.copy_(answer.view(asked.output.shape))
        try:
            request = joined.steps.send(None if isinstance(asked, Start) else answer)
        except StopIteration as stop:
            self._events.append((joined.place, "ends"))
            self._finish(joined.place, op, stop.value)
        else:
            self._join(_Joined(joined.place, joined.steps, request))

    def _finish(self, place: Place, op: StreamOp, value: Any) -> None:
        rank, number = place
        self._memories[rank].store(op, value)
        for storage in op.writes:
            self._writer[rank][storage] = number
        self._done[rank][number] = True
        for user in self._users[rank][number]:
            self._missing[rank][user] -= 1
            if not self._missing[rank][user]:
                self._push((rank, user))

    def _look(self, place: Place, op: StreamOp) -> None:
        """Compare the writes that an op finds with those that it finds in issue order."""
        writer = self._writer[place[0]]
        for storage, expected in op.sees:
            found = writer[storage]
            if found != expected:
                self._race(place, op, storage, expected, found)

    def _race(self, place: Place, op: StreamOp, storage: int, expected: int, found: int) -> None:
        rank, number = place
        ops, name = self._issued[rank].ops, self._issued[rank].names[storage]
        reads = storage in op.reads
        if found > number:
            kind, other, verb = "WAR" if reads else "WAW", found, "is written before it by"
        elif expected != BEFORE and not self._done[rank][expected]:
            kind, other, verb = "RAW" if reads else "WAW", expected, "is not yet written by"
        else:  # overwritten by an op that ran late, and saw so itself
            return
        access = "reads" if reads else "writes"
        text = (
            f"'{op.node}' on {op.place} {access} the storage of '{name}', which {verb} '{ops[other].node}' on "
            f"{ops[other].place}"
        )
        self._observe(kind, place, other, text)

    # ------------------------------------------------------------------------------------------- collectives

    def _join(self, joined: _Joined) -> None:
        rank, number = joined.place
        collective = joined.request.collective
        group = collective.communicator
        before = self._earlier[rank].get(number)
        if before is not None and not self._done[rank][before]:
            op, other = self._op(joined.place), self._issued[rank].ops[before]
            text = (
                f"'{op.node}' on {op.place} enters group {list(group)} before '{other.node}' on {other.place}, which is "
                "issued before it, has left"
            )
            self._observe("collective-order", joined.place, before, text)
        members = self._waiting.setdefault(group, {})
        members.setdefault(rank, deque()).append(joined)
        if any(not members.get(member) for member in group):
            return
        matched = [members[member].popleft() for member in group]
        calls = [one.request.collective for one in matched]
        sentence = mismatch(calls)
        if sentence is not None:
            self._observe("mismatch", joined.place, None, f"ranks disagree: {sentence}")
            self._stopped = True
            return
        answers = complete(calls, [one.request.tensor for one in matched])
        for one, answer in zip(matched, answers, strict=True):
            self._push(one.place, one, answer)

    def _deadlock(self) -> None:
        """Follow who waits for whom, from a rank that waits in a collective, until it comes round or ends."""
        begun = {one.place: one for queues in self._waiting.values() for queue in queues.values() for one in queue}
        sentences: list[str] = []
        visited: set[Place] = set()
        at: Place | None = min(begun, default=None)
        first = at
        while at is not None and at not in visited:
            visited.add(at)
            op = self._op(at)
            here = f"rank {at[0]}'s '{op.node}' on {op.place}"
            if at in begun:
                group = begun[at].request.collective.communicator
                peer = next(member for member in group if not self._waiting[group].get(member))
                sentences.append(f"{here} waits for rank {peer} in group {list(group)}")
                ops = self._issued[peer].ops
                numbers = (i for i, o in enumerate(ops) if group in o.communicators and not self._done[peer][i])
                number = next(numbers, None)
                at = None if number is None else (peer, number)
            else:
                before = next(b for b in op.after if not self._done[at[0]][b])
                sentences.append(f"{here} waits for '{self._issued[at[0]].ops[before].node}'")
                at = at[0], before
        if first is not None:
            self._phase = "waits"
            self._observe("deadlock", first, None, "; ".join(sentences))

    # ---------------------------------------------------------------------------------------------- what is seen

    def _compare(self, place: Place) -> None:
        """Compare the outputs, as stream 0 sees them now, with those in issue order."""
        rank = place[0]
        reference, memory = self._reference[rank], self._memories[rank]
        found = [
            (f"output {i}", a, b) for i, (a, b) in enumerate(zip(reference.outputs, memory.outputs(), strict=True))
        ]
        if reference.mutates:
            names = (f"input '{name}' after the run" for name in reference.input_names)
            found += zip(names, reference.inputs, memory.inputs(), strict=True)
        for label, expected, actual in found:
            if not _same(expected, actual):
                self._observe("output", place, None, f"{label} differs from what it is in issue order", label)

    def _event(self, place: Place, what: str) -> Event:
        op = self._op(place)
        return Event(place[0], op.stream, op.node, what, op.on)

    def _observe(self, kind: str, place: Place, other: int | None, text: str, label: str = "") -> None:
        self.wrong = True
        rank = place[0]
        key = kind, place, other, label
        if key in self._known or sum(known[0] == kind for known in self._known) >= MOST_OBSERVATIONS:
            return
        self._known.add(key)
        op = self._op(place)
        ops = self._issued[rank].ops
        events = list(self._events)
        if events[-1:] != [(place, self._phase)]:  # a collective that has begun says so itself
            events.append((place, self._phase))
        self._seen.append(
            OrderObservation(
                kind,
                rank,
                op.node,
                op.stream,
                "" if other is None else ops[other].node,
                text,
                self._name,
                tuple(self._event(*event) for event in events),
            )
        )


def _same(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return bool(expected == actual or (expected != expected and actual != actual))
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    return torch.equal(expected, actual) or torch.allclose(expected, actual, rtol=1e-12, atol=0.0, equal_nan=True)


__all__ = ["MOST_OBSERVATIONS", "Place", "Priority", "SimulatedStreams"]
