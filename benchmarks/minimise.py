"""How far and how fast failing programs of thousands of nodes are reduced: with single moves alone, and cut down before.

    python benchmarks/minimise.py [--nodes N] [--limit SECONDS] [--old/--new-only] [CASE]...

Programs are repeated layers (tests/unit/large_programs.py), passes are those of tests/mutants with a planted defect, which fires
at one place deep inside or at all. Both reducers have the same deadline. Nodes are compute nodes on the largest rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is no package that is installed

from tcverify.application import InProcess
from tcverify.application.loading import prepare
from tcverify.campaign.reduction import Reduction, cutting, reduce, suspects_of
from tcverify.program import Program
from tcverify.verifier import verify


@dataclass(frozen=True, slots=True)
class Case:
    """A program of about so many nodes, and the defect that refutes a pass on it.

    Attributes:
        make: from the number of nodes.
        mutant: by name.
        kind: of the finding that is reduced.
    """

    name: str
    make: Callable[[int], Program]
    mutant: str
    kind: str


def cases() -> list[Case]:
    """All dialects, one place and everywhere, each kind of finding."""
    from tests.unit import large_programs as large

    def transformer(ranks: int, *, one_place: bool = False, **options: int) -> Callable[[int], Program]:
        return lambda nodes: large.transformer(nodes // 7, ranks, nodes // 13 if one_place else None, **options)

    def gradients(ranks: int) -> Callable[[int], Program]:
        return lambda nodes: large.data_parallel(nodes // 10, ranks, nodes // 25)

    def decomposed(nodes: int) -> Program:
        return large.tensor_parallel(nodes // 15, 2, nodes // 25, large.copy_then_write)

    def uneven(nodes: int) -> Program:
        return large.uneven_readers(nodes // 6, 4, nodes // 13)

    one, wide = transformer(2, one_place=True), transformer(2, one_place=True, tokens=64, hidden=128)
    return [
        Case("transformer, one place", one, "SunkBelowConstant", "wrong-value"),
        Case("transformer, wide", wide, "SunkBelowConstant", "wrong-value"),
        Case("transformer, everywhere", transformer(4), "ContributionLost", "wrong-value"),
        Case("transformer, residual", transformer(2), "ResidualAddedTwice", "wrong-value"),
        Case("transformer, one rank", transformer(4), "AllReduceErasedOnFirstRank", "collective-mismatch"),
        Case("transformer, metadata", transformer(2), "StaleMetadata", "stale-metadata"),
        Case("transformer, raises", transformer(4, tokens=6), "IndivisibleTokensAccepted", "pass-raised"),
        Case("decomposed, one place", decomposed, "CopyDropped", "wrong-value"),
        Case("decomposed, everywhere", lambda n: large.tensor_parallel(n // 15, 4), "WrittenWhileRead", "wrong-value"),
        Case("gradients, one place", gradients(2), "WriteDuringReadAllowed", "async-race"),
        Case("gradients, order", gradients(4), "StartsSinkWithWaits", "broken-order"),
        Case("gradients, buffers", gradients(2), "FreesAtTheStart", "overlapping-buffers"),
        Case(
            "pipeline, one place",
            lambda n: large.pipeline(n // 60, 20, 4, n // 130),
            "SunkBelowConstant",
            "wrong-value",
        ),
        Case("pipeline, everywhere", lambda n: large.pipeline(n // 60, 20, 4), "ContributionLost", "wrong-value"),
        Case("uneven, one place", uneven, "DeadCollectivesErased", "deadlock"),
        Case("streams, one place", lambda n: large.branches(n // 8, 2, n // 17), "WriteAfterReadUntracked", "race"),
        Case("far apart", lambda n: large.far_apart(n // 4), "MergedAcrossWrite", "wrong-value"),
    ]


def reduced(case: Case, program: Program, limit: float) -> tuple[Reduction, float, float]:
    """The reduction, the seconds that it took, and the seconds of its longest trial."""
    from tests.mutants.catalogue import MUTANTS
    from tests.mutants.foreign_catalogue import MUTANTS as FOREIGN

    subject = InProcess(prepare({**FOREIGN, **MUTANTS}[case.mutant], "", {}))
    verdict = verify(subject, program)
    kinds = [finding.kind for finding in verdict.findings]
    if case.kind not in kinds:
        raise click.ClickException(f"{case.name}: {case.mutant} shows {kinds or verdict.status}, not {case.kind}")
    longest = 0.0

    def shows(trial: Program) -> bool:
        nonlocal longest
        begun = time.perf_counter()
        found = any(finding.kind == case.kind for finding in verify(subject, trial).findings)
        longest = max(longest, time.perf_counter() - begun)
        return found

    begun = time.monotonic()
    found = reduce(program, shows, begun + limit, suspects_of(verdict, case.kind))
    seconds = time.monotonic() - begun
    assert shows(found.program)
    return found, seconds, longest


@click.command()
@click.option("--nodes", default=2000, show_default=True)
@click.option("--limit", default=120.0, show_default=True, help="Seconds that a reduction may take.")
@click.option("--old/--new-only", default=True, show_default=True, help="Whether single moves alone are measured too.")
@click.argument("chosen", metavar="[CASE]...", nargs=-1)
def main(nodes: int, limit: float, old: bool, chosen: tuple[str, ...]) -> None:
    """Reduce large failing programs in both ways."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    click.echo(f"{os.cpu_count()} cores, load {load:.1f}; at most {limit:.0f} s each")
    click.echo(f"{'':<32}{'finding':<21}{'nodes':>6}  {'moves alone':>26}  {'cut down first':>26}")
    for case in cases():
        if chosen and not any(word in case.name for word in chosen):
            continue
        program = case.make(nodes)
        columns = []
        if old:
            with mock.patch.object(cutting, "LARGE", sys.maxsize):
                columns.append(_column(*reduced(case, program, limit)))
        else:
            columns.append("")
        columns.append(_column(*reduced(case, program, limit)))
        ranks = f"{case.name}, {program.world_size} ranks"
        click.echo(f"{ranks:<32}{case.kind:<21}{program.size:>6}  " + "  ".join(f"{text:>26}" for text in columns))


def _column(found: Reduction, seconds: float, longest: float) -> str:
    cut = "+" if found.cut else " "
    return f"{found.program.size:>4} {seconds:>6.1f} s{cut} {found.trials:>4} trials"


if __name__ == "__main__":
    main()
