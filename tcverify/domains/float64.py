"""The float64 domain: every floating-point value of a program is carried in double precision.

Rounding that the program asks for (casts to bf16 and the like) belongs to the native domain; here a cast between floating
dtypes is the identity, so that a legal reordering differs from the original by double-precision rounding only.
"""

from __future__ import annotations

from typing import Any

import torch

from tcverify.domains.base import Domain, carry_nested

#: Relative size of the perturbation that the conditioning probe applies to the output of every node.
PERTURBATION = 2.0**-51


class Float64(Domain):
    """Carries floating-point tensors as float64; integers and booleans stay as they are."""

    name = "float64"

    def carry(self, value: Any) -> Any:
        """See `Domain.carry`."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
            return value.to(torch.float64)
        return carry_nested(value, self) if isinstance(value, (tuple, list)) else value


FLOAT64 = Float64()
