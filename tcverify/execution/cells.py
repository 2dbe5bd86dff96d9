"""Cells: the parts of storages that the ops of a rank tell apart. Two views touch each other where they have a cell in common.

Chunks of one buffer that several streams work on share a storage and no element. So a storage is divided: elements that the same
views reach make a cell. Exact, also for views with gaps; a tensor without elements has no cell, and nobody races for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

#: Most elements of a storage, times views of it, that are looked at one by one. Beyond, the storage is one cell.
_MOST_MARKS = 1 << 24


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor lies: sizes, strides and offset in elements of `itemsize` bytes."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int


def view_of(storage: int, tensor: torch.Tensor) -> View:
    """Describe a tensor."""
    return View(storage, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.itemsize)


class Cells:
    """Divides storages by the views of them.

    Args:
        tensors: by storage, one over the whole of it.

    Attributes:
        storages: by cell, the storage that it belongs to. There after `divide`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._views: list[dict[View, tuple[int, ...]]] = [{} for _ in tensors]
        self._all: list[tuple[int, ...]] = [() for _ in tensors]
        self.storages: list[int] = []

    def add(self, view: View) -> None:
        """Take note of a view."""
        self._views[view.storage][view] = ()

    def add_whole(self, storage: int) -> None:
        """Take note of all of a storage."""
        self.add(view_of(storage, self._tensors[storage]))

    def divide(self) -> None:
        """Divide all storages by what has been noted."""
        for storage, views in enumerate(self._views):
            first = len(self.storages)
            if len(views) > 1 and self._fits(storage, views):
                groups = self._groups(storage, list(views))
            else:
                groups = [(True,) * len(views)] if views and self._tensors[storage].numel() else []
            self.storages += [storage] * len(groups)
            self._all[storage] = tuple(range(first, first + len(groups)))
            for position, view in enumerate(views):
                views[view] = tuple(first + number for number, group in enumerate(groups) if group[position])

    def of(self, views: Iterable[View]) -> tuple[int, ...]:
        """The cells of some views, each once."""
        return tuple(dict.fromkeys(cell for view in views for cell in self._views[view.storage][view]))

    def of_whole(self, storage: int) -> tuple[int, ...]:
        """All cells of a storage."""
        return self._all[storage]

    def _fits(self, storage: int, views: Iterable[View]) -> bool:
        whole = self._tensors[storage]
        views = list(views)
        return whole.numel() * len(views) <= _MOST_MARKS and all(view.itemsize == whole.itemsize for view in views)

    def _groups(self, storage: int, views: list[View]) -> list[tuple[bool, ...]]:
        """For each cell, which of the views reach it; elements that none reaches belong to no cell."""
        marks = torch.zeros(len(views), max(self._tensors[storage].numel(), 1), dtype=torch.bool)
        for position, view in enumerate(views):
            if all(view.shape):
                row = marks[position]
                row.as_strided(view.shape, view.stride, view.offset + row.storage_offset()).fill_(True)
        rows = torch.unique(marks.t(), dim=0).tolist()
        return [tuple(row) for row in rows if any(row)]


__all__ = ["Cells", "View", "view_of"]
