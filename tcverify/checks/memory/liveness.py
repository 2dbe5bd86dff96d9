"""Liveness: the lifetime of every storage of a rank's graph, and how many bytes live at once.

A storage lives from the node that creates it to the last node that refers to a value in it. What a start reads lives
until the wait for its result (to the end without a wait); inputs live throughout, outputs to the end. In between, explicit
frees end its life and allocations begin a new one. While a node runs, its operands and its results are alive together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from tcverify.checks.ordering.accesses import Accesses
from tcverify.checks.ordering.asynchrony import TransferInFlight, asynchrony_of


@dataclass(frozen=True, slots=True)
class StorageLife:
    """A lifetime of a storage: from the first to the last node, by index, and its size in bytes."""

    storage: int
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak memory: at which node it is reached first, and the names and bytes of what is alive then, largest first."""

    nbytes: int
    node: str
    live: tuple[tuple[str, int], ...]


def lives_of(accesses: Accesses) -> list[StorageLife]:
    """Return the lifetimes of all storages, by first node. Linear in the graph; storages of unknown size have no bytes."""
    spans = _spans(accesses)
    resized: dict[int, list[tuple[int, int | None]]] = {}
    for index, step in enumerate(accesses.steps):
        for storage, size in step.resized.items():
            resized.setdefault(storage, []).append((index, size))
    found: list[StorageLife] = []
    for storage, (first, last) in spans.items():
        nbytes = accesses.nbytes.get(storage, 0)
        if storage in resized:
            found += _segments(StorageLife(storage, first, last, nbytes), resized[storage])
        else:
            found.append(StorageLife(storage, first, last, nbytes))
    found.sort(key=lambda life: life.first)
    return found


def _spans(accesses: Accesses) -> dict[int, tuple[int, int]]:
    steps, end = accesses.steps, len(accesses.steps) - 1
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for storage in step.holds:
            first.setdefault(storage, index)
        for storage in (*step.touches, *step.holds):
            last[storage] = index
    asynchrony = asynchrony_of(accesses)
    for index, step in enumerate(steps):
        for number, transfer in enumerate(step.transfers):
            until = asynchrony.landed.get(TransferInFlight(index, number), end)
            for storage in transfer.source:
                last[storage] = max(last[storage], until)
    for storage in accesses.inputs:
        first[storage], last[storage] = 0, end
    return {storage: (first[storage], last[storage]) for storage in first}


def _segments(whole: StorageLife, events: list[tuple[int, int | None]]) -> Iterator[StorageLife]:
    begin: int | None = whole.first
    nbytes = whole.nbytes
    for index, size in events:
        if size == 0 and begin is not None:
            yield StorageLife(whole.storage, begin, index, nbytes)
            begin = None
        elif size != 0 and begin is None:
            begin, nbytes = index, whole.nbytes if size is None else size
    if begin is not None:
        yield StorageLife(whole.storage, begin, max(begin, whole.last), nbytes)


def peak_of(accesses: Accesses) -> Peak:
    """Return the peak memory of a graph, and where it is reached first."""
    lives = lives_of(accesses)
    changes = [0] * (len(accesses.steps) + 1)
    for life in lives:
        changes[life.first] += life.nbytes
        changes[life.last + 1] -= life.nbytes
    current = list(accumulate(changes))[:-1]
    most = max(current, default=0)
    at = current.index(most) if current else 0
    live = [
        (accesses.value(life.storage), life.nbytes) for life in lives if life.first <= at <= life.last and life.nbytes
    ]
    live.sort(key=lambda entry: -entry[1])
    return Peak(most, accesses.steps[at].name if accesses.steps else "", tuple(live))


def find_unsized_value(accesses: Accesses) -> str | None:
    """The name of a value of unknown size, if there is one."""
    missing = (s for step in accesses.steps for s in step.holds if s not in accesses.nbytes)
    storage = next(missing, None)
    return None if storage is None else accesses.value(storage)


__all__ = ["Peak", "StorageLife", "find_unsized_value", "lives_of", "peak_of"]
