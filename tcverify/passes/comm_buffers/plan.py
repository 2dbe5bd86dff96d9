"""Offsets of communication buffers: one for each, the same in every iteration and on every rank of its group.

A plan is a function of the graph, so ranks that run one graph come to the same one. Buffers that are never needed at the same
time may share a place.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class BufferRequest:
    """A request for a place in the plan.

    Attributes:
        node: makes the value that lives there.
        group: of the collectives that use it.
        nbytes: its size.
        birth, death: first and last position in the graph at which it is needed.
        collectives: names of the nodes that communicate from it.
    """

    node: str
    group: str
    nbytes: int
    birth: int
    death: int
    collectives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that has found its place, at `offset` bytes. See `BufferRequest`."""

    node: str
    group: str
    offset: int
    nbytes: int
    birth: int
    death: int
    collectives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """All buffers of a graph, in the order of their collectives.

    Attributes:
        reuses: whether buffers that are never needed together may share a place.
        nbytes: up to the end of the last buffer.
    """

    buffers: tuple[Buffer, ...] = ()
    reuses: bool = False
    nbytes: int = 0

    def __str__(self) -> str:
        """The plan as a table."""
        rows = [("buffer", "group", "offset", "bytes", "live", "collectives")]
        for b in self.buffers:
            live = f"{b.birth}-{b.death}"
            rows.append((b.node, b.group, str(b.offset), str(b.nbytes), live, ", ".join(b.collectives)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        how = "places are shared" if self.reuses else "every buffer has its own place"
        return "\n".join([*lines, f"{len(self.buffers)} buffers in {self.nbytes} bytes; {how}"])


def plan_buffers(wanted: Sequence[BufferRequest], alignment: int, *, reuse: bool) -> BufferPlan:
    """Find a place for every request.

    Args:
        alignment: of which offsets are multiples, in bytes.
        reuse: whether buffers that are never needed at the same time may share a place.
    """
    offsets = pack(wanted, alignment) if reuse else offsets_in_a_row(wanted, alignment)
    buffers = tuple(
        Buffer(one.node, one.group, offset, one.nbytes, one.birth, one.death, one.collectives)
        for one, offset in zip(wanted, offsets, strict=True)
    )
    return BufferPlan(buffers, reuse, max((b.offset + b.nbytes for b in buffers), default=0))


def offsets_in_a_row(wanted: Sequence[BufferRequest], alignment: int) -> list[int]:
    """Offsets one behind the other."""
    offsets, end = [], 0
    for one in wanted:
        offsets.append(end)
        end += align_up(one.nbytes, alignment)
    return offsets


def pack(wanted: Sequence[BufferRequest], alignment: int) -> list[int]:
    """Offsets such that no two that are needed at the same time overlap.

    In the order of their births, each takes the smallest gap that it fits into, the lowest of equal ones, or what lies behind all
    that is live.
    """
    offsets = [0] * len(wanted)
    live: list[tuple[int, int]] = []  # (offset, end), by offset
    ends: list[tuple[int, int, int]] = []  # (death, offset, end)
    for number in sorted(range(len(wanted)), key=lambda i: (wanted[i].birth, i)):
        one = wanted[number]
        while ends and ends[0][0] < one.birth:
            _, offset, end = heappop(ends)
            live.remove((offset, end))
        size = align_up(one.nbytes, alignment)
        best: tuple[int, int] | None = None
        free = 0
        for offset, end in live:
            gap = offset - free
            if gap >= size and (best is None or gap < best[0]):
                best = gap, free
            free = end
        place = best[1] if best is not None else free
        offsets[number] = place
        insort(live, (place, place + size))
        heappush(ends, (one.death, place, place + size))
    return offsets


def align_up(nbytes: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // alignment) * alignment
