"""Sorts things into classes while it is still being found out what belongs together."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Partition(Generic[T]):
    """Classes of things (union-find). A thing is a class of its own until it is joined to another."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def of(self, one: T) -> T:
        """Return what stands for the class of a thing."""
        parent = self._parent
        while (above := parent.get(one, one)) != one:
            parent[one] = parent.get(above, above)
            one = above
        return one

    def join(self, one: T, other: T) -> None:
        """Make one class of two; what stands for that of `one` stands for both."""
        self._parent[self.of(other)] = self.of(one)


__all__ = ["Partition"]
