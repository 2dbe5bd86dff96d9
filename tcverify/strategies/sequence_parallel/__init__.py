"""Tensor-parallel layers on functional collectives, as compilers capture them."""
