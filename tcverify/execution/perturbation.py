"""Small changes of what is computed, by which the conditioning of a program is measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tcverify.domains.float64 import PERTURBATION
from tcverify.ops import Collective


class Perturbation:
    """Multiplies results and addends by 1 ± 2⁻⁵¹, and permutes the order of sums; a function of its seed and of call order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return value * (1 + signs * PERTURBATION)

    def addends(self, calls: Sequence[Collective], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What ranks contribute to a collective, perturbed where it is added up: another program may round it before that."""
        return [
            self(one) if call.reduce_op in ("sum", "avg") else one for call, one in zip(calls, tensors, strict=True)
        ]

    def order(self, members: int) -> list[int]:
        return torch.randperm(members, generator=self._generator).tolist()


__all__ = ["Perturbation"]
