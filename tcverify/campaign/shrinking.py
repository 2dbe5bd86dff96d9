"""The finding that is being shrunk."""

from __future__ import annotations

from dataclasses import dataclass

from tcverify.verifier import Verdict


@dataclass
class Target:
    """A finding and the smallest program so far that shows it.

    Attributes:
        kind: of the finding; a trial succeeds when it shows this kind.
        deep: whether it takes a deep application to see it (see `verify`).
        size_drawn: compute nodes of the program as it was drawn.
        best: the verdict on the smallest program.
        cut: whether shrinking ended before everything had been tried.
    """

    kind: str
    deep: bool
    size_drawn: int
    best: Verdict
    cut: bool = False

    def record(self, verdict: Verdict) -> bool:
        """Take note of a trial, of a smaller program each time; return whether it shows the finding."""
        shows = any(f.kind == self.kind for f in verdict.findings)
        if shows:
            self.best = verdict
        return shows
