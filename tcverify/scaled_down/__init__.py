"""Scaled-down twins: programs of everyday size with small numbers in place of large ones, that mean the same up to sizes."""

from tcverify.scaled_down.making import twins_of
from tcverify.scaled_down.pairs import small_pair

__all__ = ["small_pair", "twins_of"]
