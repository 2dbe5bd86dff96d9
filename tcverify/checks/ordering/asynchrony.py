"""Asynchrony: which transfers are in flight while the nodes of a rank's graph run, and which nodes conflict with them.

Between a start and the first wait on the storage that it writes, nothing else may read or write that storage, and nothing may
write into what the start reads. Later waits on the same storage have nothing left to wait for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeAlias, get_args

from tcverify.checks.memory.parts import WHOLE, ByteRange, overlap
from tcverify.checks.ordering.accesses import Accesses, AccessStep
from tcverify.ops.dialects.host_ir import COMMUNICATION_WAIT


@dataclass(frozen=True, slots=True)
class TransferInFlight:
    """One transfer of a start. `number` distinguishes the transfers of one start."""

    start: int
    number: int


#: What a node races with: the write of the result, or the read of the input.
Racing: TypeAlias = Literal["completion", "input"]


@dataclass(frozen=True, slots=True)
class Hazard:
    """A node that conflicts with a transfer in flight.

    Attributes:
        flight: the transfer in flight.
        node: index of the conflicting node.
        access: "reads", "writes into" or "frees".
        racing: "completion" if the node accesses what is still to be written, or "input" if it changes what may still be
            read.
        storage: the storage that both access.
    """

    flight: TransferInFlight
    node: int
    access: str
    racing: Racing
    storage: int


@dataclass(slots=True)
class Asynchrony:
    """What is asynchronous in a graph. Nodes are named by their indices.

    Attributes:
        landed: transfer → the wait that completes it.
        lost: transfers without a wait → the storages that they write.
        idle: waits with nothing to wait for → their storages.
        hazards: in graph order; for each node, storage and kind of access, the latest transfer that it races with.
    """

    landed: dict[TransferInFlight, int] = field(default_factory=dict)
    lost: dict[TransferInFlight, tuple[int, ...]] = field(default_factory=dict)
    idle: dict[int, tuple[int, ...]] = field(default_factory=dict)
    hazards: list[Hazard] = field(default_factory=list)


class _Air:
    """Transfers in flight: by the storages that they write, and by those that they read."""

    def __init__(self) -> None:
        self.arriving: dict[int, dict[TransferInFlight, None]] = {}
        self.leaving: dict[int, dict[TransferInFlight, None]] = {}

    def depart(self, flight: TransferInFlight, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        for storage in target:
            self.arriving.setdefault(storage, {})[flight] = None
        for storage in source:
            self.leaving.setdefault(storage, {})[flight] = None

    def land(self, flight: TransferInFlight, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        for by, storages in ((self.arriving, target), (self.leaving, source)):
            for storage in storages:
                flights = by.get(storage, {})
                flights.pop(flight, None)
                if not flights:
                    by.pop(storage, None)


_KNOWN: weakref.WeakKeyDictionary[Accesses, Asynchrony] = weakref.WeakKeyDictionary()


def asynchrony_of(accesses: Accesses) -> Asynchrony:
    """Track transfers in flight through a graph. Linear in the graph; cached."""
    found = _KNOWN.get(accesses)
    if found is None:
        found = _KNOWN[accesses] = _follow(accesses)
    return found


def _follow(accesses: Accesses) -> Asynchrony:
    found, air = Asynchrony(), _Air()
    steps = accesses.steps
    for index, step in enumerate(steps):
        if step.awaits:
            flights = dict.fromkeys(f for storage in step.awaits for f in air.arriving.get(storage, ()))
            made = _awaited_alone(step, steps)
            if made is not None:  # this one, though other transfers into the same storage may be in flight
                flights = dict.fromkeys(flight for flight in flights if flight.start == made)
            if not flights and made is None:
                found.idle[index] = step.awaits
            for flight in flights:
                transfer = steps[flight.start].transfers[flight.number]
                air.land(flight, transfer.source, transfer.target)
                found.landed[flight] = index
            continue
        for access, racing, storage in _accesses(step, precise=bool(accesses.parts)):
            flights = (air.arriving if racing == "completion" else air.leaving).get(storage, {})
            close = _close(accesses, index, storage, flights, access, racing) if flights else None
            if close is not None:
                found.hazards.append(Hazard(close, index, access, racing, storage))
        for number, transfer in enumerate(step.transfers):
            air.depart(TransferInFlight(index, number), transfer.source, transfer.target)
        if step.op == "output":
            break
    for index, step in enumerate(steps):
        for number, transfer in enumerate(step.transfers):
            flight = TransferInFlight(index, number)
            if flight not in found.landed:
                found.lost[flight] = transfer.target
    _returned(accesses, found, air)
    return found


def _awaited_alone(step: AccessStep, steps: list[AccessStep]) -> int | None:
    """The communication of host IR whose own result a wait takes."""
    if step.op != COMMUNICATION_WAIT or not step.operands or not steps[step.operands[0]].transfers:
        return None
    return step.operands[0]


#: Largest number of transfers of one storage with which an access is compared, latest first.
_MOST_COMPARED = 64


def _close(
    accesses: Accesses, index: int, storage: int, flights: dict[TransferInFlight, None], access: str, racing: Racing
) -> TransferInFlight | None:
    """The latest transfer of a storage with which a node conflicts: transfers to disjoint parts of a buffer may be in
    flight together."""
    if accesses.parts:
        writes = None if access == "frees" or accesses.steps[index].op == "output" else access == "writes into"
        mine = _parts(accesses, index, storage, writes)
        for flight in islice(reversed(flights), _MOST_COMPARED):
            theirs = _parts(accesses, flight.start, storage, racing == "completion")
            if any(overlap(a, b) for a in mine for b in theirs):
                return flight
        return None
    low, high = accesses.extent(index, storage)
    for flight in islice(reversed(flights), _MOST_COMPARED):
        first, end = accesses.extent(flight.start, storage)
        if first < high and low < end:
            return flight
    return None


def _parts(accesses: Accesses, index: int, storage: int, writes: bool | None) -> list[ByteRange]:
    """The parts of a storage that a node reads or writes; None means all of it."""
    if writes is None and accesses.steps[index].op != "output":
        return [WHOLE]
    touches = [touch for touch in accesses.parts[index] if touch.storage == storage]
    return [touch.part or WHOLE for touch in touches if writes is None or touch.writes == writes]


def _accesses(step: AccessStep, *, precise: bool) -> list[tuple[str, Racing, int]]:
    """(access, what it can race with, storage) of a step, each once.

    Args:
        precise: whether it is known which parts of a storage the step reads and writes.
    """
    reads: dict[int, None] = dict.fromkeys(step.reads)
    writes: dict[int, None] = dict.fromkeys(step.writes)
    for transfer in step.transfers:
        reads.update(dict.fromkeys(transfer.source))
        writes.update(dict.fromkeys(s for s in transfer.target if s not in step.holds or s in step.touches))
    found: list[tuple[str, Racing, int]] = [
        ("reads", "completion", storage) for storage in reads if precise or storage not in writes
    ]
    for access, storages in (("writes into", writes), ("frees", step.resized)):
        found += [(access, racing, storage) for storage in storages for racing in get_args(Racing)]
    return found


def _returned(accesses: Accesses, found: Asynchrony, air: _Air) -> None:
    """When the graph ends, the caller also reads inputs that the graph has written to."""
    end = len(accesses.steps) - 1
    for storage in accesses.inputs:
        if storage not in accesses.outputs:
            flights = air.arriving.get(storage)
            if flights:  # whichever part of it
                found.hazards.append(Hazard(next(reversed(flights)), end, "reads", "completion", storage))


__all__ = ["Asynchrony", "Hazard", "TransferInFlight", "asynchrony_of"]
