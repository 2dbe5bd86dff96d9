"""Scaled-down twins: programs of everyday size with small numbers in place of large ones, that mean the same up to sizes."""

from tcverify.scaled_down.pairs import small_pair
from tcverify.scaled_down.scaling import twins_of

__all__ = ["small_pair", "twins_of"]
