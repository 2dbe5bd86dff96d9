"""An oracle for races with asynchronous collectives, by brute force: every moment at which they may read and write is played.

Values are terms, which tell by how they were made whether two are the same. Graphs are lists of `Move`s; what an op reads, writes
and aliases stands here once more, in plain words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from tcverify.program import Program
from tests.support.async_programs import Functional, program

#: What a graph can do: with the value numbered `a`, and `b` where it takes two.
KINDS = ("relu", "add_", "view", "start", "start_", "wait", "like", "wait", "pair", "add_")

#: Combinations that are played of all moments; beyond, those at the ends.
MOST = 1500


@dataclass(frozen=True)
class Move:
    """One call: its kind, and its operands as numbers of earlier values. Values 0 and 1 are the inputs."""

    kind: str
    a: int
    b: int


def moves_of(data: bytes) -> list[Move]:
    """Decode any bytes, three for a move."""
    moves: list[Move] = []
    values = 2
    for kind, a, b in zip(data[::3], data[1::3], data[2::3], strict=False):
        move = Move(KINDS[kind % len(KINDS)], a % values, b % values)
        moves.append(move)
        values += 2 if move.kind == "pair" else 1
    return moves


def program_of(moves: list[Move]) -> Program:
    """The program that makes these moves on every rank, and returns the last two values."""

    def build(b: Functional) -> Any:
        values: list[fx.Node] = [b.x, b.y]
        for move in moves:
            values += _call(b, move, values[move.a], values[move.b])
        return values[-2:]

    return program(build)


def _call(b: Functional, move: Move, x: fx.Node, y: fx.Node) -> list[fx.Node]:
    match move.kind:
        case "relu":
            return [b.relu(x)]
        case "add_":
            return [b.add_(x, y)]
        case "view":
            return [b.call("aten::view", x, [4, 4])]
        case "start":
            return [b.start(x, kind="all_to_all_single")]
        case "start_":
            return [b.start(x, kind="all_reduce_")]
        case "wait":
            return [b.wait(x)]
        case "like":
            return [b.call("aten::zeros_like", x)]
        case _:
            both = b.call("_c10d_functional::all_reduce_coalesced", [x, y], "sum", "dp")
            return [b.getitem(both, 0), b.getitem(both, 1)]


@dataclass(frozen=True)
class _Flight:
    """From storage to storage, started by a move; it must have ended before the move `until`. Some read at once."""

    start: int
    source: int
    target: int
    copied: bool
    until: int


def races(moves: list[Move]) -> bool:
    """Whether anything that is read, or left to the caller, depends on when collectives read and write."""
    flights, where = _flights(moves)
    choices = [list(_moments(flight)) for flight in flights]
    number = 1
    for choice in choices:
        number *= len(choice)
    if number > MOST:
        choices = [[choice[0], choice[-1], (choice[0][0], choice[-1][1])] for choice in choices]
    seen: set[Any] = set()
    for moments in itertools.product(*choices):
        for last_first in (False, True):
            seen.add(_play(moves, flights, where, moments, last_first))
            if len(seen) > 1:
                return True
    return False


def _flights(moves: list[Move]) -> tuple[list[_Flight], list[int]]:
    """What is on its way, until when, and the storage of every value."""
    where = [0, 1]
    under_way: list[tuple[int, int, int, bool]] = []
    flights: list[_Flight] = []
    storages = 2
    for index, move in enumerate(moves):
        made = [where[move.a]]
        if move.kind in ("relu", "start", "like", "pair"):
            made = list(range(storages, storages + (2 if move.kind == "pair" else 1)))
            storages += len(made)
        if move.kind in ("start", "start_", "pair"):
            sources = [where[move.a], where[move.b]][: len(made)]
            under_way += [(index, *ends, move.kind == "pair") for ends in zip(sources, made, strict=True)]
        if move.kind == "wait":
            flights += [_Flight(*one, index) for one in under_way if one[2] == where[move.a]]
            under_way = [one for one in under_way if one[2] != where[move.a]]
        where += made
    flights += [_Flight(*one, len(moves) + 1) for one in under_way]  # still under way when the caller looks
    return sorted(flights, key=lambda flight: flight.start), where


def _moments(flight: _Flight) -> Iterator[tuple[int, int]]:
    """When it reads, and when it writes: behind which move."""
    slots = range(flight.start, flight.until)
    reads = slots[:1] if flight.copied else slots
    return ((read, write) for read in reads for write in slots if read <= write)


def _play(
    moves: list[Move], flights: list[_Flight], where: list[int], moments: tuple[tuple[int, int], ...], last_first: bool
) -> Any:
    """All that is read, in the order of moves, and what the caller finds."""
    contents: dict[int, Any] = {storage: ("empty", storage) for storage in where}
    sent: dict[int, Any] = {}
    read: list[Any] = [None] * len(flights)
    order = list(range(len(flights)))[:: -1 if last_first else 1]
    seen: list[Any] = []
    value = 2
    for index, move in enumerate(moves):
        a, b = where[move.a], where[move.b]
        if move.kind == "relu":
            seen.append(contents[a])
            contents[where[value]] = ("relu", index, contents[a])
        elif move.kind == "add_":
            seen.append((contents[a], contents[b]))
            contents[a] = ("add", index, contents[a], contents[b])
        value += 2 if move.kind == "pair" else 1
        for number in order:
            if moments[number][0] == index:
                read[number] = sent[number] = contents[flights[number].source]
            if moments[number][1] == index:
                contents[flights[number].target] = ("sum", number, sent[number])
    returned = {0, 1, *where[-2:]}
    seen.append([contents[storage] for storage in sorted(returned)])
    for number in order:  # what nobody waits for ends behind the caller's look
        if read[number] is None:
            read[number] = contents[flights[number].source]
    return repr((seen, read))


__all__ = ["KINDS", "Move", "moves_of", "program_of", "races"]
