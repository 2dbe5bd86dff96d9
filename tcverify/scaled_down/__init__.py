"""Scaled-down programs: large sizes of a program are replaced by small ones, with the same meaning up to sizes."""

from tcverify.scaled_down.pairs import small_pair
from tcverify.scaled_down.scaling import scale_down

__all__ = ["scale_down", "small_pair"]
