"""Narrows wide programs first: the cost of a trial grows with elements, and captured models have thousands per row.

All dims shrink by one factor at once, since dims of a model are multiples of each other in unknown ways. `shrink_sizes`
does the rest: it determines which dims belong together, and examines the program for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tcverify.shrink.graph.given_values import clamp_indices, with_shape
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sizes import BOTH_WAYS

#: Elements of all inputs, for each call of the program, beyond which a trial's time goes by elements and not by calls.
WIDE = 1 << 10

#: Factors by which dims shrink, the largest first.
FACTORS = (512, 128, 32, 8, 4, 2)

#: The least that a dim is scaled to: what is sharded can still be.
LEAST = 4


def narrow(search: SketchSearch) -> None:
    """Scale the dims of a wide program: all that a factor divides, then all of one size with what are multiples of it."""
    for factor in FACTORS:
        while is_wide(search) and _attempt(search, lambda size, by=factor: _scaled(size, by)):  # type: ignore[misc]
            pass
    for size in sorted({size for spec in search.sketch.inputs for size in spec.shape}, reverse=True):
        for factor in FACTORS:
            if not is_wide(search):
                return
            if _attempt(search, lambda own, s=size, by=factor: _scaled(own, by) if own == s else own) or _attempt(  # type: ignore[misc]
                search,
                lambda own, s=size, by=factor: _scaled(own, by) if own % s == 0 else own,  # type: ignore[misc]
            ):
                break


def is_wide(search: SketchSearch) -> bool:
    """Whether a program has many elements for its calls."""
    return sum(math.prod(spec.shape) for spec in search.sketch.inputs) > WIDE * len(search.facts.calls)


def _scaled(size: int, factor: int) -> int:
    return size // factor if size % factor == 0 and size // factor >= LEAST else size


def _attempt(search: SketchSearch, change: Callable[[int], int]) -> bool:
    sketch = search.sketch
    inputs = tuple(with_shape(spec, tuple(map(change, spec.shape))) for spec in sketch.inputs)
    if inputs == sketch.inputs:
        return False
    search.check_time()
    edit = replace(sketch, inputs=inputs)
    edits = (edit, clamp_indices(edit, {size: change(size) for spec in sketch.inputs for size in spec.shape}))
    return any(search.attempt(*edits, prefer=way) for way in BOTH_WAYS)


__all__ = ["WIDE", "is_wide", "narrow"]
