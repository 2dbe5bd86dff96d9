"""Placements: how the values of one tensor on the ranks of a group relate to each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tcverify.errors import ProgramError
from tcverify.ops.reductions import ReduceOp
from tcverify.registry.choices import is_one_of

#: Kinds of placements; see `Placement`.
PlacementKind: TypeAlias = Literal["replicated", "shard", "partial", "varying", "unknown"]

#: Kinds for which each member of the group has its own values.
VARIES: tuple[PlacementKind, ...] = ("partial", "varying", "unknown")
#: Kinds that need no argument.
_PLAIN: tuple[PlacementKind, ...] = ("replicated", "varying", "unknown")


@dataclass(frozen=True, slots=True)
class Placement:
    """Replicated, shard(dim), partial(op), varying or unknown over one mesh dim.

    - replicated: equal on all members of the group;
    - shard(dim): the chunk along `dim` at the member's position, with the chunk sizes of torch.chunk;
    - partial(op): an addend of a pending reduction;
    - varying: independent, unrelated values;
    - unknown: replicated or varying. Drawn as varying; see `tcverify.verification.conditions`.
    """

    kind: PlacementKind
    dim: int | None = None
    reduce_op: ReduceOp | None = None

    def __str__(self) -> str:
        if self.kind == "shard":
            return f"shard({self.dim})"
        if self.kind == "partial":
            return f"partial({self.reduce_op})"
        return self.kind

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read the form that `str` writes.

        Raises:
            ProgramError: the text is not a placement.
        """
        if is_one_of(text, _PLAIN):
            return cls(text)
        if match := re.fullmatch(r"shard\((\d{1,2})\)", text):
            return cls("shard", dim=int(match[1]))
        if text == "partial(sum)":
            return PARTIAL
        raise ProgramError(f"'{text}' is not a placement", "use replicated, varying, shard(DIM) or partial(sum)")


REPLICATED = Placement("replicated")
VARYING = Placement("varying")
UNKNOWN = Placement("unknown")
PARTIAL = Placement("partial", reduce_op="sum")


def shard(dim: int) -> Placement:
    """Shard along `dim`."""
    return Placement("shard", dim=dim)


def chunk_bounds(size: int, parts: int, position: int) -> tuple[int, int]:
    """Return [start, end) of the chunk that torch.chunk (and DTensor) give to `position` of `parts`."""
    step = -(-size // parts)
    return min(position * step, size), min((position + 1) * step, size)
