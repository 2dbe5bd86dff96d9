"""Number domains: what carries a value while a program runs."""

from tcverify.arithmetic.float64 import FLOAT64, Float64

__all__ = ["FLOAT64", "Float64"]
