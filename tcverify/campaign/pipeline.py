"""Several programs under way at once: while one is with the pass, this process runs another, and the process group a third."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tcverify.program import Program
from tcverify.verification.verifier import Phase, Steps, Verdict


@dataclass(eq=False, slots=True)
class InFlightProgram:
    """A program under way.

    Attributes:
        steps: of its verification.
        verdict: once there is one; steps that are left then have nothing to do.
    """

    program: Program
    deep: bool
    steps: Steps
    verdict: Verdict | None = None

    def advance(self, until: Phase | None) -> None:
        """Go on until this phase, or to the verdict if that comes first; None: to the verdict."""
        phase = None
        while self.verdict is None and (phase is None or phase is not until):
            try:
                phase = next(self.steps)
            except StopIteration as stop:
                self.verdict = stop.value
                return


class Pipeline:
    """At most two programs under way, the third coming in as the first goes out.

    Args:
        advance: has a flight go on until a phase.
        note: is told which program this process is about to work on.
    """

    def __init__(
        self, advance: Callable[[InFlightProgram, Phase | None], None], note: Callable[[InFlightProgram], None]
    ) -> None:
        self._advance = advance
        self._note = note
        self._applied: InFlightProgram | None = None  # the pass's process has it
        self._confirmed: InFlightProgram | None = None  # the process group has it

    @property
    def under_way(self) -> list[InFlightProgram]:
        """The programs under way, the oldest first. One may have its verdict already."""
        return [flight for flight in (self._confirmed, self._applied) if flight is not None]

    def __len__(self) -> int:
        return len(self.under_way)

    def answer(self) -> list[InFlightProgram]:
        """Wait for the pass's process; return its program if that says all about it (it failed, or hung)."""
        applied = self._applied
        if applied is None:
            return []
        self._advance(applied, Phase.ANSWERED)
        if applied.verdict is None:
            return []
        self._applied = None
        return [applied]

    def feed(self, flight: InFlightProgram | None) -> list[InFlightProgram]:
        """Take a program in (None: no more come) after `answer`; return those that are finished by that."""
        applied, confirmed = self._applied, self._confirmed
        if flight is not None:
            self._advance(flight, Phase.APPLYING)  # the pass's process is free for it
        if applied is not None:
            self._advance(applied, Phase.CONFIRMING)
        if confirmed is not None:
            self._advance(confirmed, None)
        if flight is not None:
            self._note(flight)
            self._advance(flight, Phase.RAN)
        waiting = applied is not None and applied.verdict is None
        self._applied, self._confirmed = flight, applied if waiting else None
        return [one for one in (confirmed, applied) if one is not None and one.verdict is not None]


__all__ = ["InFlightProgram", "Pipeline"]
