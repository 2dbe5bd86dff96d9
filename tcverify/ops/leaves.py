"""Finds values in nested arguments and results."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.fx.node import map_aggregate

T = TypeVar("T")


def leaves(value: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Return the instances of a type, or of one of several, in nested tuples, lists, dicts and slices, in order."""
    if isinstance(value, kind):
        return [value]
    found: list[T] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            found.append(leaf)
        return leaf

    map_aggregate(value, look)
    return found


__all__ = ["leaves"]
