"""What torch.compile's generated code computes on a GPU: campaigns on drawn programs, in the programs' own dtypes.

    python benchmarks/gpu_compile.py [--seconds N] [--out DIR] [--programs N] [--first N] [--rehearse]
    python benchmarks/gpu_compile.py --replay FILE [--rehearse]

A program is drawn for a subject that acts inside of torch.compile (`torch:compile`, Inductor's overlap and bucketing passes),
with its options. Inductor compiles the graph of every rank for the device; ranks run as threads, and lockstep carries out what
they communicate, early and late. The original runs so too, without a compiler; both are judged by the thresholds of the native
domain against the original in float64. Worker processes share the programs: one that dies is a finding about its program.
The first programs are compiled with planted defects, which have to be found. With --rehearse all of it runs on the CPU, where
the loops behind Inductor's kernels run instead of Triton. A finding becomes a file under --out, which --replay tries again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
import torch
from compiled_programs import (
    PLANTS,
    TRITON_CACHE,
    Outcome,
    Seen,
    drawn,
    examine,
    place_finding,
    short,
    triton_cache,
)
from torch import fx

from tcverify.ops import define_ops
from tcverify.program import dumps, loads
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.compiling import compile_graph, inductor
from tcverify.pytorch.effects import define_shapes

#: When this process started, on the clock of `time.monotonic`: importing torch takes seconds.
STARTED = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")

#: Seconds that one program may take.
PATIENCE = 60.0

#: Programs with each planted defect, of which one has to be found.
PLANTED_EACH = 4


# --------------------------------------------------------------------------------------------------------------- workers


def work(pipe: Connection, kind: str) -> None:
    """Examine the programs whose numbers come, until None comes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    define_ops()
    define_shapes()
    device = torch.device(kind)
    problem = probe(device)
    pipe.send((problem, torch.cuda.get_device_name() if kind == "cuda" and not problem else kind))
    while (task := pipe.recv()) is not None:
        number, plant = task
        try:
            one, program = drawn(number, plant)
            sound = plant in (None, "crash") or examine(number, one, program, device).status == "passed"
            outcome = examine(number, one, program, device, plant)
            if not sound:  # whatever is found says nothing about the planted defect
                outcome.seen.planted = 0
            if outcome.status == "refuted" and plant is None:
                place_finding(outcome, one, program, device)
        except Exception:  # noqa: BLE001 - the parent shows it
            outcome = Outcome(number, "?", "inconclusive", "this script fails", traceback.format_exc(), plant=plant)
        pipe.send(asdict(outcome))


def probe(device: torch.device) -> str:
    """Why nothing can be compiled here; empty if it can."""
    try:
        graph = fx.Graph()
        graph.output((graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), 1)),))
        module = fx.GraphModule(torch.nn.Module(), graph)
        given = torch.ones(1000, device=device)
        with inductor({}), triton_cache():
            (made,) = compile_graph(module, [given])(given)
            return "" if bool((made == 2).all()) else "compiled code adds 1 to 1 and gets no 2"
    except Exception as error:  # noqa: BLE001 - whatever Triton lacks
        traceback.print_exc()
        return f"{type(error).__name__}: {short(str(error))}"


@dataclass
class Worker:
    """A process, and the program that it has."""

    process: Any
    pipe: Connection
    task: tuple[int, str | None] | None = None
    since: float = 0.0
    ready: bool = False


def start(kind: str) -> Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, kind), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, mine, since=time.monotonic())


