"""Whether it pays to steer the drawing of programs by what earlier ones reached, and what it costs to record that.

    python benchmarks/steering.py [--programs N] [--seeds N] [--ways A,B] [PASS=STRATEGY]...

Ways, each on the same seeds in one run:

- drawn: every program is drawn independently, as campaigns do;
- varied: once 32 programs in a row have reached nothing new, half are variations of programs that did: single bytes of their
  choices changed, or a stretch of new bytes or of another one's put in, as fuzzers do with the inputs that they keep;
- rare: of two programs that are drawn, the pass is given the one that has the label seen least so far;
- target: Hypothesis climbs towards programs that the pass rewrites more of (`hypothesis.target`).

For each pass and way: how many lines and outcomes of conditions of the pass's code are reached after so many programs (mean over
the seeds), how many programs it takes to each of those that any way reaches on any seed (mean, and what 90 % need less than; what
is not reached counts as all programs), and how many are missed. Then the CPU time of the same programs with and without
recording, from fresh processes in turn. Give it a Python that has `sys.monitoring`: otherwise recording takes most of the time.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import click
import hypothesis
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify.application import Guarded, InProcess, load_pass
from tcverify.application.coverage.recorder import Recorder, scope_of
from tcverify.campaign import SETTINGS
from tcverify.campaign.corpus import reasons_of
from tcverify.program import Program
from tcverify.strategies import DECODERS, STRATEGIES, all_meshes

PASSES = ("tcverify.passes:SequenceParallel=mixed", "tcverify.passes:Multistream=mixed")
WAYS = ("drawn", "varied", "rare", "target")

#: Programs without anything new, in a row, after which programs are varied.
PATIENCE = 32

#: Bytes that say how a program varies.
CONTROL = 20


@dataclass
class Pool:
    """Choices of programs that reached something new, and what is needed to vary them."""

    kept: list[bytes] = field(default_factory=list)
    last: bytes = b""
    fruitless: int = 0

    def choices(self, control: bytes, fresh: bytes) -> bytes:
        """The choices of the next program: the fresh ones, or a variation."""
        self.fruitless += 1
        vary = bool(self.kept) and self.fruitless > PATIENCE and control[0] < 128
        self.last = self.varied(control, fresh) if vary else fresh
        return self.last

    def varied(self, control: bytes, fresh: bytes) -> bytes:
        last = len(self.kept) - 1
        choices = bytearray(self.kept[last - int(last * (control[1] / 255) ** 2)])  # mostly a late one
        size = len(choices)
        start = int.from_bytes(control[5:7], "big") % size
        if control[2] % 4 == 0:
            other = self.kept[int.from_bytes(control[3:5], "big") % len(self.kept)]
            end = start + 1 + int.from_bytes(control[7:9], "big") % (size - start)
            choices[start:end] = other[start:end]
        elif control[2] % 4 == 1:
            end = min(size, start + 1 + control[7] % 16)
            choices[start:end] = fresh[start:end]
        for step in range(1 + control[9] % 4):
            place = int.from_bytes(control[10 + 2 * step : 12 + 2 * step], "big") % size
            choices[place] = fresh[place]
        return bytes(choices)


def strategy_of(name: str, way: str, pool: Pool) -> st.SearchStrategy[Program]:
    """Draw programs for two ranks in one of the ways."""
    if way == "varied":
        decoder, meshes = DECODERS[name], all_meshes(2)
        drawn = st.tuples(st.binary(min_size=CONTROL, max_size=CONTROL), _bytes(decoder.width + 1))

        def decode(both: tuple[bytes, bytes]) -> Program:
            choices = pool.choices(*both)
            return decoder.decode(meshes[choices[0] % len(meshes)], choices[1:])

        return drawn.map(decode)
    plain = STRATEGIES[name](world_size=2)
    if way == "rare":
        seen: Counter[str] = Counter()

        def choose(both: tuple[Program, Program]) -> Program:
            chosen = min(both, key=lambda one: min((seen[label] for label in one.labels), default=math.inf))
            seen.update(chosen.labels)
            return chosen

        return st.tuples(plain, plain).map(choose)
    return plain


def _bytes(width: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=width, max_size=width)


def reached(target: str, strategy: str, way: str, seed: int, bound: int) -> dict[str, int]:
    """What is reached, and with which program for the first time."""
    loaded = load_pass(target)
    found: dict[str, int] = {}
    pool = Pool()
    phases = (Phase.generate, Phase.target) if way == "target" else SETTINGS.phases
    with closing(Recorder(scope_of([loaded.subject], []))) as recorder:
        number = 0

        @hypothesis.seed(seed)
        @settings(SETTINGS, max_examples=bound, phases=phases)
        @given(strategy_of(strategy, way, pool))
        def judge(program: Program) -> None:
            nonlocal number
            number += 1
            pair = InProcess(loaded).apply(program)
            fired = [name for name, times in pair.rewrites.items() if times] or ["changed"] * pair.changed
            reasons = [f"{point.file}:{point.line} {point.outcome}" for point in recorder.taken()]
            new = [one for one in (*reasons, *reasons_of(fired, program.labels)) if one not in found]
            found.update(dict.fromkeys(new, number))
            if new:
                pool.kept.append(pool.last)
                pool.fruitless = 0
            if way == "target":
                hypothesis.target(float(sum(pair.rewrites.values())))

        judge()
    return {reason: at for reason, at in found.items() if at <= bound}


def tell(name: str, sides: dict[str, list[dict[str, int]]], bound: int) -> None:
    """Print what came of one pass."""
    known = sorted({one for side in sides.values() for seed in side for one in seed if ".py:" in one})
    marks = [bound >> shift for shift in range(4, -1, -1)]
    print(f"{name}: {len(known)} lines and outcomes")
    for way, side in sides.items():
        counts = [
            sum(seed.get(point, bound + 1) <= mark for seed in side for point in known) / len(side) for mark in marks
        ]
        until = [seed.get(point, bound) for seed in side for point in known]
        missed = sum(point not in seed for seed in side for point in known) / len(side)
        cells = "  ".join(f"{count:7.1f} at {mark}" for count, mark in zip(counts, marks, strict=True))
        late = statistics.quantiles(until, n=10)[-1]
        print(f"  {way:<8}{cells}   mean {statistics.mean(until):5.1f}, 90 % within {late:4.0f}, missed {missed:.1f}")


def cost(target: str, strategy: str, bound: int) -> None:
    """Print the CPU time that the pass's process takes for the same programs, with and without recording."""
    programs: list[Program] = []

    @hypothesis.seed(0)
    @settings(SETTINGS, max_examples=bound)
    @given(STRATEGIES[strategy](world_size=2))
    def draw(program: Program) -> None:
        programs.append(program)

    draw()
    spent: dict[str, list[float]] = {"without": [], "recording": []}
    for _ in range(3):
        for label, covered in (("without", None), ("recording", ())):
            with closing(Guarded(target, covered=covered)) as subject:
                spent[label].append(cpu(subject, lambda subject=subject: [subject.apply(one) for one in programs]))  # type: ignore[misc]
    least = {label: min(times) for label, times in spent.items()}
    more = 100 * (least["recording"] / least["without"] - 1)
    told = ", ".join(f"{label} {1e3 * seconds / bound:.2f} ms" for label, seconds in least.items())
    print(f"  CPU of the pass's process per program, the least of 3: {told} ({more:+.1f} %)")


def cpu(subject: Guarded, work: Callable[[], object]) -> float:
    """CPU seconds of a pass's process, by the clock that Linux keeps for each process."""

    def now() -> Sequence[float]:
        return [time.clock_gettime((~pid << 3) | 2) for pid in subject.pids]

    before = sum(now())
    work()
    return sum(now()) - before


@click.command()
@click.argument("passes", nargs=-1, metavar="[PASS=STRATEGY]...")
@click.option("--programs", default=300, show_default=True, help="Programs per seed.")
@click.option("--seeds", default=3, show_default=True, help="Seeds.")
@click.option("--ways", default=",".join(WAYS), show_default=True, help="What is compared; none: the cost alone.")
def main(passes: tuple[str, ...], programs: int, seeds: int, ways: str) -> None:
    torch.set_num_threads(1)
    for entry in passes or PASSES:
        target, _, strategy = entry.rpartition("=")
        sides = {
            way: [reached(target, strategy, way, seed, programs) for seed in range(seeds)]
            for way in WAYS
            if way in ways
        }
        if sides:
            tell(entry, sides, programs)
        cost(target, strategy, programs)


if __name__ == "__main__":
    main()
