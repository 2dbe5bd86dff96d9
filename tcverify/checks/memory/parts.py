"""Parts: which bytes of a storage the elements of a tensor take, and whether two tensors have bytes in common.

Ops on separate streams may process chunks of one buffer at the same time; also columns, whose bytes alternate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf

from tcverify.ops import TensorSpec

#: Longest span, in bytes, whose bytes are compared one by one if nothing else decides.
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a storage: those at `first` plus a sum of (0 … size − 1) · stride over `dims`.

    Attributes:
        first: the first byte.
        end: past the last byte.
        dims: (stride, size) with the largest stride first; contiguous dims are merged.
    """

    first: int
    end: float
    dims: tuple[tuple[int, int], ...]

    @property
    def dense(self) -> bool:
        """Whether it contains all bytes from the first to the last."""
        return len(self.dims) < 2 and (not self.dims or self.dims[0][0] == 1)


#: All of a storage.
WHOLE = ByteRange(0, inf, ())


def byte_range_of(spec: TensorSpec) -> ByteRange | None:
    """The bytes that the elements of a tensor take; None for a tensor without elements."""
    if not spec.numel:
        return None
    size = spec.dtype.itemsize
    return _part(spec.offset * size, tuple(spec.shape), tuple(spec.stride), size)


@lru_cache(maxsize=4096)
def _part(first: int, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> ByteRange:
    dims = sorted((step * itemsize, n) for n, step in zip(shape, stride, strict=True) if n > 1 and step)
    found = [(1, itemsize)]
    for step, n in dims:
        inner, m = found[-1]
        if step == inner * m:
            found[-1] = inner, m * n
        else:
            found.append((step, n))
    last = first + sum(step * (n - 1) for step, n in found)
    return ByteRange(first, last + 1, tuple(reversed(found)))


def covers(outer: ByteRange, inner: ByteRange) -> bool:
    """Whether a part contains all bytes of another one. False if that is not obvious."""
    return outer == inner or (outer.dense and outer.first <= inner.first and inner.end <= outer.end)


def overlap(a: ByteRange, b: ByteRange) -> bool:
    """Whether two parts of one storage have a byte in common. True if that cannot be determined."""
    if a.end <= b.first or b.end <= a.first:
        return False
    if covers(a, b) or covers(b, a):
        return True
    return _overlap(a, b)


@lru_cache(maxsize=65536)
def _overlap(a: ByteRange, b: ByteRange) -> bool:
    strides = sorted({step for part in (a, b) for step, _ in part.dims} | {1}, reverse=True)
    if all(coarse % fine == 0 for coarse, fine in pairwise(strides)):
        mine, theirs = _box(a, strides), _box(b, strides)
        if mine is not None and theirs is not None:
            return all(low < end and first < high for (low, high), (first, end) in zip(mine, theirs, strict=True))
    first, end = min(a.first, b.first), max(a.end, b.end)
    return end - first > _LONGEST or bool(_bytes(a, first) & _bytes(b, first))


def _box(part: ByteRange, strides: list[int]) -> list[tuple[int, int]] | None:
    """The byte offsets of a part in mixed radix `strides`: the range of each digit. None if the digits do not vary
    independently."""
    sizes = dict(part.dims)
    if len(sizes) < len(part.dims):
        return None
    digits, rest = [], part.first
    for step in strides:
        digits.append(rest // step)
        rest %= step
    found: list[tuple[int, int]] = []
    carried = 1
    for i in range(len(strides) - 1, -1, -1):
        size = sizes.get(strides[i], 1)
        if carried > 1 and size > 1:
            return None
        size, carried = size * carried, 1
        if i:
            values = strides[i - 1] // strides[i]
            if digits[i] + size > values:
                if digits[i] or size % values:
                    return None
                size, carried = values, size // values
        found.append((digits[i], digits[i] + size))
    return found


def _bytes(part: ByteRange, first: int) -> int:
    """The bytes of a part as the bits of a number, from `first` on."""
    mask = 1
    for step, size in reversed(part.dims):
        done = 1
        while done < size:
            more = min(done, size - done)
            mask |= mask << (step * more)
            done += more
    return mask << (part.first - first)


__all__ = ["WHOLE", "ByteRange", "byte_range_of", "covers", "overlap"]
