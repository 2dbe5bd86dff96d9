"""Extremes of asynchrony: a program whose collectives read and write at other times than at their starts.

`asynchrony.TIMINGS` says which extremes there are. All collectives at one extreme show most races; a race between two
collectives that are in flight together shows only if one is early and the other late, so mixtures are tried too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from tcverify.execution.asynchrony import TIMINGS, Moment, Timing
from tcverify.execution.executor import Comparison, Run
from tcverify.execution.lockstep.lockstep import Lockstep
from tcverify.execution.plan import plans_of
from tcverify.program import Program

#: Mixtures that are played, and on deep verification.
MIXTURES, DEEP_MIXTURES = 2, 12


@dataclass(frozen=True, slots=True)
class Extreme:
    """A program at one extreme.

    Attributes:
        words: when its collectives read and write.
        timing: the same as executors take it.
        comparison: of the original, with collectives that read and write where they start, with the program at the extreme.
    """

    words: str
    timing: Moment | Timing
    comparison: Comparison


#: The phrase of `Extreme.words` for a timing.
WORDS: dict[Moment, str] = {
    "wait": "collectives read and write at their waits",
    "apart": "collectives read where they start and write at their waits",
}


def overlapped_starts(program: Program) -> list[str]:
    """Names of the nodes that start collectives during which others run, each once. For other collectives the timing is
    not observable."""
    return list(dict.fromkeys(name for plan in plans_of(program) for name in plan.overlapped))


def run_at_extremes(baseline: Run, program: Program, executor: Lockstep, *, deep: bool = False) -> list[Extreme]:
    """Run a program at the extremes, and compare it with the original's run.

    Raises:
        UnsupportedOp: an op has no meaning.
    """
    starts = overlapped_starts(program)
    if not starts:
        return []
    mixtures = 0 if len(starts) < 2 else DEEP_MIXTURES if deep else MIXTURES
    return [run_at_extreme(baseline, program, executor, words, timing) for words, timing in _timings(mixtures)]


def run_at_extreme(baseline: Run, program: Program, executor: Lockstep, words: str, timing: Moment | Timing) -> Extreme:
    """Run a program at one extreme. Of a run that gives what the original gives, values are not kept: there are many."""
    after = executor.run(program, timing=timing, beside=baseline)
    comparison = executor.compare_runs(baseline, after)
    if after.finished and not any(delta.problem or delta.overflow or delta.difference for delta in comparison.deltas):
        after.keeps = None
        for result in after.ranks:
            result.outputs, result.inputs = [], []
    return Extreme(words, timing, comparison)


def _timings(mixtures: int) -> Iterator[tuple[str, Moment | Timing]]:
    yield from ((words, timing) for timing, words in WORDS.items())
    for number in range(mixtures):
        yield "some collectives read and write where they start, and some at their waits", _mixture(number)


def _mixture(number: int) -> Timing:
    """A timing that depends on the node's name; the odd one is that of the even one before, turned round."""

    def of(rank: int, node: str) -> Moment:
        chosen = zlib.crc32(f"{number // 2}:{node}".encode()) % 2
        return TIMINGS[0] if chosen == number % 2 else TIMINGS[1]

    return of


__all__ = ["WORDS", "Extreme", "overlapped_starts", "run_at_extreme", "run_at_extremes"]
