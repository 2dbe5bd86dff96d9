"""Cells: the parts of storages that the ops of a rank distinguish. Two views overlap if they have a cell in common.

Chunks of one buffer that several streams process share a storage but no element. So a storage is divided: bytes that the same
views reach make a cell. Exact, also for views with gaps; the cost goes by the number of runs of bytes that views consist of,
and not by their sizes. A tensor without elements has no cell, and so no races.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

#: Largest numbers of runs of bytes in the views of one storage, and of pieces of all of them.
_MOST_RUNS = 1 << 20
_MOST_PIECES = 1 << 24


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


@dataclass(frozen=True, slots=True)
class _Runs:
    """Bytes of a storage: runs of `length` of them, at `first` plus a sum of (0 … size − 1) · stride over `dims`."""

    first: int
    length: int
    dims: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return prod(size for _, size in self.dims)

    def starts(self) -> torch.Tensor:
        found = torch.tensor([self.first])
        for stride, size in self.dims:
            found = (found[:, None] + stride * torch.arange(size)).flatten()
        return found


def _runs_of(view: View) -> _Runs | None:
    """The bytes of a view; None of one without elements."""
    if not all(view.shape):
        return None
    length, dims = view.itemsize, []
    for stride, size in sorted(
        (s * view.itemsize, n) for n, s in zip(view.shape, view.stride, strict=True) if n > 1 and s
    ):
        if stride <= length:  # they touch or overlap
            length += stride * (size - 1)
        else:
            dims.append((stride, size))
    return _Runs(view.offset * view.itemsize, length, tuple(dims))


class Cells:
    """Divides storages by the views of them.

    Args:
        tensors: by storage, one over the whole of it.

    Attributes:
        storages: by cell, the storage that it belongs to. There after `divide`.
        coarse: whether some storage has too many pieces to be divided, and is one cell. There after `divide`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._views: list[dict[View, tuple[int, ...]]] = [{} for _ in tensors]
        self._all: list[tuple[int, ...]] = [() for _ in tensors]
        self.storages: list[int] = []
        self.coarse = False

    def add(self, view: View) -> None:
        """Record a view."""
        self._views[view.storage][view] = ()

    def add_whole(self, storage: int) -> None:
        """Record all of a storage."""
        self.add(view_of(storage, self._tensors[storage]))

    def divide(self) -> None:
        """Divide all storages by what has been noted."""
        for storage, views in enumerate(self._views):
            if not views:
                continue
            first = len(self.storages)
            reached = {view: _runs_of(view) for view in views}
            different = list(dict.fromkeys(runs for runs in reached.values() if runs is not None))
            pieces = _pieces(different) if len(different) > 1 else None
            if pieces is None:
                self.coarse = self.coarse or len(different) > 1
                pieces = [[0]] * len(different)
            numbers = dict(zip(different, pieces, strict=True))
            count = max((number for found in pieces for number in found), default=-1) + 1
            self.storages += [storage] * count
            self._all[storage] = tuple(range(first, first + count))
            for view, runs in reached.items():
                views[view] = tuple(first + number for number in numbers[runs]) if runs is not None else ()

    def of(self, views: Iterable[View]) -> tuple[int, ...]:
        """The cells of some views, each once."""
        return tuple(dict.fromkeys(cell for view in views for cell in self._views[view.storage][view]))

    def of_whole(self, storage: int) -> tuple[int, ...]:
        """All cells of a storage."""
        return self._all[storage]


def _pieces(views: Sequence[_Runs]) -> list[list[int]] | None:
    """For each view the numbers of its cells; None if there are too many pieces."""
    if sum(runs.count for runs in views) > _MOST_RUNS:
        return None
    starts = [runs.starts() for runs in views]
    ends = [found + runs.length for found, runs in zip(starts, views, strict=True)]
    bounds = torch.unique(torch.cat([*starts, *ends]))  # pieces lie between two that follow each other
    spans = [(torch.searchsorted(bounds, a), torch.searchsorted(bounds, b)) for a, b in zip(starts, ends, strict=True)]
    if sum(int((end - start).sum()) for start, end in spans) > _MOST_PIECES:
        return None
    cell = torch.zeros(len(bounds), dtype=torch.long)  # of each piece: those that the same views reach so far
    highest = 0
    for span in spans:
        at = _between(*span)
        before, again = torch.unique(cell[at], return_inverse=True)
        cell[at] = again + (highest + 1)
        highest += len(before)
    _, cell = torch.unique(cell, return_inverse=True)  # the first is unused: there is nothing after the last bound
    return [(torch.unique(cell[_between(*span)]) - 1).tolist() for span in spans]


def _between(start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """All numbers from each start to before the end that belongs to it."""
    counts = end - start
    offsets = counts.cumsum(0) - counts
    return torch.repeat_interleave(start - offsets, counts) + torch.arange(int(counts.sum()))


__all__ = ["Cells", "View", "view_of"]
