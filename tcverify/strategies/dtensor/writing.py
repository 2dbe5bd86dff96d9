"""A program of whole tensors under construction, and functions that add an input or a call to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tcverify.errors import UnsupportedOp
from tcverify.ops import lookup, resolve
from tcverify.program import PARTIAL, VARYING, Placement, Recipe
from tcverify.strategies.draft import DraftValue, NoSite, ProgramDraft

#: Sizes of dims: divisible by small numbers of ranks, by none, fewer elements than ranks, one.
SIZES = (4, 4, 4, 3, 5, 2, 6, 8, 1, 7)

#: How the addends of partial inputs are reduced.
REDUCTIONS = ("sum", "sum", "avg", "max", "min", "product")


@dataclass(slots=True)
class DTensorWriter:
    """A program under construction.

    Attributes:
        values: what ops can read, the oldest first.
        inputs: how many there are.
        written: what calls write into, where torch has an op that does.
    """

    draft: ProgramDraft
    values: list[DraftValue] = field(default_factory=list)
    inputs: int = 0
    written: DraftValue | None = None

    def shape(self, value: DraftValue) -> tuple[int, ...]:
        return self.draft.shape(value)

    def input(
        self, shape: Sequence[int], how: int = 0, dtype: torch.dtype = torch.float32, below: int = 2
    ) -> DraftValue:
        """Add an input; floating ones may be partial over a dim of the mesh, or over two.

        Args:
            how: 0 to 127 for one that is the same on all ranks.
            below: of integers the bound.
        """
        mesh = self.draft.mesh
        name = f"x{self.inputs}"
        self.inputs += 1
        kind = {torch.int64: Recipe("integers", float(below)), torch.bool: Recipe("mask")}.get(dtype, Recipe())
        over: list[str] = []
        if how >= 128 and dtype.is_floating_point:
            number = how % (2 * len(mesh.dims))
            over = [mesh.dims[number % len(mesh.dims)].name] if number < len(mesh.dims) else [d.name for d in mesh.dims]
        reduction = REDUCTIONS[how // 8 % len(REDUCTIONS)]
        placed: Placement = PARTIAL if reduction == "sum" else VARYING
        made = self.draft.input(name, tuple(shape), dtype, tuple((dim, placed) for dim in over), kind)
        for dim in over:
            made = self.draft.call("_c10d_functional::all_reduce", made, reduction, dim)
            made = self.draft.call("_c10d_functional::wait_tensor", made)
        return made

    def call(self, op: str, *args: Any, **kwargs: Any) -> list[DraftValue]:
        """Add a call, if this torch has the op and its arguments fit together; return its tensors."""
        if args and args[0] is self.written:
            op = _in_place_form(op)
        name = f"aten::{op}"
        try:
            if lookup(resolve(name)).run is None:
                return []
            made = self.draft.typed_call(name, *args, **kwargs)
        except (UnsupportedOp, NoSite):
            return []
        found = self.draft.specs(made)[0]
        if not isinstance(found, (tuple, list)):
            return [made]
        several = [number for number, spec in enumerate(found[:4]) if spec is not None]
        return [replace(self.draft.item(made, number), dtype=found[number].dtype) for number in several]

    def fitting(
        self, x: DraftValue, a: int, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> DraftValue:
        """A value of this shape: an existing one, a new input, or a new one that broadcasts to the shape of `x`."""
        wanted = tuple(self.shape(x) if shape is None else shape)
        fits = [v for v in self.values if self.shape(v) == wanted and v.dtype == dtype]
        if a % 4 != 3 and fits:
            return fits[-1 - a // 4 % len(fits)]
        if shape is None and a % 4 == 2:
            cut = a // 4 % (len(wanted) + 1)
            wanted = tuple(1 if (a >> 5) % 2 and n == 0 else s for n, s in enumerate(wanted[cut:]))
        return self.input(wanted, a, dtype)


def _in_place_form(op: str) -> str:
    """The op that writes its result into its first operand; the same op, if there is none."""
    name, _, overload = op.partition(".")
    for form in (f"{name}_.{overload}", f"{name}_"):
        try:
            resolve(f"aten::{form}")
        except UnsupportedOp:
            continue
        return form
    return op


def to_floating(w: DTensorWriter, x: DraftValue) -> DraftValue:
    """The value in floating point."""
    if x.dtype == torch.float32:
        return x
    return (w.call("_to_copy", x, dtype=torch.float32) or [x])[0]


def dim_of(w: DTensorWriter, x: DraftValue, a: int) -> int:
    rank = max(1, len(w.shape(x)))
    return a % rank - (rank if a >= 128 else 0)


def dims_of(w: DTensorWriter, x: DraftValue, a: int) -> list[int]:
    dims = len(w.shape(x))
    found = [n for n in range(dims) if (a >> n) % 2 == 0]
    return [n - dims for n in found] if a >= 128 else found


__all__ = ["REDUCTIONS", "SIZES", "DTensorWriter", "dim_of", "dims_of", "to_floating"]
