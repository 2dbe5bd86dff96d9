"""All planted defects, and what draws the programs that show them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis.strategies import SearchStrategy

from tcverify.passes import Pass
from tcverify.program import Program
from tcverify.strategies import mixed_programs, near_miss_programs, overlap_programs
from tests.mutants import multistream, sequence_parallel

Drawn = Callable[..., SearchStrategy[Program]]

MUTANTS: dict[str, type[Pass]] = {**sequence_parallel.MUTANTS, **multistream.MUTANTS}

#: For every mutant the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {**sequence_parallel.EXPECTED, **multistream.EXPECTED}


def hunting_grounds(name: str) -> tuple[Drawn, ...]:
    """What to draw from, in turn. What needs one certain mutation is hunted with mutations alone: of mixed programs, they are
    less than a quarter."""
    return (overlap_programs, mixed_programs) if name in multistream.MUTANTS else (mixed_programs, near_miss_programs)
