"""What a checked pass has come across so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tcverify.report.sanitize import plural


@dataclass(slots=True)
class Tally:
    """Counts over the calls of a checked pass in this process.

    Attributes:
        name: of the pass.
        calls: graphs that it was given.
        changed: graphs that it changed, on any rank.
        passed, refuted, inconclusive: verdicts on them; graphs that no rank changed count as passed.
        unverified: graphs that were not looked at, for there is one rank.
        cached: verdicts that were known from an earlier call with the same graphs.
        doubts: inconclusive graphs by reason, and in `details` the first sentence of each.
        cases: counterexamples that were written.
        rewrites: what the pass says it has rewritten on this rank, by pattern.
        seconds: time that verification took, waiting for other ranks included.
    """

    name: str
    calls: int = 0
    changed: int = 0
    passed: int = 0
    refuted: int = 0
    inconclusive: int = 0
    unverified: int = 0
    cached: int = 0
    doubts: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    rewrites: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def tested(self) -> bool:
        """Whether something was verified: a graph that the pass changed has a verdict."""
        return self.changed > 0 and self.passed + self.refuted > 0

    @property
    def status(self) -> str:
        """ "refuted", "inconclusive" (some graph is), "passed", or "nothing tested"."""
        if self.refuted:
            return "refuted"
        if self.inconclusive:
            return "inconclusive"
        return "passed" if self.tested else "nothing tested"

    def __str__(self) -> str:
        verdicts = [
            f"{number} {name}"
            for name, number in (
                ("passed", self.passed),
                ("refuted", self.refuted),
                ("inconclusive", self.inconclusive),
                ("not verified", self.unverified),
            )
            if number
        ]
        lines = [
            f"{self.name}: {self.status}; {plural(self.calls, 'graph')}, {self.changed} changed"
            + "".join(f", {text}" for text in verdicts)
            + (f", {self.cached} cached" if self.cached else "")
            + f"; {self.seconds:.1f} s"
        ]
        if self.rewrites:
            lines.append(
                "  rewrites: " + ", ".join(f"{name} {number}" for name, number in sorted(self.rewrites.items()))
            )
        if self.calls and not self.changed and not self.inconclusive:
            lines.append("  the pass never changed anything: nothing was tested")
        lines += [
            f"  inconclusive, {reason}: {plural(number, 'graph')} ({self.details[reason]})"
            for reason, number in self.doubts.most_common()
        ]
        lines += [f"  counterexample: {path}" for path in self.cases]
        return "\n".join(lines)


__all__ = ["Tally"]