class Campaign:
    """Gives programs to workers, and collects what becomes of them."""

    def __init__(self, kind: str, workers: int, numbers: range, stop: float) -> None:
        self.kind, self.stop = kind, stop
        self.outcomes: list[Outcome] = []
        self.problem = self.device = ""
        self._tasks = self._numbers(numbers)
        self._wanted = workers
        self._workers: list[Worker] = []

    @staticmethod
    def _numbers(numbers: range) -> Iterator[tuple[int, str | None]]:
        for number in range(PLANTED_EACH):
            for plant in PLANTS:
                if number == 0 or plant != "crash":  # each costs a process
                    yield number, plant
        for number in numbers:
            yield number, None

    def run(self) -> None:
        """Work until time is over, or nothing can be compiled here."""
        self._workers = [start(self.kind) for _ in range(self._wanted)]
        try:
            while time.monotonic() < self.stop and not self.problem and self._workers:
                ready = wait([one.pipe for one in self._workers], timeout=0.5)
                for one in list(self._workers):
                    if one.pipe in ready:
                        self._hear(one)
                    elif one.task is not None and time.monotonic() - one.since > PATIENCE:
                        self._lost(one, f"does not end within {PATIENCE:.0f} s")
        finally:
            for one in self._workers:
                one.process.kill()
                one.process.join()

    def _hear(self, one: Worker) -> None:
        try:
            said = one.pipe.recv()
        except (EOFError, ConnectionResetError):
            one.process.join()
            self._lost(one, f"ends its process with code {one.process.exitcode}")
            return
        if not one.ready:
            one.ready = True
            self.problem, self.device = said
        else:
            outcome = Outcome(**{**said, "seen": Seen(**said["seen"])})
            self.outcomes.append(outcome)
            one.task = None
            print(f"{outcome.number} {outcome.subject} {outcome.plant or ''} {outcome.status} {outcome.seconds:.1f} s "
                  f"{outcome.cause}\n{outcome.detail[-2000:]}", file=sys.stderr, flush=True)  # fmt: skip
            if "CUDA error" in outcome.cause:  # the process cannot use the device any more
                self._replace(one)
                return
        one.task, one.since = next(self._tasks, None), time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has died, which is heard next
            one.pipe.send(one.task)
        if one.task is None:  # there are no more
            one.process.join()
            self._workers.remove(one)

    def _lost(self, one: Worker, why: str) -> None:
        if one.task is None:
            self.problem = self.problem or f"a worker {why} before its first program"
            self._workers.remove(one)
            return
        number, plant = one.task
        subject, program = drawn(number, plant)
        self.outcomes.append(
            Outcome(
                number, subject.name, "refuted", f"the program {why}", ranks=program.world_size, plant=plant,
                seen=Seen(planted=int(plant is not None)),
            )
        )  # fmt: skip
        self._replace(one)

    def _replace(self, one: Worker) -> None:
        one.process.kill()
        one.process.join()
        self._workers[self._workers.index(one)] = start(self.kind)


# ---------------------------------------------------------------------------------------------------------------- report


def keep(outcome: Outcome, out: Path) -> Path:
    """Write a finding as a file that can be replayed."""
    program = outcome.program or dumps(drawn(outcome.number, outcome.plant)[1])
    path = out / f"compile-{outcome.number}-{outcome.subject}.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**asdict(outcome), "program": json.loads(program)}, indent=1))
    return path


