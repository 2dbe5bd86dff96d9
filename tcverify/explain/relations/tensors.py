"""Whether two tensors are the same, up to what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

#: The values of one node by rank.
Values: TypeAlias = Mapping[int, torch.Tensor]

#: Two float64 values are the same when they differ by at most this share of the largest magnitude: reordered sums differ by less.
TOLERANCE = 1e-9

#: For narrower dtypes, tolerance in units in the last place of the largest magnitude.
UNITS = 16.0


@dataclass(frozen=True, slots=True)
class Measure:
    """When two values count as the same.

    Attributes:
        tolerance: how much they may differ, as a share of the largest magnitude.
        units: for narrower dtypes than float64, how many units in the last place of the largest magnitude at least.
        modulus: of the residues that the values are, which are equal or are not; 0 where they are no residues.
    """

    tolerance: float = TOLERANCE
    units: float = UNITS
    modulus: int = 0


FLOATING = Measure()


def values_close(value: torch.Tensor, expected: torch.Tensor, measure: Measure = FLOATING) -> bool:
    """Whether shapes and dtypes agree, NaN and infinities stand at the same places, and the rest differs by rounding at most."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return bool(torch.equal(value, expected))
    limit = measure.tolerance
    if expected.dtype is not torch.float64:
        limit = max(limit, measure.units * torch.finfo(expected.dtype).eps)
    scale = float(expected.abs().max())
    if math.isfinite(scale):
        return largest_magnitude(value - expected, measure) <= limit * scale * (not measure.modulus)
    finite = expected.isfinite()
    patterns = (value == expected) | (value.isnan() & expected.isnan()) | (finite & value.isfinite())
    if not bool(patterns.all()):
        return False
    difference = (value - expected)[finite]
    rest = float(expected[finite].abs().max()) if difference.numel() else 0.0
    return not difference.numel() or largest_magnitude(difference, measure) <= limit * rest * (not measure.modulus)


def largest_magnitude(difference: torch.Tensor, measure: Measure) -> float:
    """The largest magnitude of a difference; of residues, 0 where all are multiples of the modulus."""
    if measure.modulus:
        difference = torch.remainder(difference, measure.modulus)
    return float(difference.abs().max())


def sum_tensors(values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The sum of tensors of one shape; None where they cannot be summed."""
    if len({(v.shape, v.dtype) for v in values}) > 1 or values[0].dtype is torch.bool:
        return None
    found = values[0].clone()
    for value in values[1:]:
        found += value
    return found


def concatenate_or_none(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """The concatenation along `dim`; None where they cannot be joined."""
    if len({(len(v.shape), v.shape[:dim], v.shape[dim + 1 :], v.dtype) for v in values}) > 1:
        return None
    return torch.cat(list(values), dim)


def view_or_none(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """The value in another shape; None where it has another number of elements."""
    if tuple(value.shape) == tuple(shape):
        return value
    return value.reshape(tuple(shape)) if value.numel() == math.prod(shape) else None


def strip_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its leading dims of size 1."""
    start = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[start:])
