"""What executors are and what they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tcverify.domains import FLOAT64, Domain
from tcverify.execution.compare import Delta
from tcverify.execution.interpreter import CollectiveCall, RankResult
from tcverify.program import Program


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """A rank that waits in a collective: its `ordinal`-th one (from 1) of this kind on this communicator."""

    rank: int
    call: CollectiveCall
    ordinal: int

    def __str__(self) -> str:
        collective = self.call.collective
        if collective.kind == "send_recv" and collective.group is None:
            source, target = collective.communicator
            return f"rank {self.rank} waits in send_recv #{self.ordinal} from rank {source} to rank {target}"
        name = f" '{collective.group}'" if collective.group is not None else ""
        return f"rank {self.rank} waits in {collective.kind} #{self.ordinal} of group{name} {list(collective.communicator)}"


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that wait forever.

    Attributes:
        waits: the waiting ranks, along the cycle if there is one.
        cycle: whether `waits` is a cycle: each rank waits for the next, the last for the first. Otherwise the last one waits for
            `finished`.
        finished: a rank that has ended without joining, if there is no cycle.
    """

    waits: tuple[CollectiveWait, ...]
    cycle: bool
    finished: int | None = None

    def __str__(self) -> str:
        sentences = [str(wait) for wait in self.waits]
        if self.finished is not None:
            sentences.append(f"rank {self.finished} has finished without joining")
        return "; ".join(sentences)


@dataclass(slots=True)
class Run:
    """One execution of a program on all ranks.

    Attributes:
        ranks: results in rank order.
        hang: set if ranks wait for each other forever.
        mismatch: set if the members of a collective disagree: the sentence, and the calls by rank.
        domain: name of the number domain.
        keeps: objects that must live as long as the run.
    """

    executor: str
    ranks: list[RankResult]
    hang: Hang | None = None
    mismatch: tuple[str, dict[int, CollectiveCall]] | None = None
    domain: str = "float64"
    keeps: Any = field(default=None, repr=False)

    @property
    def error(self) -> RankResult | None:
        """The first rank on which a node raised."""
        return next((r for r in self.ranks if r.error is not None), None)

    @property
    def finished(self) -> bool:
        """Whether every rank came to its end."""
        return self.hang is None and self.mismatch is None and self.error is None

    @property
    def why(self) -> str:
        """Why it did not finish, in one sentence."""
        if self.mismatch is not None:
            return self.mismatch[0]
        if self.hang is not None:
            return str(self.hang)
        failed = self.error
        return f"on rank {failed.rank}, {failed.error}" if failed is not None else "it did not finish"


@dataclass(slots=True)
class Comparison:
    """Both versions of a program, executed, and how their outputs differ. `deltas` is empty unless both finished.

    In the native domain, both are compared with `reference`, the original in float64 (see `compare.compare_native`).
    """

    executor: str
    original: Run
    rewritten: Run
    deltas: list[Delta] = field(default_factory=list)
    reference: Run | None = None

    @property
    def domain(self) -> str:
        """Name of the number domain."""
        return self.rewritten.domain


class Executor(Protocol):
    """Runs programs. Implementations: `Lockstep`, `ProcessGroupPool`."""

    name: str

    def run(self, program: Program, *, observe: bool = False, domain: Domain = FLOAT64) -> Run:
        """Run a program and return every rank's outputs and, when observed, every node's value.

        Raises:
            UnsupportedOp: an op has no meaning.
            ExecutorError: the executor failed; says nothing about the program.
        """
        ...

    def compare(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Comparison:
        """Run both versions on the same inputs and compare their outputs. Raises as `run` does."""
        ...

    def start_comparison(
        self, original: Program, rewritten: Program, domain: Domain = FLOAT64
    ) -> Callable[[], Comparison]:
        """Start a comparison; call the result to wait for it. Executors in this process run only then."""
        ...
