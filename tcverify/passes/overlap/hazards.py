"""Read after write, write after read, write after write: the order of the accesses to storages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from torch import fx

from tcverify.passes.storages import Storages


class AccessOrder:
    """Takes accesses in graph order and returns the direct predecessors of each. Every access is reported once.

    Args:
        places: the representative of storages that overlap with others; see `storages.shared_places`.
    """

    def __init__(self, places: Mapping[int, int]) -> None:
        self._places = places
        self._writer: dict[int, fx.Node] = {}
        self._readers: dict[int, list[fx.Node]] = {}

    def add(
        self, node: fx.Node, reads: Storages, writes: Storages
    ) -> list[tuple[fx.Node, Literal["RAW", "WAR", "WAW"]]]:
        """Return the nodes that `node` follows since it reads and writes these storages, each with why."""
        if self._places:
            reads, writes = self._with_places(reads), self._with_places(writes)
        before = list(self._before(reads, writes))
        for storage in reads:
            self._readers.setdefault(storage, []).append(node)
        for storage in writes:
            self._writer[storage] = node
            self._readers[storage] = []
        return before

    def _before(self, reads: Storages, writes: Storages) -> Iterator[tuple[fx.Node, Literal["RAW", "WAR", "WAW"]]]:
        for storage in reads:
            if storage in self._writer:
                yield self._writer[storage], "RAW"
        for storage in writes:
            if storage in self._writer:
                yield self._writer[storage], "WAW"
            for reader in self._readers.get(storage, ()):
                yield reader, "WAR"

    def _with_places(self, storages: Storages) -> Storages:
        return (*storages, *dict.fromkeys(self._places[each] for each in storages if each in self._places))


__all__ = ["AccessOrder"]
