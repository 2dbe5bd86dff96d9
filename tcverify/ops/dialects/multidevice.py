"""The `multidevice` dialect: programs whose tensors carry layouts, before communication is chosen.

`set` and `reduce` take a tensor from one layout to another, whatever communication that needs; all other ops are local. A rank
without a part of the operand passes None; a rank without a part of the result gets a tensor without elements. Both ops block.
Their meaning is defined on the whole tensor: assembled from its parts, reduced, and divided again.
Source: nvFuser's resharding expressions (LoadStoreOp of type Set, ReductionOp).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from tcverify.errors import ProgramError
from tcverify.ops.collective import Collective
from tcverify.ops.definitions import define
from tcverify.ops.layout import Layout
from tcverify.ops.op import Op, Request
from tcverify.ops.reductions import ReduceOp
from tcverify.ops.resharding import Resharding
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor
Steps = Generator[Request, Tensor, Any]

SET = "multidevice::set"
REDUCE = "multidevice::reduce"

#: Signatures. `shape` is the (global) shape of the operand, `source` and `target` are layouts of operand and result, `dim`
#: counts in the operand. `dtype` is that of both.
SCHEMAS: dict[str, str] = {
    "set": "(Tensor? x, str source, str target, SymInt[] shape, ScalarType dtype, int rank) -> Tensor",
    "reduce": "(Tensor? x, int dim, str reduce_op, str source, str target, SymInt[] shape, ScalarType dtype, int rank) -> Tensor",
}


@dataclass(frozen=True, slots=True)
class _Call:
    """One rank's call, checked."""

    resharding: Resharding
    dtype: torch.dtype
    rank: int

    def __post_init__(self) -> None:
        if self.rank not in self.resharding.ranks:
            raise ProgramError(f"rank {self.rank} neither has nor gets a part of '{self.resharding}'")

    def operand(self, x: Tensor | None) -> Tensor | None:
        """The rank's part of the operand, if it matches the layout."""
        source, shape = self.resharding.source, self.resharding.shape
        if (x is None) != (self.rank not in source.mesh):
            raise ProgramError(
                f"rank {self.rank} is {'' if x is None else 'not '}in mesh {source.mesh} and "
                f"{'gives no' if x is None else 'gives an'} operand"
            )
        if x is not None and tuple(x.shape) != source.local_shape(shape):
            raise ProgramError(
                f"the operand on rank {self.rank} has shape {list(x.shape)}; of a tensor of shape {list(shape)} in layout "
                f"'{source}' it holds {list(source.local_shape(shape))}"
            )
        return x

    @property
    def result_shape(self) -> Sequence[int]:
        target = self.resharding.target
        return target.local_shape(self.resharding.result_shape) if self.rank in target.mesh else (0,)


def _steps(me: int, call: _Call, x: Tensor | None) -> Steps:
    if me != call.rank:
        raise ProgramError(f"rank {me} calls as rank {call.rank}", "give the rank that the graph is run by")
    x = call.operand(x)
    given = torch.zeros(0, dtype=call.dtype) if x is None else x
    made = call.resharding
    request = Collective(
        "reshard", made.ranks, tuple(given.shape), call.dtype, dim=made.dim, reduce_op=made.reduce_op, resharding=made
    )
    return (yield Request(request, given))


def _asked(
    source: str, target: str, shape: Sequence[int], dim: int | None = None, reduce_op: str | None = None
) -> Resharding:
    known = cast(ReduceOp | None, reduce_op)  # `Resharding` refuses other words
    return Resharding(Layout.parse(source), Layout.parse(target), tuple(shape), dim, known)


def set_(
    me: int, x: Tensor | None, source: str, target: str, shape: Sequence[int], dtype: torch.dtype, rank: int
) -> Steps:
    """The tensor in another layout."""
    return _steps(me, _Call(_asked(source, target, shape), dtype, rank), x)


def reduce(
    me: int,
    x: Tensor | None,
    dim: int,
    reduce_op: str,
    source: str,
    target: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    rank: int,
) -> Steps:
    """The tensor reduced over a dim, which goes away, in another layout."""
    return _steps(me, _Call(_asked(source, target, shape, dim, reduce_op), dtype, rank), x)


def _fake_set(
    x: Tensor | None, source: str, target: str, shape: Sequence[int], dtype: torch.dtype, rank: int
) -> Tensor:
    call = _Call(_asked(source, target, shape), dtype, rank)
    return _fake(call, x)


def _fake_reduce(
    x: Tensor | None,
    dim: int,
    reduce_op: str,
    source: str,
    target: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    rank: int,
) -> Tensor:
    return _fake(_Call(_asked(source, target, shape, dim, reduce_op), dtype, rank), x)


def _fake(call: _Call, x: Tensor | None) -> Tensor:
    x = call.operand(x)
    if x is not None and x.dtype != call.dtype:
        raise ProgramError(f"the operand has dtype {x.dtype}, and is said to have {call.dtype}")
    if x is None:
        return torch.empty(call.result_shape, dtype=call.dtype)
    return x.new_empty(call.result_shape)


OPS = (
    Op(
        SET, set_, collective=True, signature=SCHEMAS["set"], fake=_fake_set, resources=("comm",), effect=True,
    ),
    Op(
        REDUCE, reduce, collective=True, signature=SCHEMAS["reduce"], fake=_fake_reduce, resources=("comm",), effect=True,
    ),
)  # fmt: skip

register_dialect("multidevice", OPS, load=lambda: define("multidevice", OPS), complete=True)

__all__ = ["OPS", "REDUCE", "SCHEMAS", "SET"]
