"""Placements: their written form and the chunks they stand for."""

import pytest
import torch

from tcverify.errors import ProgramError
from tcverify.program import PARTIAL, REPLICATED, VARYING, Placement, shard
from tcverify.program.placement import chunk_bounds


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (REPLICATED, "replicated"),
        (VARYING, "varying"),
        (PARTIAL, "partial(sum)"),
        (shard(0), "shard(0)"),
        (shard(12), "shard(12)"),
    ],
)
def test_a_placement_is_read_back_from_what_it_writes(placement: Placement, text: str) -> None:
    assert str(placement) == text
    assert Placement.parse(text) == placement


@pytest.mark.parametrize(
    "text", ["", "shard", "shard()", "shard(-1)", "shard(100)", "shard(1) ", "partial", "partial(max)", "Replicated"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="is not a placement"):
        Placement.parse(text)


@pytest.mark.parametrize("size", range(9))
@pytest.mark.parametrize("parts", range(1, 6))
def test_chunks_are_those_of_torch_chunk(size: int, parts: int) -> None:
    whole = torch.arange(size)
    chunks = [whole[slice(*chunk_bounds(size, parts, position))].tolist() for position in range(parts)]
    expected = [chunk.tolist() for chunk in whole.chunk(parts)]
    assert chunks == expected + [[]] * (parts - len(expected))
