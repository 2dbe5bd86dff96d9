"""Sizes of captured tensors as numbers: symbolic ones become what they were in the example that was compiled."""

from __future__ import annotations

from typing import Any

import torch

from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec


def concrete_size(value: Any, where: str) -> Any:
    """Return the number behind a symbolic one, without making the compiler promise that it is always this; others as they are.

    Raises:
        ProgramError: it depends on data, so that there is none.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    found = value.node.hint
    if found is None:
        raise ProgramError(
            f"{where} has the size {value}, which depends on data",
            "capture the graph with sizes that do not, or mark the dims static",
        )
    return found


def spec_of(tensor: torch.Tensor, where: str, aliases: dict[int, int]) -> TensorSpec:
    """Describe a tensor, fake or real. `aliases` numbers storages.

    Raises:
        ProgramError: it is not dense, or a size depends on data.
    """
    if tensor.layout is not torch.strided:
        raise ProgramError(f"{where} is a tensor of layout {tensor.layout}", "only strided tensors are supported")
    sizes, strides = (tuple(int(concrete_size(v, where)) for v in values) for values in (tensor.shape, tensor.stride()))
    alias = aliases.setdefault(tensor.untyped_storage()._cdata, len(aliases))
    return TensorSpec(sizes, strides, tensor.dtype, int(concrete_size(tensor.storage_offset(), where)), alias)


__all__ = ["concrete_size", "spec_of"]
