"""How far and how fast failing programs of thousands of nodes are reduced: with single moves alone, and cut down before.

    python benchmarks/minimise.py [--nodes N] [--limit SECONDS] [--old/--new-only] [CASE]...

Programs are repeated layers (tests/support/large_programs.py), and passes have a planted defect, which fires at one place deep
inside or everywhere (tests/support/large_cases.py). Both reducers have the same deadline. Nodes are compute nodes on the largest
rank; "a trial" is one verification of the whole program.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from unittest import mock

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.program import Program
from tcverify.shrink import Reduction, reduce, suspects_of
from tcverify.shrink.graph import windows
from tcverify.verification.verifier import verify
from tests.support.large_cases import CASES, Case


def reduced(case: Case, program: Program, limit: float) -> tuple[Reduction, float, float]:
    """The reduction, the seconds that it took, and the seconds of a trial of the whole program."""
    subject = InProcess(prepare_pass(case.defect, "", {}))
    begun = time.perf_counter()
    verdict = verify(subject, program, contract=case.contract)
    whole = time.perf_counter() - begun
    kinds = [finding.kind for finding in verdict.findings]
    if case.kind not in kinds:
        raise click.ClickException(f"{case.name}: the pass shows {kinds or verdict.status}, not {case.kind}")

    def shows(trial: Program) -> bool:
        return any(finding.kind == case.kind for finding in verify(subject, trial, contract=case.contract).findings)

    begun = time.monotonic()
    found = reduce(program, shows, begun + limit, suspects_of(verdict, case.kind))
    seconds = time.monotonic() - begun
    assert shows(found.program)
    return found, seconds, whole


@click.command()
@click.option("--nodes", default=2000, show_default=True)
@click.option("--limit", default=120.0, show_default=True, help="Seconds that a reduction may take.")
@click.option("--old/--new-only", default=True, show_default=True, help="Whether single moves alone are measured too.")
@click.argument("chosen", metavar="[CASE]...", nargs=-1)
def main(nodes: int, limit: float, old: bool, chosen: tuple[str, ...]) -> None:
    """Reduce large failing programs in both ways."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    click.echo(f"{os.cpu_count()} cores, load {load:.1f}; at most {limit:.0f} s each; + if that ended it")
    click.echo(f"{'':<33}{'finding':<20}{'nodes':>6}{'a trial':>9}  {'moves alone':>24}  {'cut down first':>24}")
    for case in CASES:
        if chosen and not any(word in case.name for word in chosen):
            continue
        program = case.make(nodes)
        moves = ""
        if old:
            with mock.patch.object(windows, "LARGE", sys.maxsize):
                moves = _column(*reduced(case, program, limit)[:2])
        found, seconds, whole = reduced(case, program, limit)
        line = f"{case.name}, {program.world_size} ranks"
        line = f"{line:<33}{case.kind:<20}{program.size:>6}{whole:>7.1f} s"
        click.echo(f"{line}  {moves:>24}  {_column(found, seconds):>24}")


def _column(found: Reduction, seconds: float) -> str:
    cut = "+" if found.cut else " "
    return f"{found.program.size:>4} {seconds:>6.1f} s{cut}{found.trials:>5} trials"


if __name__ == "__main__":
    main()
