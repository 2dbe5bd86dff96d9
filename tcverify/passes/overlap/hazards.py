"""Read after write, write after read, write after write: the order of the accesses to storages."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from tcverify.passes.overlap.storages import Storages


class AccessOrder:
    """Takes accesses in graph order and tells what each of them directly follows. Every access is told once.

    Args:
        places: what stands for the place of storages that overlap with others; see `storages.shared_places`.
    """

    def __init__(self, places: Mapping[int, int]) -> None:
        self._places = places
        self._writer: dict[int, fx.Node] = {}
        self._readers: dict[int, list[fx.Node]] = {}

    def add(self, node: fx.Node, reads: Storages, writes: Storages) -> dict[fx.Node, None]:
        """Return the nodes that `node` follows since it reads and writes these storages."""
        if self._places:
            reads, writes = self._with_places(reads), self._with_places(writes)
        before: dict[fx.Node, None] = {}
        for storage in (*reads, *writes):
            writer = self._writer.get(storage)
            if writer is not None:
                before[writer] = None
        for storage in writes:
            before.update(dict.fromkeys(self._readers.get(storage, ())))
        for storage in reads:
            self._readers.setdefault(storage, []).append(node)
        for storage in writes:
            self._writer[storage] = node
            self._readers[storage] = []
        return before

    def _with_places(self, storages: Storages) -> Storages:
        return (*storages, *dict.fromkeys(self._places[each] for each in storages if each in self._places))


__all__ = ["AccessOrder"]
