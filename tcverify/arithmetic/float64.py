"""The float64 domain: every floating-point value of a program is carried in double precision.

Rounding that the program asks for (casts to bf16 and the like) belongs to the native domain; here a cast between floating
dtypes is the identity, so that a legal reordering differs from the original by double-precision rounding only.
"""

from __future__ import annotations

from typing import Any

import torch

#: Relative size of the perturbation that the conditioning probe applies to the output of every node.
PERTURBATION = 2.0**-51


class Float64:
    """Carries floating-point tensors as float64; integers and booleans stay as they are."""

    name = "float64"

    def carry(self, value: Any) -> Any:
        """Return `value` as this domain carries it. Tensors keep their shape; non-floating ones are returned as they are."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
            return value.to(torch.float64)
        if isinstance(value, (tuple, list)):
            made = [self.carry(v) for v in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return value

    def literal(self, value: Any) -> Any:
        """Return a constant argument of a node as this domain reads it: floating dtypes become the carrier's."""
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return value


FLOAT64 = Float64()
