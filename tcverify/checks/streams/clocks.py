"""Clocks: which op is known to be complete when another one starts, among ops that the host issues to streams.

An op comes after the ops issued to its stream before it, after those whose tokens it waits for, and after all predecessors
of these; after nothing else. A vector clock per op counts, by stream, the ops that it comes after: linear in ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from tcverify.checks.streams.reading import BEGINNING
from tcverify.program.stream_options import MAIN_STREAM


class Clocks:
    """The order of ops, by their index in issue order. `BEGINNING` precedes all of them on the main stream."""

    def __init__(self, streams: Sequence[int], after: Sequence[Sequence[int]]) -> None:
        """Compute the clocks.

        Args:
            streams: where each op runs.
            after: per op, the earlier ops whose tokens it waits for; `BEGINNING` is one of them.
        """
        self._columns = {stream: i for i, stream in enumerate(dict.fromkeys([MAIN_STREAM, *streams]))}
        self._where: list[int] = []
        self._order: list[
            int
        ] = []  # position of an op on its stream, from 1; the beginning has position 1 on the main stream
        beginning = [1] + [0] * (len(self._columns) - 1)
        now: list[list[int] | None] = [None] * len(self._columns)
        now[0] = beginning
        self.clocks: list[list[int]] = []
        for stream, tokens in zip(streams, after, strict=True):
            column = self._columns[stream]
            before = now[column]
            clock = list(before) if before is not None else [0] * len(self._columns)
            for token in tokens:
                other = self.clocks[token] if token != BEGINNING else beginning
                clock = [a if a > b else b for a, b in zip(clock, other, strict=True)]
            clock[column] += 1
            now[column] = clock
            self._where.append(column)
            self._order.append(clock[column])
            self.clocks.append(clock)

    def ordered(self, first: int, second: int) -> bool:
        """Whether `second` comes after `first`, or is it."""
        if first == BEGINNING:
            return self.clocks[second][0] >= 1
        return self.clocks[second][self._where[first]] >= self._order[first]

    def difference(self, other: Clocks, op: int) -> int | None:
        """An op that precedes `op` in one order and not in the other, both over the same streams; None if there is none.

        Differences that only the beginning makes do not count.
        """
        for column, (a, b) in enumerate(zip(self.clocks[op], other.clocks[op], strict=True)):
            if a != b and (column, max(a, b)) != (0, 1):
                place = column, max(a, b)
                return next(i for i in range(op) if (self._where[i], self._order[i]) == place)
        return None


__all__ = ["Clocks"]
