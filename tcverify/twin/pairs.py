"""Programs of everyday size, and what passes make of them: the pass is given the real sizes, what it makes runs as twin."""

from __future__ import annotations

import math
from dataclasses import replace

from torch.utils import _pytree as pytree

from tcverify.application import Pair
from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec
from tcverify.program import Program
from tcverify.twin.making import twins_of
from tcverify.twin.sizes import SMALL

#: Elements of all inputs of a rank up to which a program is not looked at further: it is small.
FEW = 1 << 20

#: Elements of all values on all ranks up to which a program runs as it is: 1 GiB in float64.
MOST = 1 << 27


def fits(program: Program) -> bool:
    """Whether a program runs as it is, in the memory that there usually is."""
    if sum(math.prod(spec.shape) for spec in program.inputs) <= FEW:
        return True
    sizes = []
    for graph in program.graphs:
        leaves = (leaf for node in graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
        sizes.append(sum(leaf.numel for leaf in leaves if isinstance(leaf, TensorSpec)))
    return sum(sizes[binding.graph] for binding in program.ranks) <= MOST


def small_pair(pair: Pair) -> Pair:
    """The twins of a program and of what a pass made of it.

    Raises:
        ProgramError: no choice of sizes fits.
    """
    programs = [p for p in (pair.original, pair.rewritten, pair.again) if p is not None]
    distinct = list({id(p): p for p in programs}.values())
    twins = twins_of(distinct)
    if not all(map(fits, twins.programs)):
        left = sorted({n for n, became in twins.sizes.items() if n in became and n > SMALL}, reverse=True)
        raise ProgramError(f"it does not fit into memory, and no smaller sizes were found for {left[:8]}")
    small = dict(zip(map(id, distinct), twins.programs, strict=True))

    def of(program: Program | None) -> Program | None:
        return None if program is None else small[id(program)]

    return replace(
        pair, original=small[id(pair.original)], rewritten=of(pair.rewritten), again=of(pair.again), real=pair.original,
        sizes=dict(twins.sizes), stages=[],
    )  # fmt: skip


__all__ = ["fits", "small_pair"]
