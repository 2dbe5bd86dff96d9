"""Evidence: the observations that checks judge. Each kind is collected once, when it is first needed.

Providers define how a kind is collected, one file each in `tcverify.verification.evidence`;
`tcverify.registry.evidence` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from tcverify.application import Pair
from tcverify.errors import ExecutorError, TcverifyError, UnsupportedOp
from tcverify.execution import ArenaRun, Comparison, Explanation, Exploration, Extreme, Lockstep, Noise, Run
from tcverify.program import Contract, Doubt, Program
from tcverify.registry.choices import DomainName
from tcverify.registry.evidence import EVIDENCE

#: Measurements of the original alone, which apply to any rewritten program.
MEASURES = frozenset({"conditioning", "rounding", "op-laws"})


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """How evidence is to be collected.

    Attributes:
        baseline: the original's run in lockstep.
        lockstep: runs programs as `baseline` was run.
        checks: names of the checks that will use the evidence.
        domain: the requested number domain: "float64", "native" or "exact".
        deep: whether to search longer.
        on_device: whether streams run on CUDA devices as well.
    """

    baseline: Run
    lockstep: Lockstep
    checks: list[str]
    domain: DomainName = "float64"
    deep: bool = False
    on_device: bool = False


@dataclass(slots=True)
class Evidence:
    """A program before and after a pass, the pass's contract, and the observations.

    Attributes:
        request: how to collect evidence; without it only given evidence is available.
        taken: the evidence that was given or collected, by kind.
        measured: evidence on the same original, whose measurements apply here too.
        doubts: why kinds of evidence could not be collected.
        seconds: time that each kind took, without the kinds that it uses.
    """

    pair: Pair
    contract: Contract
    request: EvidenceRequest | None = None
    taken: dict[str, Any] = field(default_factory=dict)
    measured: Evidence | None = None
    doubts: list[Doubt] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def take(self, kind: str) -> Any:
        """Return evidence of a kind, or None if there is none; if the reason is a failure, record a doubt.

        Raises:
            UnsupportedOp, ExecutorError: a measurement fails that every judgement needs.
        """
        if kind in self.taken:
            return self.taken[kind]
        if self.measured is not None and kind in MEASURES:
            return self.measured.take(kind)
        if self.request is None:
            return None
        start, others = perf_counter(), sum(self.seconds.values())
        try:
            self.taken[kind] = EVIDENCE[kind](self)
        except (UnsupportedOp, ExecutorError) as error:
            if kind in MEASURES:
                raise
            self.taken[kind] = None
            self.doubt(doubt_of_error(error))
        self.seconds[kind] = perf_counter() - start - (sum(self.seconds.values()) - others)
        return self.taken[kind]

    def doubt(self, doubt: Doubt) -> None:
        """Record why evidence could not be collected, once."""
        if doubt not in self.doubts:
            self.doubts.append(doubt)

    @property
    def runs(self) -> list[Comparison]:
        """Comparisons of the two versions: in lockstep, in the requested domain, and by the confirming executor."""
        found: list[Comparison] = list(self.take("lockstep") or ())
        in_domain: DomainRuns | None = self.take("domain")
        if in_domain is not None:
            found += in_domain.runs
        found += self.taken.get("confirmation", ())
        return found

    @property
    def rewritten(self) -> Program | None:
        """The rewritten program, if the pass changed it and it ran to completion in lockstep, in this process."""
        ran: list[Comparison] = self.take("lockstep") or []
        finished = self.pair.changed and self.pair.foreign is None and bool(ran) and ran[0].rewritten.finished
        return self.pair.rewritten if finished else None

    @property
    def aside(self) -> str:
        """Why the requested domain did not run."""
        found = self.take("domain")
        return "" if found is None else str(found.aside)

    @property
    def again(self) -> Comparison | None:
        """Comparison of the original with the program after a second application, if there is one."""
        found: Comparison | None = self.take("second-application")
        return found

    @property
    def exploration(self) -> Exploration | None:
        """Results of a lowered rewritten program under other orders of its streams."""
        found: Exploration | None = self.take("stream-orders")
        return found

    @property
    def extremes(self) -> list[Extreme]:
        """The rewritten program with asynchronous collectives that read and write at other times."""
        return self.take("timings") or []

    @property
    def arena(self) -> ArenaRun | None:
        """Results of the rewritten program with its communication buffers in an arena, if it has any."""
        found: ArenaRun | None = self.take("arena")
        return found

    def explain(self) -> Explanation:
        """Explain why versions differ in the exact domain although they agree in float64."""
        return self.take("exact-difference") or Explanation("defect")

    def law(self, rewritten: Program) -> Doubt | None:
        """Name the law of an op on which the equality of the two versions depends."""
        needed: Callable[[Program], Doubt | None] | None = self.take("op-laws")
        return None if needed is None else needed(rewritten)

    def probe(self) -> dict[str, float]:
        """Measure the conditioning of the original's outputs, by label."""
        return self.take("conditioning") or {}

    def noise(self) -> Mapping[str, Noise]:
        """Measure the effect of rounding to the program's own dtypes on the original's outputs, by label."""
        return self.take("rounding") or {}

    def range_used(self) -> float:
        """Measure the largest share of the range of its dtype that a value of either version uses; infinite if that fails."""
        found: float | None = self.take("range")
        return math.inf if found is None else found


@dataclass(slots=True)
class DomainRuns:
    """Both versions in a number domain other than float64.

    Attributes:
        aside: why they did not run there.
    """

    runs: list[Comparison] = field(default_factory=list)
    aside: str = ""


def doubt_of_error(error: TcverifyError) -> Doubt:
    """The doubt for an executor's error."""
    return Doubt("unsupported-op" if isinstance(error, UnsupportedOp) else "executor-failed", error.message)


__all__ = ["MEASURES", "DomainRuns", "Evidence", "EvidenceRequest", "doubt_of_error"]
