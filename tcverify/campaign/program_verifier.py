"""Verifies the programs of a campaign, each noted on disk before it may take this process down."""

from __future__ import annotations

from tcverify.application import Subject
from tcverify.campaign.in_flight import InFlight
from tcverify.campaign.interrupts import Interrupts
from tcverify.campaign.pipeline import InFlightProgram
from tcverify.campaign.plan import CampaignPlan
from tcverify.execution import Executor
from tcverify.program import Contract, Program, program_id
from tcverify.verification.verifier import Phase, Verdict, chosen_checks, verify, verify_in_steps

#: Share of programs that are applied deeply (see `verify`): those whose id is a multiple of this.
DEEP_EVERY = 16


class ProgramVerifier:
    """Verifies programs as a plan says; what they reach of the pass's code is noted.

    Args:
        confirm: the executor that confirms, or None to stay in lockstep.
        contract: what the pass promises.
        interrupts: are let through while a program is verified.
    """

    def __init__(
        self, subject: Subject, plan: CampaignPlan, confirm: Executor | None, contract: Contract, interrupts: Interrupts
    ) -> None:
        self.in_flight = InFlight(plan.state_dir, subject, contract)
        self._subject = subject
        self._plan = plan
        self._confirm = confirm
        self._contract = contract
        self._interrupts = interrupts
        self._checks = chosen_checks(plan.checks)

    def verify(
        self,
        program: Program,
        *,
        deep: bool,
        confirm: bool = True,
        brief: bool = False,
        contract: Contract | None = None,
    ) -> Verdict:
        """Verify one program, with the executor that confirms unless it is to be left out.

        Args:
            contract: other promises than those of the plan.
        """
        self.in_flight.note(program, deep)
        with self._interrupts.open():
            verdict = verify(
                self._subject, program, contract=contract or self._contract, confirm=self._confirm if confirm else None,
                checks=self._plan.checks, domain=self._plan.domain, deep=deep, brief=brief,
            )  # fmt: skip
        self.cover(verdict)
        return verdict

    def confirm(self, program: Program, *, deep: bool) -> Verdict:
        """Verify a program that is refuted already, on the process group as well."""
        self.in_flight.note(program, deep)
        verdict = verify(
            self._subject, program, contract=self._contract, confirm=self._confirm, checks=self._plan.checks,
            domain=self._plan.domain, deep=deep, always_confirm=True,
        )  # fmt: skip
        self.cover(verdict)
        return verdict

    def begin(self, program: Program) -> InFlightProgram:
        """Return a program with the steps of its verification, none of which is done yet."""
        search = self._plan.search
        some = int(program_id(program), 16) % DEEP_EVERY == 0
        deep = self._plan.deep or some
        made = search is not None and search.made(program)
        steps = verify_in_steps(
            self._subject, program, contract=self._contract, confirm=self._confirm if some or not made else None,
            checks=self._checks, domain=self._plan.domain, deep=deep, lean=made,
            watch=search.watch if search is not None else None,
        )  # fmt: skip
        return InFlightProgram(program, deep, steps)

    def advance(self, flight: InFlightProgram, until: Phase | None) -> None:
        """Have a program go on until a phase of its verification."""
        try:
            with self._interrupts.open():
                flight.advance(until)
        except Exception:
            self.note(flight)
            raise

    def note(self, flight: InFlightProgram) -> None:
        """Write down that this process is about to work on a program."""
        self.in_flight.note(flight.program, flight.deep)

    def cover(self, verdict: Verdict) -> None:
        """Note what a program has reached: a place is told once, also where that is while a finding is shrunk."""
        if self._plan.coverage is not None:
            self._plan.coverage.add(verdict.pair.trace.reached)


__all__ = ["DEEP_EVERY", "ProgramVerifier"]
