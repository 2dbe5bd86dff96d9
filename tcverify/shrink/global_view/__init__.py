"""Moves that make programs of whole tensors with layouts smaller, on all ranks at once."""
