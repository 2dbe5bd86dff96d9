"""What checks look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tcverify.application import Pair
from tcverify.execution import ArenaRun, Comparison, Explanation, Exploration, Extreme, Noise, Timing
from tcverify.program import Contract, Doubt, Program


@dataclass(slots=True)
class Evidence:
    """A pair, its executions and the contract of the pass.

    Attributes:
        runs: comparisons of the two versions by executor, the cheapest first; empty when the rewritten program cannot run.
        again: comparison of the original with the program after a second application, when there is one.
        exploration: what other orders of its streams showed, of a rewritten program that is lowered.
        extremes: the rewritten program with asynchronous collectives that read and write at other times.
        play: plays a program at another extreme, given in words and as executors take it.
        arena: what became of a rewritten program whose values live in communication buffers, with them in an arena.
        aside: why the exact domain did not run, where it was asked for.
        explain: says why the versions differ in the exact domain where float64 sees nothing; costly.
        law: says on which law of an op it depends whether a rewrite that differs is equal to the original; costly.
        probe: measures the conditioning of the original's outputs, by label; costly, so called only when needed.
        noise: measures what rounding to the program's own dtypes makes of the original's outputs, by label; costlier.
    """

    pair: Pair
    contract: Contract
    runs: list[Comparison] = field(default_factory=list)
    again: Comparison | None = None
    exploration: Exploration | None = None
    extremes: list[Extreme] = field(default_factory=list)
    play: Callable[[Program, str, str | Timing], Extreme] | None = None
    arena: ArenaRun | None = None
    aside: str = ""
    explain: Callable[[], Explanation] = lambda: Explanation("defect")
    law: Callable[[Program], Doubt | None] = lambda rewritten: None
    probe: Callable[[], dict[str, float]] = dict
    noise: Callable[[], Mapping[str, Noise]] = dict
