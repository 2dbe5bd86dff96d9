"""The `bucketing` dialect: how Inductor puts the operands of several collectives together.

Source: torch/_inductor/fx_passes/bucketing.py. Arguments differ between versions of torch; a meaning reads those of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tcverify.domains import make_poisoned
from tcverify.errors import UnsupportedOp
from tcverify.ops.op import Op
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor

_GATHER, _SCATTER = "bucketing::_pre_bucket_all_gather", "bucketing::_pre_bucket_reduce_scatter"


def pre_bucket_all_gather(ag_ins: Sequence[Tensor], group_size: int, *rest: Any) -> Tensor:
    """The buffer of an all_gather, with the operands in the part of this rank and nothing written elsewhere.

    Args:
        ag_ins: what each rank contributes; cast where it has another dtype than the buffer.
        rest: [the group's name until torch 2.12,] the dtype of the buffer, [since 2.10 a number for each operand's dtype,] the
            position of this rank in its group, [groups of operands that are copied together].

    Returns:
        Shape [group_size · elements of all operands].
    """
    dtype = _dtype(rest)
    return _gathering(ag_ins, group_size, rest, torch.float64 if dtype.is_floating_point else dtype)


def native_pre_bucket_all_gather(ag_ins: Sequence[Tensor], group_size: int, *rest: Any) -> Tensor:
    """The same, in the dtype of the buffer."""
    return _gathering(ag_ins, group_size, rest, _dtype(rest))


def _gathering(ag_ins: Sequence[Tensor], group_size: int, rest: Sequence[Any], carrier: torch.dtype) -> Tensor:
    told = [one for one in rest if not isinstance(one, str)]
    after = told[1:]
    if isinstance(after[0], (list, tuple)):
        if len(set(after[0])) > 1:
            raise UnsupportedOp(
                _GATHER, "it packs several dtypes into the bytes of one, which number domains do not carry"
            )
        after = after[1:]
    rank = after[0]
    elements = sum(one.numel() for one in ag_ins)
    buffer = make_poisoned(torch.empty, elements * group_size, dtype=carrier)
    mine = buffer.narrow(0, elements * rank, elements)
    for place, source in zip(mine.split([one.numel() for one in ag_ins]), ag_ins, strict=True):
        place.copy_(source.reshape(-1))
    return buffer


def _dtype(rest: Sequence[Any]) -> torch.dtype:
    return next(one for one in rest if isinstance(one, torch.dtype))


def pre_bucket_reduce_scatter(
    rs_ins: Sequence[Tensor], group_size: int, unpadded_input_indices: Sequence[int] | None = None
) -> Tensor:
    """The operand of one reduce_scatter for several: rank by rank, the chunk of each of them along dim 0, flattened.

    Args:
        rs_ins: operands scattered along dim 0, padded with zeros if they cannot be divided evenly.
        unpadded_input_indices: which of them can be such (since torch 2.14).
    """
    rows = []
    for one in rs_ins:
        missing = -one.shape[0] % group_size
        if missing:
            one = torch.cat([one, torch.zeros([missing, *one.shape[1:]], dtype=one.dtype)])
        rows.append(one.reshape(group_size, math.prod(one.shape) // group_size))
    return torch.cat(rows, 1).flatten()


OPS = (
    Op(_GATHER, pre_bucket_all_gather, native=native_pre_bucket_all_gather),
    Op(_SCATTER, pre_bucket_reduce_scatter),
)


def _load() -> None:
    import torch._inductor.fx_passes.bucketing  # noqa: F401 - defines them


register_dialect("bucketing", OPS, load=_load, imported=True, complete=True)

__all__ = ["OPS", "native_pre_bucket_all_gather", "pre_bucket_all_gather", "pre_bucket_reduce_scatter"]
