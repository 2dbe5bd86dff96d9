"""What a campaign that passed hands to the test function."""

from __future__ import annotations

from dataclasses import dataclass

from tcverify.campaign import CampaignFinished, Statistics
from tcverify.cases.counterexample import Counterexample


@dataclass(frozen=True, repr=False)
class ItemOutcome:
    """The outcome of the campaign of one item.

    Attributes:
        finished: the campaign's own summary.
        world: what the programs ran on, e.g. "2 ranks".
        shard: number of the item among the `shards` of one pass and world.
        confirm: the executor that confirmed, or "none".
    """

    finished: CampaignFinished
    world: str
    shard: int
    shards: int
    confirm: str

    @property
    def status(self) -> str:
        """ "passed", "refuted", "inconclusive" or "nothing tested"; the test function sees nothing but "passed"."""
        return self.finished.verdict

    @property
    def passed(self) -> bool:
        """Whether programs passed, none refuted the pass, and it changed some."""
        return self.finished.verdict == "passed"

    @property
    def statistics(self) -> Statistics:
        """Counts over the programs."""
        return self.finished.statistics

    @property
    def programs(self) -> int:
        """Programs drawn and judged, those that failed earlier included."""
        return self.finished.statistics.programs

    @property
    def counterexamples(self) -> tuple[Counterexample, ...]:
        """One per kind of finding."""
        return self.finished.counterexamples

    @property
    def seed(self) -> int:
        """What the programs were drawn from."""
        return self.finished.seed

    def share(self, pattern: str | None = None) -> float:
        """Return the share of programs, 0 to 1, that the pass changed; of a pattern, those in which the pass reports it."""
        counts = self.finished.statistics
        return (counts.changed if pattern is None else counts.fired[pattern]) / max(1, counts.programs)

    def __repr__(self) -> str:
        counts = self.finished.statistics
        fired = "".join(f", {name} {100 * self.share(name):.0f} %" for name in sorted(counts.fired))
        return (
            f"<{self.finished.facts.name} on {self.world}: {self.status}, {counts.programs} programs, "
            f"{counts.inconclusive} inconclusive, changed {100 * self.share():.0f} %{fired}>"
        )
