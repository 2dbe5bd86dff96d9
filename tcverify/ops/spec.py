"""TensorSpec: what is known of a tensor without its values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major stride of `shape`, as torch computes it (sizes of 0 count as 1)."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


def merged_runs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Where the least runs of dims of two shapes stand that are of as many elements: what a view merges into what.

    Args:
        before, after: of as many elements, and of some.
    """
    i = j = 0
    while i < len(before) or j < len(after):
        start, other = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (left := math.prod(before[start:i])) != (right := math.prod(after[other:j])):
            if left < right:
                i += 1
            else:
                j += 1
        yield slice(start, i), slice(other, j)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, stride, dtype and storage of a tensor.

    Attributes:
        shape: sizes per dim.
        stride: in elements, per dim.
        dtype: element type.
        offset: storage offset in elements.
        alias: values of one graph with the same number share one storage; None means a storage of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    alias: int | None = None

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        return cls(tuple(shape), contiguous_stride(tuple(shape)), dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor, alias: int | None = None) -> TensorSpec:
        """Describe `tensor` (real, meta or fake) in storage `alias`."""
        return cls(
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            tensor.dtype,
            int(tensor.storage_offset()),
            alias,
        )

    def stored(self, alias: int | None) -> TensorSpec:
        """The same tensor in storage `alias`; `dataclasses.replace` takes four times as long."""
        return self if self.alias == alias else TensorSpec(self.shape, self.stride, self.dtype, self.offset, alias)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return self.numel * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Elements that the storage holds up to the last one of this tensor; those before it where it has none."""
        if not self.numel:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Shape, stride and dtype, with strides that no access can tell apart set to zero.

        A stride of a dim of size 1 (or any stride of an empty tensor) is never multiplied by anything but 0.
        """
        if self.numel == 0:
            return self.shape, (0,) * len(self.shape), self.dtype
        stride = tuple(0 if size <= 1 else step for size, step in zip(self.shape, self.stride, strict=True))
        return self.shape, stride, self.dtype

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}"
