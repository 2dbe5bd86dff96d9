"""Scaled-down twins: a program of everyday size with small numbers in place of large ones, that means the same up to sizes."""

from tcverify.twin.comparing import Contrast, contrast
from tcverify.twin.making import Twin, twin_of

__all__ = ["Contrast", "Twin", "contrast", "twin_of"]
