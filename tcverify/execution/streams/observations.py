"""What an order of the streams shows. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """What happened on a stream (`on`, in words, where it has a name): "runs", or for collectives "begins" and "ends", or "waits"
    for ever."""

    rank: int
    stream: int
    node: str
    what: str
    on: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.on or f'stream {self.stream}'}: '{self.node}' {self.what}"


@dataclass(frozen=True, slots=True)
class OrderObservation:
    """A failure in one order.

    Attributes:
        kind: "RAW", "WAR" or "WAW" for accesses in the wrong order; "collective-order", "mismatch" or "deadlock" for
            collectives; "raised"; "output" for outputs that differ from those in issue order.
        node, stream: the op that detected it.
        other: the op that should have been complete, or that ran too early; "" if there is none.
        text: one sentence.
        order: the order's name.
        events: the events until then, in order, and that of the op that detected it.
    """

    kind: str
    rank: int
    node: str
    stream: int
    other: str
    text: str
    order: str
    events: tuple[Event, ...] = field(repr=False)
