"""Asynchronous collectives of one rank: which are in flight, and when they read and write.

Between a start and its wait a collective may read its contribution, and write its result, at any time. Three extremes represent
everything in between. A program without races computes the same under each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch

from tcverify.domains import FLOAT64, Domain, spoil_
from tcverify.ops import Collective, Start

#: When a collective reads its contribution and writes its result:
#: "issue": both where it starts, as far as the other ranks have come; "wait": both at the wait; "apart": it reads where it
#: starts and writes at the wait, and what it writes into holds nothing of use in between.
Moment: TypeAlias = Literal["issue", "wait", "apart"]
TIMINGS: tuple[Moment, ...] = get_args(Moment)

#: Gives the timing of a collective from the rank and the name of the node that starts it.
Timing: TypeAlias = Callable[[int, str], Moment]


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A collective that a rank has started.

    Attributes:
        node: that started it.
        collective: the call.
        tensor: what it contributes: a copy where it reads at once, else the operand itself.
        output: where its result goes.
        early: whether a rank stays at the start for as long as the others can come to theirs.
        late: whether it is carried out only when a rank that waits for it can do nothing else.
        done: whether the result has been written.
    """

    node: str
    collective: Collective
    tensor: torch.Tensor
    output: torch.Tensor
    early: bool
    late: bool
    done: bool = False
    finish: Callable[[torch.Tensor], None] = field(default=lambda result: None)

    def write(self, result: torch.Tensor) -> None:
        """Write the result, of the shape of the output; an output without elements belongs to a rank that gets nothing."""
        if self.output.numel():
            self.output.copy_(result.view(self.output.shape))
        self.done = True
        self.finish(self.output)


@dataclass(frozen=True, slots=True)
class Join:
    """What a rank asks for at a wait: the ends of these."""

    under_way: tuple[PendingCollective, ...]


@dataclass(slots=True)
class Outstanding:
    """What a rank has started and not waited for, by storage."""

    timing: Moment | Callable[[str], Moment] = "issue"
    domain: Domain = FLOAT64
    by_storage: dict[int, list[PendingCollective]] = field(default_factory=dict)

    def start(self, node: str, start: Start) -> PendingCollective:
        """Begin what a node asks for."""
        timing = self.timing if isinstance(self.timing, str) else self.timing(node)
        tensor = contribution(start, timing)
        unwrite_(start, timing, self.domain)
        made = PendingCollective(node, start.collective, tensor, start.output, timing == "issue", timing != "issue")
        self.by_storage.setdefault(storage_of(start.output), []).append(made)
        return made

    def take(self, tensor: torch.Tensor) -> tuple[PendingCollective, ...]:
        """Return what was to write into the storage of a tensor, which is waited for now."""
        return tuple(self.by_storage.pop(storage_of(tensor), ()))


def contribution(start: Start, timing: Moment) -> torch.Tensor:
    """What a collective reads: a copy where it reads at once."""
    return start.tensor if timing == "wait" and not start.copied else start.tensor.clone()


def unwrite_(start: Start, timing: Moment, domain: Domain) -> None:
    """Poison an output that is in flight, unless the collective still has to read it."""
    if timing == "apart" or storage_of(start.tensor) != storage_of(start.output):
        spoil_(start.output, domain.unwritten)


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the storage of a tensor; unique as long as the tensor is alive."""
    return int(tensor.untyped_storage()._cdata)


__all__ = [
    "TIMINGS",
    "Join",
    "Moment",
    "Outstanding",
    "PendingCollective",
    "Timing",
    "contribution",
    "storage_of",
    "unwrite_",
]
