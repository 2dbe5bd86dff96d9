"""How many diagnoses name the node that a planted defect got wrong.

    python benchmarks/diagnosis.py [--programs N] [--seed N] [--keep DIR] [MUTANT]...
    python benchmarks/diagnosis.py --tampered N

Programs are drawn until lockstep refutes the mutant in an expected way and are shrunk as campaigns shrink them. The node that
the diagnosis names (the first that diverges, else the finding's own) is compared with what tests/mutants/planted.py says.

With --tampered, N programs per strategy and number of ranks are drawn, a sound pass rewrites them, and one node anywhere is made
wrong (tests/mutants/tampering.py). Before, the share of values that relations explain in the sound program is counted.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import click
import torch
from hypothesis import given, settings
from hypothesis import seed as seeded

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan
from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.cases.counterexample import Counterexample, read_counterexample, write_counterexample
from tcverify.errors import TcverifyError
from tcverify.execution import Lockstep, Run
from tcverify.explain.diagnosis import diagnose
from tcverify.program import Finding, Program
from tcverify.strategies import STRATEGIES
from tcverify.verification.verifier import verify

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
                    plan = CampaignPlan(
                        programs(world_size=size),
                        f"{size} ranks",
                        Path(scratch) / "reports",
                        Path(scratch) / "state",
                        max_examples=bound,
                        seed=seed,
                        shrink_time=shrink_time,
                        fail_fast=fail_fast,
                    )
                    finished = Campaign(InProcess(prepare_pass(MUTANTS[mutant], "", {})), plan, None).run()
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


@dataclass(slots=True)
class Tally:
    """What came of programs with one wrong node, and of the same programs without it.

    Attributes:
        named: by kind of tampering, how many diagnoses named the node, and of how many.
        explained, values: how many values of the sound programs are explained, of all.
        diverging: sound programs in which something is said to diverge.
        seconds: the longest diagnosis.
    """

    named: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    explained: int = 0
    values: int = 0
    diverging: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.named += other.named
        self.judged += other.judged
        self.explained += other.explained
        self.values += other.values
        self.diverging += other.diverging
        self.seconds = max(self.seconds, other.seconds)


def tamper(strategy: str, pass_name: str, world_size: int, programs: int, seed: int) -> Tally:
    """Draw programs, rewrite them, make one node wrong and diagnose."""
    from tcverify.passes import Multistream, SequenceParallel

    torch.set_num_threads(1)
    subject = InProcess(prepare_pass({"multistream": Multistream}.get(pass_name, SequenceParallel), "", {}))
    tally = Tally()
    found: list[Program] = []

    @seeded(seed)
    @settings(SETTINGS, max_examples=programs)
    @given(STRATEGIES[strategy](world_size=world_size))
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    for number, program in enumerate(found):
        rewritten = verify(subject, program, checks=[]).pair.rewritten
        if rewritten is not None:
            _judge(tally, program, rewritten, number)
    return tally


def _judge(tally: Tally, program: Program, rewritten: Program, number: int) -> None:
    from tests.mutants.tampering import TAMPERS, tampered

    found = diagnose(program, rewritten, Finding("wrong-value", "equivalence", "", "", None, 0, {"label": "output 0"}))
    tally.diverging += found.first is not None
    tally.values += len(found.relations or {})
    tally.explained += sum(relation.explained for relation in (found.relations or {}).values())
    before = Lockstep().run(program)
    for kind in TAMPERS:
        made = tampered(rewritten, kind, 7 * number + 1, number % program.world_size if number % 3 == 2 else None)
        finding = None if made is None else _finding(before, made[0])
        if made is None or finding is None:
            continue
        start = time.perf_counter()
        found = diagnose(program, made[0], finding)
        tally.seconds = max(tally.seconds, time.perf_counter() - start)
        wrong = made[1].get(found.rank) or set().union(*made[1].values())
        tally.judged[kind] += 1
        tally.named[kind] += (found.first.node if found.first is not None else finding.node) in wrong


def _finding(before: Run, program: Program) -> Finding | None:
    """What lockstep says about a program with one wrong node; None if it finds nothing, or cannot run it."""
    try:
        comparison = Lockstep().compare_runs(before, Lockstep().run(program))
    except TcverifyError:
        return None
    error = comparison.rewritten.error
    if error is not None and error.error is not None:
        return Finding("rewritten-raises", "equivalence", "", "", error.error.node, error.rank)
    worst = max(comparison.deltas, key=lambda d: d.difference / d.scale if d.scale else 0.0, default=None)
    if worst is None or not worst.difference > 1e-6 * worst.scale:
        return None
    return Finding("wrong-value", "equivalence", "", "", None, worst.rank, {"label": worst.label})


def tampering(programs: int, seed: int, workers: int) -> None:
    """Print how many wrong nodes are named, and the share of sound values that are explained."""
    whole = Tally()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        drawn = [("mixed", "sequence_parallel"), ("overlap", "multistream")]
        for future in [pool.submit(tamper, *one, size, programs, seed) for one in drawn for size in WORLD_SIZES]:
            whole.add(future.result())
    for kind, count in sorted(whole.judged.items()):
        print(f"{kind:<16} {whole.named[kind]} of {count} named")
    print(f"all              {whole.named.total()} of {whole.judged.total()} named; {whole.seconds:.2f} s at most")
    print(f"sound programs: {whole.explained} of {whole.values} values explained, {whole.diverging} said to diverge")


@click.command()
@click.argument("mutants", nargs=-1)
@click.option("--programs", type=click.IntRange(1), default=300, show_default=True, help="Bound per campaign.")
@click.option("--seed", "seeds", type=int, multiple=True, default=(7,), show_default=True)
@click.option("--shrink-time", type=float, default=5.0, show_default=True)
@click.option("--tampered", type=click.IntRange(0), default=0, help="Programs with one wrong node instead of mutants.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Keep counterexamples here, and take those that are there."
)
def main(
    mutants: tuple[str, ...],
    programs: int,
    seeds: tuple[int, ...],
    shrink_time: float,
    workers: int,
    tampered: int,
    keep: Path | None,
) -> None:
    from tests.mutants.catalogue import EXPECTED
    from tests.mutants.planted import KNOWN

    if tampered:
        tampering(tampered, seeds[0], workers)
        return

    chosen = mutants or tuple(name for name in KNOWN if EXPECTED[name] - OF_THE_WHOLE)
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
