"""Layouts by single elements: what each rank holds, found by asking of every element of a small tensor where it lies.

What is where is counted out here: of `DeviceMesh` and `Layout`, only the text that they are written in is known.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence

import torch

from tcverify.ops import Resharding
from tcverify.program import PlacedBuilder, Program


def spread(whole: torch.Tensor, layout: str) -> dict[int, torch.Tensor]:
    """Each rank's part of a tensor, by rank."""
    rows, placements = re.fullmatch(r"(\[.*\]) (.*)", layout).groups()  # type: ignore[union-attr]
    mesh = torch.tensor(ast.literal_eval(rows))
    dims = [None if text == "replicated" else int(text[6:-1]) for text in placements.split(", ")]
    parts: dict[int, torch.Tensor] = {}
    for at in itertools.product(*map(range, mesh.shape)):
        held = []  # per dim of the tensor, the indices that this rank has
        for dim, size in enumerate(whole.shape):
            indices = list(range(size))
            for mesh_dim, tensor_dim in enumerate(dims):
                if tensor_dim == dim:
                    per = size // mesh.shape[mesh_dim]
                    indices = [i for i in indices if i // per == at[mesh_dim]]
            held.append(indices)
        elements = [whole[index] for index in itertools.product(*held)]
        shape = [len(indices) for indices in held]
        flat = torch.stack(elements) if elements else whole.new_empty(0)
        parts[int(mesh[at])] = flat.reshape(shape)
    return parts


def reduce_over(whole: torch.Tensor, dim: int, reduce_op: str) -> torch.Tensor:
    """A tensor reduced over a dim, with torch's own reductions."""
    if reduce_op in ("band", "bor", "bxor"):
        total = whole.select(dim, 0).clone()
        for i in range(1, whole.shape[dim]):
            other = whole.select(dim, i)
            total = {"band": total & other, "bor": total | other, "bxor": total ^ other}[reduce_op]
        return total
    found = {
        "sum": torch.sum, "avg": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax,
    }[reduce_op](whole, dim)  # fmt: skip
    return found.to(whole.dtype)


def numbered(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A tensor whose elements all differ, and whose sums and products are exact."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count, dtype=torch.float64) - count // 2).reshape(shape).to(dtype)


def same(actual: Sequence[torch.Tensor] | torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a tensor, or each of several, is this one: shape, dtype and every element."""
    several = [actual] if isinstance(actual, torch.Tensor) else actual
    return all(t.shape == expected.shape and t.dtype == expected.dtype and torch.equal(t, expected) for t in several)


def whole_input(program: Program, name: str = "x") -> torch.Tensor:
    """All of an input, as a rank that has all of it would be given; floats as float64."""
    [found] = [given for given in program.inputs if given.name == name]
    b = PlacedBuilder(1)
    alone = b.build(b.input(name, found.shape, "[0] replicated", found.dtype, found.recipe), seed=program.seed)
    value = alone.values(0)[0]
    return value.double() if value.is_floating_point() else value


def is_resharding(made: Resharding) -> bool:
    """Whether a `set` or `reduce` takes more than what each rank has: other ranks hold something that it needs.

    A mesh dim of one rank divides nothing, so whether something is sharded over it does not count.
    """
    source, target = made.source, made.target
    if source.mesh != target.mesh:
        return True
    for size, before, after in zip(source.mesh.shape, source.sharding, target.sharding, strict=True):
        if size == 1 or before is None:  # what all have, each can take its part of
            continue
        if before == made.dim or after is None:
            return True
        counted = after if made.dim is None or after < made.dim else after + 1  # in the operand
        if before != counted:
            return True
    return False
