"""All planted defects, and what draws the programs that show them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis.strategies import SearchStrategy

from tcverify.passes import Pass
from tcverify.program import Program
from tcverify.strategies import (
    fsdp_programs,
    functional_programs,
    mixed_programs,
    moe_programs,
    near_miss_programs,
    overlap_programs,
    resharding_programs,
    sequence_functional_programs,
)
from tests.mutants import (
    comm_buffer_forms,
    comm_buffers,
    multistream,
    overlap,
    overlap_fsdp,
    overlap_memory,
    resharding,
    resharding_memory,
    resharding_streams,
    sequence_experts,
    sequence_parallel,
    sequence_rows,
)

Drawn = Callable[..., SearchStrategy[Program]]

_ASYNCHRONOUS = (overlap, overlap_memory, comm_buffers, comm_buffer_forms)
_RESHARDING = (resharding, resharding_streams, resharding_memory)

#: What programs of its own show, in tests/passes/comm_buffers/test_mutants.py, and drawn ones hardly ever.
_MADE_FOR = ("OverwritesWhatIsReadLater", "OverwritesWhatIsUnderWay", "OverwritesInputs")

MUTANTS: dict[str, type[Pass]] = {**sequence_parallel.MUTANTS, **multistream.MUTANTS}
#: For every mutant the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {**sequence_parallel.EXPECTED, **multistream.EXPECTED}
for _module in (sequence_experts, *_ASYNCHRONOUS, overlap_fsdp, *_RESHARDING, sequence_rows):
    MUTANTS.update(_module.MUTANTS)
    EXPECTED.update(_module.EXPECTED)
for _name in _MADE_FOR:
    del MUTANTS[_name], EXPECTED[_name]

#: Needs what programs of FSDP alone are full of: storages that are freed, and views that are written into.
_FSDP_FIRST = frozenset({"FreeBeforeCompletion", "ViewsHaveTheirOwnStorage"})


def hunting_grounds(name: str) -> tuple[Drawn, ...]:
    """What to draw from, in turn. What needs one certain mutation is hunted with mutations alone: of mixed programs, they are
    less than a quarter."""
    if name in overlap_fsdp.MUTANTS or name in _FSDP_FIRST:
        return (fsdp_programs,)
    if name in sequence_experts.MUTANTS:
        return (moe_programs,)
    if reshards(name):
        return (resharding_programs,)
    if name in sequence_rows.MUTANTS:
        return (sequence_functional_programs,)
    if any(name in module.MUTANTS for module in _ASYNCHRONOUS):
        return (functional_programs, fsdp_programs)
    return (overlap_programs, mixed_programs) if name in multistream.MUTANTS else (mixed_programs, near_miss_programs)


def world_sizes(name: str) -> tuple[int, ...]:
    """On how many ranks, in turn. Resharding needs ranks on one side alone, and more than one of them on each."""
    return (4, 6) if reshards(name) else (2, 4)


def reshards(name: str) -> bool:
    """Whether it is a defect of the lowering of resharding."""
    return any(name in module.MUTANTS for module in _RESHARDING)
