"""Chunks: values that are a part of one of the original at an index, as the steps of a loop have them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from tcverify.explain.relations.relation import Relation
from tcverify.explain.relations.tensors import Measure, values_close

#: Number of parts of one value that are examined.
MAX_PARTS = 256


def chunk(
    value: torch.Tensor, old: Mapping[int, torch.Tensor], name: str, rank: int, measure: Measure
) -> Relation | None:
    """The relation of a rank's value that is a part of the original's node `name`, on this rank or else on another one.

    Args:
        old: the original's values, by rank.
    """
    for other in [rank, *(r for r in old if r != rank)]:
        place = index_in_whole(value, old[other], measure) if other in old else None
        if place is not None:
            where = "" if other == rank else f" on rank {other}"
            return Relation("chunk", name, f"chunk {place} of the original's '{name}'{where}")
    return None


def index_in_whole(value: torch.Tensor, whole: torch.Tensor, measure: Measure) -> str | None:
    """Where in another value one stands, as an index: "[2]", "[:, 0, 1]", "[2:4]"; None where it stands nowhere."""
    if not 0 < value.numel() < whole.numel() or value.dtype != whole.dtype:
        return None
    for text, part in itertools.islice(_parts(whole, value.shape), MAX_PARTS):
        if values_close(value, part, measure):
            return text
    return None


def _parts(whole: torch.Tensor, shape: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a shape: at an index of one dim or of two, or a section along one dim, with their indices as text."""
    shape, removed = tuple(shape), whole.dim() - len(shape)
    if removed == 0:
        unlike = [dim for dim in range(whole.dim()) if whole.shape[dim] != shape[dim]]
        if len(unlike) == 1 and shape[unlike[0]] and whole.shape[unlike[0]] % shape[unlike[0]] == 0:
            dim, size = unlike[0], shape[unlike[0]]
            for start in range(0, whole.shape[dim], size):
                yield _index({dim: f"{start}:{start + size}"}), whole.narrow(dim, start, size)
    elif removed in (1, 2):
        for dims in itertools.combinations(range(whole.dim()), removed):
            if tuple(size for dim, size in enumerate(whole.shape) if dim not in dims) != shape:
                continue
            for at in itertools.product(*(range(whole.shape[dim]) for dim in dims)):
                part = whole
                for dim, index in reversed(list(zip(dims, at, strict=True))):
                    part = part.select(dim, index)
                yield _index(dict(zip(dims, map(str, at), strict=True))), part


def _index(at: Mapping[int, str]) -> str:
    return f"[{', '.join(at.get(dim, ':') for dim in range(max(at) + 1))}]"


__all__ = ["chunk", "index_in_whole"]
