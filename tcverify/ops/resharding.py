"""Resharding: a tensor is moved from one layout to another, and may be reduced on the way. Its meaning, independent of
its implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tcverify.errors import ProgramError
from tcverify.ops.layout import Layout
from tcverify.ops.reductions import REDUCTIONS, ReduceOp


@dataclass(frozen=True, slots=True)
class Resharding:
    """A request for a resharding.

    Attributes:
        source, target: layouts of operand and result; with a reduction, dims of the target count in the result.
        shape: (global) shape of the operand.
        dim: of the operand, the dim that is reduced and goes away, or None.
        reduce_op: how, one of `REDUCTIONS`, or None.

    Raises:
        ProgramError: a layout is impossible for this shape, there is no such dim or reduction, or nothing to reduce.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    dim: int | None = None
    reduce_op: ReduceOp | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ProgramError(f"a tensor of shape {list(self.shape)} has no dim {self.dim} to reduce")
        if (self.dim is None) != (self.reduce_op is None):
            raise ProgramError(f"dim {self.dim} is reduced by '{self.reduce_op}'", "give both, or none")
        if self.reduce_op is not None and self.reduce_op not in REDUCTIONS:
            raise ProgramError(f"reduction '{self.reduce_op}' is not known", f"use one of {', '.join(REDUCTIONS)}")
        if self.dim is not None and self.shape[self.dim] == 0:
            raise ProgramError(f"a tensor of shape {list(self.shape)} has no elements to reduce along dim {self.dim}")
        self.source.check(self.shape)
        self.target.check(self.result_shape)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """(Global) shape of the result."""
        return tuple(size for dim, size in enumerate(self.shape) if dim != self.dim)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that take part: those of the source's mesh, then those that the target adds, in their orders."""
        return tuple(dict.fromkeys((*self.source.mesh.ranks, *self.target.mesh.ranks)))

    def whole(self, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Assemble the operand.

        Args:
            parts: by rank, at least those of the source's `holders`.
        """
        first = parts[self.source.mesh.ranks[0]]
        whole = first.new_zeros(self.shape)
        for rank in self.source.holders():
            whole[self.source.place(rank, self.shape)] = parts[rank]
        return whole

    def disagreement(self, parts: Mapping[int, torch.Tensor]) -> tuple[int, int] | None:
        """Two ranks that hold the same part of the operand, but not the same values; None where all agree.

        Rounding does not count: copies may have been computed in different orders.

        Args:
            parts: by rank, of the source's mesh.
        """
        places: dict[tuple[tuple[int, int], ...], int] = {}
        for rank in self.source.mesh.ranks:
            place = tuple((part.start, part.stop) for part in self.source.place(rank, self.shape))
            first = places.setdefault(place, rank)
            if first != rank and not _close(parts[first], parts[rank]):
                return first, rank
        return None

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank gets of the result: fresh and contiguous, without elements where it is not in the target's mesh."""
        if rank not in self.target.mesh:
            return whole.new_empty(0)
        return whole[self.target.place(rank, self.result_shape)].clone(memory_format=torch.contiguous_format)

    def addends(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """What is to be reduced, in order."""
        return [whole] if self.dim is None else whole.unbind(self.dim)

    def __str__(self) -> str:
        reduction = "" if self.dim is None else f" {self.reduce_op} over dim {self.dim},"
        return f"{list(self.shape)}{reduction} {self.source} → {self.target}"


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    equal = bool((first == second).all())  # not torch.equal, of which number domains know nothing
    if equal or not first.is_floating_point():
        return equal
    finite = first.isfinite()
    if bool((finite != second.isfinite()).any()):
        return False
    scale = float(first[finite].abs().max()) if bool(finite.any()) else 0.0
    most = max(1e-6, 16 * torch.finfo(first.dtype).eps) * scale
    return bool(((first - second)[finite].abs() <= most).all())


__all__ = ["Resharding"]
