"""The note that a pass rounds more coarsely than the original does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcverify.checks.values.precision import note_coarser_dtype
from tests.support.lowered import Lowering, program


def cast(b: Lowering, dtype: torch.dtype | None) -> Any:
    there = b.x if dtype is None else b.call("aten::_to_copy", b.x, dtype=dtype)
    return b.call("aten::_to_copy", b.relu(there), dtype=torch.float32)


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (None, torch.bfloat16, "bfloat16, coarser than any dtype of the original (float32)"),
        (torch.float64, torch.float16, "float16, coarser than any dtype of the original (float32)"),
        (torch.float16, torch.bfloat16, "bfloat16, coarser than any dtype of the original (float16)"),
        (None, torch.float64, ""),
        (torch.bfloat16, torch.bfloat16, ""),
        (torch.bfloat16, None, ""),
    ],
)
def test_the_coarsest_dtypes_of_both_are_compared(
    before: torch.dtype | None, after: torch.dtype | None, names: str
) -> None:
    note = note_coarser_dtype(program(lambda b: cast(b, before)), program(lambda b: cast(b, after)))
    assert (note is not None) == bool(names)
    assert note is None or (note.reason == "coarser-dtype" and f"the pass rounds to {names}" in note.detail)
