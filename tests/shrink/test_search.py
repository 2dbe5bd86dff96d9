"""The search of the reducer: what is smaller, and in which chunks it is tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import fx

from tcverify.shrink.graph.search import SketchSearch, weight
from tcverify.shrink.graph.sketch import sketch_of
from tests.support.lowered import Build, Lowering, program


def chain(length: int) -> Build:
    def build(b: Lowering) -> fx.Node:
        value = b.x
        for _ in range(length):
            value = b.relu(value)
        return value

    return build


def test_a_program_weighs_what_its_largest_rank_does_before_what_all_do() -> None:
    weights = [weight(sketch_of(program(chain(one), chain(other))))[:2] for one, other in ((3, 1), (1, 3), (2, 2))]
    assert weights == [(3, 4), (3, 4), (2, 4)]


@pytest.mark.parametrize("needed", [(), (3,), (0, 5), (6,)])
def test_chunks_leave_what_is_needed_and_nothing_else(needed: Sequence[int]) -> None:
    left = set(range(7))

    class Removing(SketchSearch):
        def __init__(self) -> None:
            pass

        def attempt(self, *edits: Any, prefer: str = "first") -> bool:
            (chunk,) = edits
            if not set(chunk).isdisjoint(needed):
                return False
            left.difference_update(chunk)
            return True

    assert Removing().in_chunks(range(7), lambda chunk: chunk)  # type: ignore[arg-type, return-value]
    assert left == set(needed)
