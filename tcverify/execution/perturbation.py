"""Small changes of what is computed, by which the conditioning of a program is measured."""

from __future__ import annotations

import torch

from tcverify.domains.float64 import PERTURBATION


class Perturbation:
    """Multiplies results by 1 ± 2⁻⁵¹, and permutes the order of sums; a function of its seed and of call order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return value * (1 + signs * PERTURBATION)

    def order(self, members: int) -> list[int]:
        return torch.randperm(members, generator=self._generator).tolist()


__all__ = ["Perturbation"]
