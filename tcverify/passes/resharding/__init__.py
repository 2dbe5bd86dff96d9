"""Lowering of programs whose tensors carry layouts to communications, waits and streams, as nvFuser's host IR has them."""
