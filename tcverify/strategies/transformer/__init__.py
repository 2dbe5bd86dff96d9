"""Tensor-parallel transformers, and variations of them."""
