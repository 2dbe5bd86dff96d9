"""Replays counterexamples: is the pass still wrong on the program that once refuted it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tcverify.application import Guarded
from tcverify.counterexample import Counterexample, make_counterexample
from tcverify.errors import PassLoadError, TcverifyError
from tcverify.execution import Executor, ProcessGroupPool
from tcverify.program import Contract, Program
from tcverify.report.terminal import show
from tcverify.verifier import Verdict, verify


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
        state: "fixed" (the program passes now), "failed" (it is still refuted) or "error" (it cannot be replayed).
        message: one line for people.
        case: the counterexample as it shows now, when it failed.
        source_changed: whether the pass's source is not what it was.
    """

    state: str
    message: str
    case: Counterexample | None = None
    source_changed: bool = False


def replay(case: Counterexample, confirm: Executor | None) -> Replay:
    """Verify a counterexample's program again, with the same pass, contract and depth.

    Args:
        confirm: runs programs that lockstep does not refute, and confirms those that it refutes by value.
    """
    if not case.replayable:
        return Replay("error", "the pass was a closure or an instance, which another process cannot find")
    try:
        with Guarded(case.facts.target, case.facts.options) as subject:
            changed = bool(case.facts.source) and subject.facts.source != case.facts.source
            verdict = verify(
                subject, case.program, contract=case.contract, confirm=confirm, deep=case.deep, always_confirm=True
            )
            facts = subject.facts
    except PassLoadError as error:
        return Replay("error", str(error))
    return _judge(case, verdict, replace(case, facts=facts), changed)


def _judge(case: Counterexample, verdict: Verdict, renewed: Counterexample, changed: bool) -> Replay:
    kinds = [f.kind for f in verdict.findings]
    if not kinds:
        if verdict.status == "inconclusive":
            return Replay("error", f"inconclusive: {verdict.doubts[0].detail}", None, changed)
        return Replay("fixed", f"{case.finding.kind} is gone", None, changed)
    kind = case.finding.kind if case.finding.kind in kinds else kinds[0]
    now = make_counterexample(verdict, kind, renewed.facts, case.contract, size_drawn=case.size_drawn, deep=case.deep)
    message = (
        now.finding.title
        if kind == case.finding.kind
        else f"{kind} instead of {case.finding.kind}: {now.finding.title}"
    )
    return Replay("failed", f"{kind}: {message}" if kind == case.finding.kind else message, now, changed)


def reproduce(
    program: Program,
    target: str,
    options: Mapping[str, Any],
    contract: Mapping[str, bool],
    kind: str,
    *,
    deep: bool = False,
) -> int:
    """Verify one program and print what is found; what repro.py calls.

    Returns:
        1 when the pass is refuted, 0 when it passes, 2 when it cannot be judged.
    """
    console = Console(highlight=False)
    try:
        with Guarded(target, options) as subject, ProcessGroupPool(program.world_size) as pool:
            promises = Contract(**contract)
            verdict = verify(subject, program, contract=promises, confirm=pool, deep=deep, always_confirm=True)
            facts = subject.facts
    except TcverifyError as error:
        console.print(f"Error: {error}", markup=False)
        return 2
    found = [f.kind for f in verdict.findings]
    if not found:
        console.print(f"{verdict.status}: {kind} does not show", markup=False)
        for doubt in verdict.doubts:
            console.print(f"  {doubt.reason}: {doubt.detail}", markup=False)
        return 0 if verdict.status == "passed" else 2
    shown = kind if kind in found else found[0]
    show(console, make_counterexample(verdict, shown, facts, promises, deep=deep), Path("reports"))
    return 1
