"""The finding that is being shrunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tcverify.application import Subject
from tcverify.campaign.record import CampaignRecord
from tcverify.cases.counterexample import Counterexample, make_counterexample
from tcverify.ops import TensorSpec
from tcverify.program import Contract, Program
from tcverify.shrink import reduce, suspects_of
from tcverify.verification.verifier import Verdict


@dataclass
class Target:
    """A finding and the smallest program so far that shows it.

    Attributes:
        kind: of the finding; a trial succeeds when it shows this kind.
        deep: whether it takes a deep application to see it (see `verify`).
        size_drawn: compute nodes of the program as it was drawn.
        best: the verdict on the smallest program.
        real_shapes: of inputs and nodes as they were given, by name, where the program runs on small sizes instead.
        cut: whether shrinking ended before everything had been tried.
    """

    kind: str
    deep: bool
    size_drawn: int
    best: Verdict
    cut: bool = False
    real_shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        scaled = self.best.pair.scaled
        self.real_shapes = _shapes(scaled.real) if scaled is not None else {}

    def case(self, verdict: Verdict, subject: Subject, contract: Contract) -> Counterexample:
        """Return the counterexample of a verdict that shows the finding.

        Args:
            contract: what the pass promises where it shows it.
        """
        return make_counterexample(
            verdict, self.kind, subject.facts, contract, size_drawn=self.size_drawn, shrink_cut=self.cut, deep=self.deep,
            pass_timeout=subject.timeout, real_shapes=self.real_shapes,
        )  # fmt: skip

    def shrink(self, verify: Callable[[Program], Verdict], record: CampaignRecord, limit: float) -> None:
        """Reduce the program to the smallest that shows this kind of finding.

        Args:
            verify: verifies a smaller program.
            limit: seconds after which no new trial begins.
        """

        def shows(program: Program) -> bool:
            verdict = verify(program)
            record.statistics.shrinking += 1
            record.progress(f"shrinking {self.kind}")
            return self.record(verdict)

        start = time.monotonic()
        self.cut = True  # until it has come to its end
        suspects = suspects_of(self.best, self.kind)
        try:
            self.cut = reduce(self.best.pair.original, shows, start + limit, suspects).cut
        finally:
            record.statistics.seconds.update({"shrinking": time.monotonic() - start})

    def record(self, verdict: Verdict) -> bool:
        """Take note of a trial, of a smaller program each time; return whether it shows the finding."""
        shows = any(f.kind == self.kind for f in verdict.findings)
        if shows:
            self.best = verdict
        return shows


def _shapes(program: Program) -> dict[str, tuple[int, ...]]:
    vals = {node.name: node.meta.get("val") for graph in program.graphs for node in graph.nodes}
    found = {name: val.shape for name, val in vals.items() if isinstance(val, TensorSpec)}
    return found | {spec.name: spec.shape for spec in program.inputs}
