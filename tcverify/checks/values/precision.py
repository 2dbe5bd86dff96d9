"""Precision: whether a pass rounds values more coarsely than the original. Neither float64 nor residues show this."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree

from tcverify.ops import TensorSpec
from tcverify.program import Program
from tcverify.program.finding import Note


def note_coarser_dtype(original: Program, rewritten: Program) -> Note | None:
    """Note a floating dtype of the rewritten program that is coarser than all of the original's, according to metadata."""
    before, after = (max(_dtypes(version), key=_step, default=None) for version in (original, rewritten))
    if before is None or after is None or _step(after) <= _step(before):
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (after, before)]
    return Note(
        "coarser-dtype",
        f"the pass rounds to {names[0]}, coarser than any dtype of the original ({names[1]}); only --domain native judges that",
    )


def _dtypes(program: Program) -> Iterator[torch.dtype]:
    yield from (spec.dtype for spec in program.inputs if spec.dtype.is_floating_point)
    for graph in program.graphs:
        for node in graph.nodes:
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, (TensorSpec, torch.Tensor)) and value.dtype.is_floating_point:
                    yield value.dtype


def _step(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number."""
    return torch.finfo(dtype).eps


__all__ = ["note_coarser_dtype"]