def report(outcomes: list[Outcome], seconds: float, out: Path | None, rehearsed: bool) -> bool:
    """Print what came of a campaign. Returns whether all is as it has to be."""
    plants = [one for one in outcomes if one.plant is not None]
    sound = [one for one in outcomes if one.plant is None]
    findings: dict[str, list[Outcome]] = defaultdict(list)
    for one in sound:
        if one.status == "refuted":
            findings[one.cause].append(one)
    new = [one for several in findings.values() for one in several if not (one.known and one.on_cpu)]
    tested = [one for one in sound if one.status != "inconclusive" and one.seen.kernels]
    rows = {
        "programs": len(sound),
        "of these judged, with generated kernels": len(tested),
        "compiled ranks": sum(one.seen.ranks for one in sound),
        "loop kernels run" if rehearsed else "Triton kernels": sum(one.seen.kernels for one in sound),
        "programs with collectives": sum(bool(one.collectives) for one in sound),
        "programs in which an overlap pass was called": sum(bool(one.seen.called) for one in sound),
        "programs in which it changed something": sum(bool(one.seen.acted) for one in sound),
        "programs per second": f"{len(sound) / seconds:.2f}",
        "programs with findings": sum(map(len, findings.values())),
        "of these not known, or on the device alone": len(new),
        "inconclusive": sum(one.status == "inconclusive" for one in sound),
    }
    print("| | |\n|---|---:|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    _table("subject", Counter(one.subject for one in sound))
    _table("inconclusive because", Counter(one.cause for one in sound if one.status == "inconclusive"))
    print("\n| planted defect | programs | took effect | found |\n|---|---:|---:|---:|")
    missed = []
    for plant in PLANTS:
        mine = [one for one in plants if one.plant == plant]
        acted = [one for one in mine if one.seen.planted]
        found = sum(one.status == "refuted" for one in acted)
        print(f"| {plant} | {len(mine)} | {len(acted)} | {found} |")
        missed += [plant] if not found else []
    for cause, several in sorted(findings.items(), key=lambda item: -len(item[1])):
        smallest = min(several, key=lambda one: (one not in new, one.ranks, one.collectives))
        where = f", kept as `{keep(smallest, out).name}`" if out is not None else ""
        device = sum(not one.on_cpu for one in several)
        known = Counter(f"like {one.known}" if one.known else "like no known defect" for one in several)
        print(f"\n**{len(several)} ×** {cause}\n")
        print(f"{device} of them on the device alone; {', '.join(f'{n} × {name}' for name, n in known.items())}")
        print(f"\nprogram {smallest.number}, torch:{smallest.subject}{where}\n")
        print("```\n" + smallest.detail.strip()[-1500:] + "\n```")
    if missed:
        print(f"\nPlanted defects that were not found: {', '.join(missed)}.")
    if not tested:
        print("\nNothing was tested: no program was judged that has a generated kernel.")
    return not missed and not new and bool(tested)


def _table(title: str, counts: Mapping[str, int]) -> None:
    if counts:
        print(f"\n| {title} | programs |\n|---|---:|")
        for name, count in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"| {name.replace('|', '/')} | {count} |")


def again(path: Path, device: torch.device) -> int:
    """Examine the program of a file again."""
    warnings.simplefilter("ignore")
    define_ops()
    define_shapes()
    record = json.loads(path.read_text())
    program = loads(json.dumps(record["program"]))
    outcome = examine(record["number"], SUBJECTS[record["subject"]], program, device, record["plant"])
    print(f"{outcome.status}: {outcome.cause}\n{outcome.detail}")
    return int(outcome.status == "refuted")


@click.command()
@click.option("--seconds", type=float, default=100.0, show_default=True, help="Bound of the whole, from the start.")
@click.option("--out", type=click.Path(path_type=Path), help="Where findings are kept.")
@click.option(
    "--workers", type=click.IntRange(1), default=max(1, min(10, (os.cpu_count() or 1) - 2)), show_default=True
)
@click.option("--programs", type=click.IntRange(1), default=1_000_000, help="At most.  [default: as time permits]")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first program.")
@click.option("--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A finding to try again.")
@click.option("--rehearse", is_flag=True, help="On the CPU, without Triton.")
def main(
    seconds: float, out: Path | None, workers: int, programs: int, first: int, replay: Path | None, rehearse: bool
) -> None:
    if not rehearse and not torch.cuda.is_available():
        print("there is no CUDA device; --rehearse runs on the CPU", file=sys.stderr)
        sys.exit(2)
    kind = "cpu" if rehearse else "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update({TRITON_CACHE: f"{scratch}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"})
        os.environ["TMPDIR"] = scratch
        if replay is not None:
            sys.exit(again(replay, torch.device(kind)))
        campaign = Campaign(kind, workers, range(first, first + programs), STARTED + seconds - min(8.0, seconds / 10))
        campaign.run()
    if campaign.problem and not campaign.outcomes:
        print(f"nothing can be compiled here: {campaign.problem}", file=sys.stderr)
        sys.exit(2)
    print(f"## torch.compile with {'loops on the CPU, a rehearsal' if rehearse else 'Triton'}\n")
    print("Drawn programs, compiled for every rank by Inductor and run; the original in float64 is the reference.")
    print(f"torch {torch.__version__}, {campaign.device}, {workers} processes.\n")
    right = report(campaign.outcomes, time.monotonic() - STARTED, out, rehearse)
    if campaign.problem:
        print(f"\nThe campaign ended early: {campaign.problem}")
    sys.exit(0 if right and not campaign.problem else 1)


if __name__ == "__main__":
    main()
