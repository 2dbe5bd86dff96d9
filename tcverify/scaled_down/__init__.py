"""Scaled-down programs: large sizes of a program are replaced by small ones, with the same meaning up to sizes."""

from tcverify.scaled_down.pairs import small_pair
from tcverify.scaled_down.scaling import twins_of

__all__ = ["small_pair", "twins_of"]
