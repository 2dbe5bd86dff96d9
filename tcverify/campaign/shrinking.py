"""The finding that is being shrunk."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tcverify.program import Program
from tcverify.verifier import Verdict


@dataclass
class Target:
    """A finding and the smallest program so far that shows it.

    Attributes:
        kind: of the finding; a trial succeeds when it shows this kind.
        deep: whether it takes a deep application to see it (see `verify`).
        deadline: on the monotonic clock; no trial begins after it.
        size_drawn: compute nodes of the program as it was drawn.
        best: the verdict on the smallest program.
        judged: by program id, whether the program shows the finding: other choices often draw the same program.
        cut: whether time ran out before Hypothesis had tried all it knows.
    """

    kind: str
    deep: bool
    deadline: float
    size_drawn: int
    best: Verdict
    judged: dict[str, bool] = field(default_factory=dict)
    cut: bool = False

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def record(self, identity: str, program: Program, verdict: Verdict) -> bool:
        """Take note of a trial; return whether it shows the finding."""
        shows = any(f.kind == self.kind for f in verdict.findings)
        self.judged[identity] = shows
        if shows and program.size <= self.best.pair.original.size:
            self.best = verdict
        return shows
