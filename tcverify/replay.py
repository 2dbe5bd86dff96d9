"""Replays counterexamples: does the pass still fail on the program that once refuted it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
import torch

from tcverify.application import Guarded, PassFacts
from tcverify.cases.counterexample import Counterexample, make_counterexample
from tcverify.errors import TcverifyError
from tcverify.execution import Executor, ProcessGroupPool
from tcverify.explain.bisection import FindingTerms, bisect
from tcverify.program import Contract, Program
from tcverify.registry.choices import DomainName
from tcverify.report.console import make_console, say
from tcverify.report.sanitize import error_text, sanitize
from tcverify.report.terminal import show
from tcverify.verification.verifier import Verdict, verify


@dataclass(frozen=True)
class ReplayResult:
    """Result of a replay.

    Attributes:
        state: "fixed" (the program passes now), "failed" (it is still refuted) or "error" (it cannot be replayed).
        message: a line for the user.
        case: the counterexample as found now, if it failed.
        source_changed: whether the source of the pass has changed.
        printed: the last lines that the pass printed.
    """

    state: str
    message: str
    case: Counterexample | None = None
    source_changed: bool = False
    printed: str = ""


def replay_case(case: Counterexample, confirm: Executor | None, *, blame: bool = False) -> ReplayResult:
    """Verify a counterexample's program again, with the same pass, contract, timeout and depth.

    Args:
        confirm: executor for programs that lockstep does not refute; it also confirms findings about values.
        blame: whether to search for the rewrites that cause the finding.
    """
    if not case.replayable:
        return ReplayResult("error", "the pass was a closure or an instance, which another process cannot import")
    try:
        with Guarded(case.facts.target, case.facts.options, timeout=case.pass_timeout) as subject:
            facts = subject.facts
            verdict = verify(
                subject, case.program, contract=case.contract, confirm=confirm,
                domain=case.domain, deep=case.deep, always_confirm=True,
            )  # fmt: skip
            changed = bool(case.facts.source) and facts.source != case.facts.source
            outcome = replace(_judge(case, verdict, facts, changed), printed=subject.printed)
            if blame and outcome.case is not None:
                terms = FindingTerms(
                    outcome.case.finding.kind, case.contract, confirm, domain=case.domain, deep=case.deep
                )
                named = replace(outcome.case, blame=bisect(subject, verdict, terms))
                outcome = replace(outcome, case=named, message=f"{outcome.message}\nroot cause: {named.blame}")
    except TcverifyError as error:
        return ReplayResult("error", str(error))
    return outcome


def _judge(case: Counterexample, verdict: Verdict, facts: PassFacts, changed: bool) -> ReplayResult:
    known = case.finding.kind
    kinds = [f.kind for f in verdict.findings]
    if not kinds:
        if verdict.status == "inconclusive":
            return ReplayResult("error", f"inconclusive: {verdict.doubts[0].detail}", None, changed)
        aside = [note.detail for note in verdict.notes if note.reason == f"{case.domain}-aside"]
        if aside and case.finding.domain == case.domain:
            return ReplayResult(
                "error",
                f"the {case.domain} domain, in which it was found, is not applicable now: {aside[0]}",
                None,
                changed,
            )
        gone = "the program passes" if known == "run-died" else f"{known} is gone"
        return ReplayResult("fixed", gone, None, changed)
    kind = known if known in kinds else kinds[0]
    now = make_counterexample(
        verdict,
        kind,
        facts,
        case.contract,
        size_drawn=case.size_drawn,
        shrink_cut=case.shrink_cut,
        deep=case.deep,
        pass_timeout=case.pass_timeout,
        real_shapes=case.real_shapes,
    )
    instead = "" if kind == known else f" instead of {known}"
    return ReplayResult("failed", f"{kind}{instead}: {now.finding.title}", now, changed)


def reproduce(
    program: Program,
    target: str,
    options: Mapping[str, Any],
    contract: Mapping[str, Any],
    kind: str,
    *,
    domain: DomainName = "float64",
    deep: bool = False,
    pass_timeout: float = 20.0,
) -> int:
    """Verify one program and print the findings; called by repro.py.

    Args:
        kind: the expected kind of finding.
        domain: the number domain; see `verify`.
        pass_timeout: time limit for one application of the pass, in seconds.

    Returns:
        1 if the pass is refuted, 0 if it passes, 2 if the verdict is inconclusive.
    """
    torch.set_num_threads(1)  # as `tcverify run` does
    console = make_console()
    promises = Contract.of(contract)
    try:
        with Guarded(target, options, timeout=pass_timeout) as subject, ProcessGroupPool(program.world_size) as pool:
            verdict = verify(
                subject, program, contract=promises, confirm=pool, domain=domain, deep=deep, always_confirm=True
            )
            facts = subject.facts
    except TcverifyError as error:
        click.echo(error_text(error), err=True)
        return 2
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return 130
    found = [f.kind for f in verdict.findings]
    if not found:
        say(console, f"{verdict.status}: {kind} does not occur")
        for doubt in verdict.doubts:
            say(console, sanitize(f"  {doubt.reason}: {doubt.detail}"))
        for note in verdict.notes:
            say(console, sanitize(f"  {note.reason}: {note.detail}"))
        return 0 if verdict.status == "passed" else 2
    shown = kind if kind in found else found[0]
    case = make_counterexample(verdict, shown, facts, promises, deep=deep, pass_timeout=pass_timeout)
    show(console, case, None)
    return 1


__all__ = ["ReplayResult", "replay_case", "reproduce"]
