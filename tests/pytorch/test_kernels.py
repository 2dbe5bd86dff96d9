"""Loops that Inductor would write as C++, run one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import ops

from tcverify.pytorch.kernels import LoopKernel, Loops


def rows(outer: Any, _: Any) -> None:
    """One number per row: i0 counts rows."""
    (row,) = outer
    ops.store("scale", row, ops.neg(ops.load("given", row)))


def elements(outer: Any, _: Any) -> None:
    """All elements of a table that stands on its side: i0 counts rows of it, and i1 what those of `rows` were."""
    first, second = outer
    ops.store("made", 4 * second + first, ops.add(ops.load("scale", second), ops.load("turned", first)))


def turned(outer: Any, _: Any) -> None:
    """Here i0 counts four, and reads what `rows` has stored under a name of the same look."""
    (column,) = outer
    ops.store("turned", column, ops.load("scale", column))


def test_what_a_nest_has_stored_is_read_again_in_the_loops_of_the_next() -> None:
    given = torch.arange(8.0)
    scale, side, made = torch.zeros(8), torch.zeros(4), torch.zeros(32)
    nests = (Loops(rows, (8,), ()), Loops(turned, (4,), ()), Loops(elements, (4, 8), ()))
    positions = {"given": 0, "scale": 1, "turned": 2, "made": 3}
    LoopKernel(nests, positions, frozenset(), {}, {})(given, scale, side, made)
    assert scale.tolist() == (-given).tolist()
    assert side.tolist() == (-given[:4]).tolist()
    assert made.view(8, 4).tolist() == (-given[:, None] - given[:4]).tolist()


def picked(outer: Any, _: Any) -> None:
    """Elements of a table that a list of places names. The symbol of a loaded index is Inductor's to replace."""
    (row,) = outer
    place = ops.indirect_indexing(ops.load("places", row), 4, check=False)
    assert not str(place).startswith("indirect")
    ops.store("made", row, ops.load("table", 2 * place + 1))


def test_an_index_that_is_loaded_picks_elements() -> None:
    table, places, made = torch.arange(8.0), torch.tensor([3, 0, -1]), torch.zeros(3)
    kernel = LoopKernel((Loops(picked, (3,), ()),), {"table": 0, "places": 1, "made": 2}, frozenset(), {}, {})
    kernel(table, places, made)
    assert made.tolist() == [7.0, 1.0, 7.0]
