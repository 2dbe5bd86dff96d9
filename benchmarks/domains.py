"""Which planted defects each number domain shows, and whether it refutes what is sound.

    python benchmarks/domains.py [--programs N] [--sound N] [--workers N] [NAME]...

One row per mutant: the number of the program that first shows it in each domain, or that none of N does; number 0 is the
mutant's case in reports/gallery, if it has one. Half of the programs have 2 ranks, half 4. One row per sound pass: how many of
the programs that it changed are refuted, and how many are inconclusive. In lockstep.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify.application import InProcess
from tcverify.application.loading import load_pass
from tcverify.cases.counterexample import read_counterexample
from tcverify.domains import DOMAINS
from tcverify.passes import Identity, Multistream, SequenceParallel
from tcverify.program import Program
from tcverify.strategies import DECODERS, all_meshes
from tcverify.verification.verifier import verify

SEED = 11


def target_of(pass_: type) -> str:
    return f"{pass_.__module__}:{pass_.__qualname__}"


def strategies_of(target: str) -> tuple[str, ...]:
    """What shows the defects of a pass, or what it rewrites."""
    if "multistream" in target:
        return ("overlap", "mixed")
    return ("mixed", "near-miss") if "sequence_parallel" in target else ("mixed", "wild", "structured")


def programs_for(target: str, bound: int) -> Iterator[Program]:
    """The programs to look at, the same ones for all domains."""
    choose = random.Random(SEED)
    strategies = strategies_of(target)
    for number in range(bound):
        decoder = DECODERS[strategies[number // 2 % len(strategies)]]
        mesh = choose.choice(all_meshes((2, 4)[number % 2]))
        yield decoder.decode(mesh, choose.randbytes(decoder.width))


def known_case(target: str) -> tuple[Program, dict[str, object], bool] | None:
    """The program of a mutant's case in the gallery, the mutant's options, and whether the case is deep."""
    from tests.mutants.exhibit_list import EXHIBITS
    from tests.mutants.exhibits import GALLERY

    for exhibit in EXHIBITS:
        if exhibit.mutant.split("+")[-1] == target:
            case = read_counterexample(GALLERY / exhibit.slug / "counterexample.json")
            return case.program, exhibit.options, exhibit.deep
    return None


def hunt(target: str, bound: int) -> dict[str, int | None]:
    """By domain, the number of the first program that refutes a mutant."""
    torch.set_num_threads(1)
    found: dict[str, int | None] = dict.fromkeys(DOMAINS)
    known = known_case(target)
    subject = InProcess(load_pass(target, known[1] if known else {}))
    numbered = [(0, known[0])] if known else []
    for number, program in [*numbered, *enumerate(programs_for(target, bound), 1)]:
        for domain in DOMAINS:
            if found[domain] is None:
                verdict = verify(subject, program, domain=domain, deep=number == 0 and known is not None and known[2])
                if verdict.findings:
                    found[domain] = number
                elif not verdict.changed:
                    break
        if None not in found.values():
            break
    return found


def count(target: str, bound: int) -> dict[str, Counter[str]]:
    """By domain, how many programs come to each verdict, and how many the pass changed."""
    torch.set_num_threads(1)
    subject = InProcess(load_pass(target))
    statuses: dict[str, Counter[str]] = {domain: Counter() for domain in DOMAINS}
    for program in programs_for(target, bound):
        for domain in DOMAINS:
            verdict = verify(subject, program, domain=domain)
            statuses[domain][verdict.status] += 1
            statuses[domain]["changed"] += verdict.changed
    return statuses


def _row(name: str, cells: list[str]) -> None:
    print(f"{name:<34}" + "".join(f"{cell:<26}" for cell in cells), flush=True)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--programs", type=click.IntRange(1), default=200, show_default=True, help="Bound per mutant.")
@click.option("--sound", "each", type=click.IntRange(1), default=30, show_default=True, help="Programs per sound pass.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
def main(names: tuple[str, ...], programs: int, each: int, workers: int) -> None:
    from tests.mutants import catalogue, foreign_catalogue

    start = time.monotonic()
    mutants = {**catalogue.MUTANTS, **foreign_catalogue.MUTANTS}
    passes: list[Any] = [SequenceParallel, Multistream, Identity, *foreign_catalogue.SOUND]
    sound = {pass_.name: pass_ for pass_ in passes}
    chosen = [name for name in (*mutants, *sound) if not names or name in names]
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        hunts = {name: pool.submit(hunt, target_of(mutants[name]), programs) for name in chosen if name in mutants}
        counts = {name: pool.submit(count, target_of(sound[name]), each) for name in chosen if name in sound}
        found: Counter[str] = Counter()
        alarms: Counter[str] = Counter()
        _row("mutant: first program", list(DOMAINS))
        for name, hunted in hunts.items():
            numbers = hunted.result()
            found.update(domain for domain, number in numbers.items() if number is not None)
            _row(name, ["missed" if numbers[d] is None else f"#{numbers[d]}" for d in DOMAINS])
        _row("sound pass: false alarms", list(DOMAINS))
        for name, counted in counts.items():
            statuses = counted.result()
            alarms.update({domain: statuses[domain]["refuted"] for domain in DOMAINS})
            _row(
                name,
                [
                    f"{statuses[d]['refuted']} of {statuses[d]['changed']} changed"
                    + (f", {statuses[d]['inconclusive']} open" if statuses[d]["inconclusive"] else "")
                    for d in DOMAINS
                ],
            )
    _row("found", [f"{found[domain]} of {len(hunts)}" for domain in DOMAINS])
    _row("missed", [f"{len(hunts) - found[domain]}" for domain in DOMAINS])
    _row("false alarms", [f"{alarms[domain]} of {len(counts) * each}" for domain in DOMAINS])
    print(f"at most {programs} programs per mutant, {each} per sound pass, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
