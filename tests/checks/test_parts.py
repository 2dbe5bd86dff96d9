"""Parts of storages: compared with the elements that torch's own views reach."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcverify.checks.memory.parts import WHOLE, ByteRange, byte_range_of, covers, overlap
from tcverify.ops import TensorSpec


def part(tensor: torch.Tensor) -> ByteRange:
    spec = TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset(), 0)
    found = byte_range_of(spec)
    assert found is not None
    return found


def view(base: torch.Tensor, rng: random.Random) -> torch.Tensor:
    found = base
    for _ in range(rng.randint(0, 3)):
        dim = rng.randrange(found.dim()) if found.dim() else 0
        step = rng.randrange(5) if found.dim() else 4
        if step == 0:
            found = found.select(dim, rng.randrange(found.shape[dim]))
        elif step == 1:
            first = rng.randrange(found.shape[dim])
            found = found.narrow(dim, first, rng.randint(1, found.shape[dim] - first))
        elif step == 2:
            found = found[(slice(None),) * dim + (slice(rng.randrange(found.shape[dim]), None, 2),)]
        elif step == 3:
            found = found.transpose(0, dim)
        elif found.is_contiguous():
            found = found.flatten()
    return found


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 1 << 62))
def test_two_views_overlap_where_they_share_elements(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    base = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    a, b = view(base, rng), view(base, rng)
    mine, theirs = set(a.flatten().tolist()), set(b.flatten().tolist())
    assert overlap(part(a), part(b)) == (not mine.isdisjoint(theirs))
    assert not covers(part(a), part(b)) or theirs <= mine
    assert covers(part(base), part(a))
    assert covers(WHOLE, part(a))
    assert overlap(part(a), WHOLE)


def test_what_cannot_be_written_with_digits_is_compared_byte_by_byte() -> None:
    base = torch.arange(60, dtype=torch.int32)
    every_third, every_fourth = base.as_strided((20,), (3,)), base.as_strided((14,), (4,), 1)
    assert overlap(part(every_third), part(every_fourth))
    assert not overlap(part(base.as_strided((10,), (6,))), part(base.as_strided((14,), (4,), 1)))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_large_chunks_along_any_dim_lie_apart(dim: int) -> None:
    base = torch.empty(64, 512, 1024, device="meta")
    first, second = base.narrow(dim, 0, 32), base.narrow(dim, 32, 32)
    assert not overlap(part(first), part(second))
    assert overlap(part(base.narrow(dim, 31, 2)), part(first))


def test_a_tensor_without_elements_has_no_part() -> None:
    assert byte_range_of(TensorSpec.contiguous((0, 4), torch.float32)) is None
