"""Contents of memory that is uninitialised or freed: no program may depend on it, so it contains values that show up.

NaN in floating point; in the exact domain, which has none, a residue that no computation gives on purpose; integers far outside
of what an index or a count can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

#: Of the exact domain. Odd, and of neither small numerator nor small denominator.
RESIDUE = 371293.0


def poison_(tensor: torch.Tensor) -> None:
    """Overwrite the whole storage of a tensor, including parts that the tensor does not show, with the values of
    unwritten memory."""
    value = getattr(_get_current_dispatch_mode(), "unwritten", math.nan)
    with _disable_current_modes():
        _fill(tensor, value)


def make_poisoned(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a factory of uninitialised tensors, and fill what it makes."""
    mode = _get_current_dispatch_mode()
    value = getattr(mode, "unwritten", None)
    with _disable_current_modes():
        found = make(*args, **kwargs)
        if value is not None and found.is_floating_point() and found.dtype is not torch.float64:
            found = torch.empty_strided(found.shape, found.stride(), dtype=torch.float64)
        _fill(found, math.nan if value is None else value)
    return found


def _fill(tensor: torch.Tensor, value: float) -> None:
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.itemsize
    spoil_(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,)), value)


def spoil_(tensor: torch.Tensor, value: float) -> None:
    """Overwrite what a tensor shows.

    Args:
        value: of floating-point numbers.
    """
    with _disable_current_modes():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(value)
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            least = torch.iinfo(tensor.dtype).min
            tensor.fill_(least // 3 if least else 0xAA)  # 0xAA… and 0x55… shifted: no size, no index


__all__ = ["RESIDUE", "make_poisoned", "poison_", "spoil_"]
