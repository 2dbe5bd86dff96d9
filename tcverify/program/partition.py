"""Groups items into classes while equivalences are still being discovered."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Partition(Generic[T]):
    """Equivalence classes of items (union-find). An item is in a class of its own until it is merged with another."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def of(self, one: T) -> T:
        """Return the representative of the class of an item."""
        parent = self._parent
        while (above := parent.get(one, one)) != one:
            parent[one] = parent.get(above, above)
            one = above
        return one

    def join(self, one: T, other: T) -> None:
        """Merge two classes; the representative of `one` represents both."""
        self._parent[self.of(other)] = self.of(one)


__all__ = ["Partition"]
