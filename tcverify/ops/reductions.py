"""Ways to reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

#: How collectives reduce.
ReduceOp: TypeAlias = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]

#: By the names that c10d gives them.
REDUCTIONS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,  # divided by the number of members at the end
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

__all__ = ["REDUCTIONS", "ReduceOp"]
