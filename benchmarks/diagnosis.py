"""How many diagnoses name the node that a planted defect got wrong.

    python benchmarks/diagnosis.py [--programs N] [--seed N] [--keep DIR] [MUTANT]...

Programs are drawn until lockstep refutes the mutant in an expected way and are shrunk as campaigns shrink them. The node that
the diagnosis names (the first that diverges, else the finding's own) is compared with what tests/mutants/planted.py says.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is no package that is installed

from tcverify.application import InProcess
from tcverify.application.loading import prepare
from tcverify.campaign import Campaign, Plan
from tcverify.counterexample import Counterexample, read_counterexample, write_counterexample
from tcverify.diagnosis import diagnose

WORLD_SIZES = (2, 4)

#: What has no node that could be to blame: the graph as a whole is too slow, or there is none.
OF_THE_WHOLE = frozenset({"wrong-schedule", "no-gain", "pass-raised"})


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one mutant."""

    mutant: str
    kind: str
    blamed: str
    planted: tuple[str, ...]
    named: bool
    seconds: float
    text: str


def find(mutant: str, seed: int, bound: int, shrink_time: float) -> Counterexample | None:
    """Run campaigns until one shows the mutant in an expected way."""
    from tests.mutants.catalogue import EXPECTED, MUTANTS, hunting_grounds

    wanted = EXPECTED[mutant] - OF_THE_WHOLE
    for programs in hunting_grounds(mutant):
        for size in WORLD_SIZES:
            for fail_fast in (True, False):
                with tempfile.TemporaryDirectory() as scratch:
                    plan = Plan(
                        programs(world_size=size),
                        f"{size} ranks",
                        Path(scratch) / "reports",
                        Path(scratch) / "state",
                        max_examples=bound,
                        seed=seed,
                        shrink_time=shrink_time,
                        fail_fast=fail_fast,
                    )
                    finished = Campaign(InProcess(prepare(MUTANTS[mutant], "", {})), plan, None).run()
                cases = [case for case in finished.counterexamples if case.finding.kind in wanted]
                if cases:
                    return cases[0]
                if not finished.counterexamples:
                    break
    return None


def row(mutant: str, seed: int, bound: int, shrink_time: float, keep: Path | None) -> Row:
    """Find, diagnose and compare."""
    from tests.mutants.planted import planted

    torch.set_num_threads(1)
    kept = sorted(keep.glob(f"{mutant}-{seed}/*/counterexample.json")) if keep is not None else []
    case = read_counterexample(kept[0]) if kept else find(mutant, seed, bound, shrink_time)
    if case is None:
        return Row(mutant, "not found", "", (), False, 0.0, "")
    if keep is not None and not kept:
        write_counterexample(case, keep / f"{mutant}-{seed}")
    start = time.perf_counter()
    found = diagnose(case.program, case.rewritten, case.finding)
    seconds = time.perf_counter() - start
    blamed = found.first.node if found.first is not None else case.finding.node or ""
    truth = planted(mutant, case.program)
    names = truth.get(found.rank) or frozenset().union(*truth.values())
    text = str(found.first) if found.first is not None else case.finding.title
    return Row(mutant, case.finding.kind, blamed, tuple(sorted(names)), blamed in names, seconds, text)


@click.command()
@click.argument("mutants", nargs=-1)
@click.option("--programs", type=click.IntRange(1), default=300, show_default=True, help="Bound per campaign.")
@click.option("--seed", "seeds", type=int, multiple=True, default=(7,), show_default=True)
@click.option("--shrink-time", type=float, default=5.0, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Keep counterexamples here, and take those that are there."
)
def main(
    mutants: tuple[str, ...], programs: int, seeds: tuple[int, ...], shrink_time: float, workers: int, keep: Path | None
) -> None:
    from tests.mutants.catalogue import EXPECTED

    chosen = mutants or tuple(name for name, kinds in EXPECTED.items() if kinds - OF_THE_WHOLE)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(row, m, seed, programs, shrink_time, keep) for m in chosen for seed in seeds]
        rows = [future.result() for future in futures]
    for r in rows:
        verdict = "named" if r.named else "-" if not r.kind or r.kind == "not found" else "NOT"
        print(f"{verdict:<6} {r.mutant:<34} {r.kind:<22} {r.blamed or '-':<24} {', '.join(r.planted)}")
        print(f"       {r.text}")
    judged = [r for r in rows if r.kind != "not found"]
    print(
        f"{sum(r.named for r in judged)} of {len(judged)} named; {max((r.seconds for r in judged), default=0.0):.2f} s at most"
    )


if __name__ == "__main__":
    main()
