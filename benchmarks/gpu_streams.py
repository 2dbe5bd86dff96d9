"""Schedules on real CUDA streams against the static check and the simulation: python benchmarks/gpu_streams.py --seconds 60

Defects put into multistream scheduling, and the gallery's exhibits of streams. For each defect the smallest of some drawn
programs on which the static check reports it. Static: what happens-before reports. Simulated: whether an order of the simulated
streams gives a wrong value. Device: in how many of up to 20 adversarial orders a value is wrong on CUDA streams (see
`tcverify.execution.streams.cuda_streams`). Sound: the schedule of the pass without the defect, whose outputs must be bit-equal
in all orders. Ends with 1 on a disagreement.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify import verify
from tcverify.cases.counterexample import read_counterexample
from tcverify.errors import TcverifyError
from tcverify.execution import RankResult, StreamOrder, explore
from tcverify.execution.plan import plans_of
from tcverify.execution.streams.cuda_streams import CudaDevice, Device, compare_orders, run_orders
from tcverify.execution.streams.issue import IssuedRank, is_lowered, issue
from tcverify.execution.streams.simulated import QueuedDevice
from tcverify.passes import Multistream
from tcverify.program import Contract, Mesh, Program
from tcverify.program.codec import dumps, loads
from tcverify.strategies import DECODERS

STARTED = time.monotonic()

#: Orders per program.
ORDERS = 20
#: Programs that are drawn for one defect, and ops that all ranks of one may have together.
DRAWN, LARGEST = 60, 120
#: What the static check says of orders, and of nothing else.
OF_ORDER = ("race", "unordered-collectives")


@dataclass(frozen=True)
class Case:
    """A rewritten program.

    Attributes:
        kinds: of the findings of the static check.
        simulated: whether some order of the simulated streams gives a wrong value.
        orders: up to `ORDERS`, those first in which the simulation goes wrong.
    """

    name: str
    program: str
    contract: Contract
    kinds: tuple[str, ...]
    simulated: bool
    orders: tuple[StreamOrder, ...]
    ops: int


def simulated_case(name: str, program: Program, contract: Contract, kinds: Sequence[str]) -> Case | None:
    """Choose the orders of a program; None where it is not lowered or too large."""
    if not any(map(is_lowered, plans_of(program))):
        return None
    issued, _ = issue(program, contract.boundary, contract.inputs)
    ops = sum(len(one.ops) for one in issued)
    if not issued or ops > LARGEST:
        return None
    orders = candidates(issued)
    found = explore(program, boundary=contract.boundary, inputs=contract.inputs, orders=orders)
    if found is None:
        return None
    by_name = {str(order): order for order in orders}
    wrong = [o.order for o in found.observations if o.kind == "output"]
    chosen = list(dict.fromkeys([*wrong, *found.failing]))[: ORDERS - 4]
    others = [name for name in by_name if name not in chosen]
    random.Random(0).shuffle(others)
    chosen += [name for name in by_name if name.startswith("starve") and name not in chosen]
    chosen += [name for name in others if name not in chosen]
    picked = tuple(by_name[name] for name in chosen[:ORDERS])
    return Case(name, dumps(program), contract, tuple(kinds), bool(wrong), picked, ops)


def candidates(issued: Sequence[IssuedRank]) -> list[StreamOrder]:
    """Every op as early as it can go, every stream starved and rushed, and random orders."""
    streams = sorted({op.stream for one in issued for op in one.ops})
    found = [StreamOrder("early", rank=one.rank, op=number) for one in issued for number in range(len(one.ops))]
    found += [StreamOrder(kind, stream=stream) for kind in ("starve", "rush") for stream in streams]
    return found + [StreamOrder("random", seed) for seed in range(8)]


def defective(name: str, drawn: int) -> list[Case]:
    """The smallest case of a defect, and that of the sound pass on the same program."""
    from tests.mutants.multistream import MUTANTS

    torch.set_num_threads(1)
    decoders = [DECODERS["overlap"], DECODERS["mixed"]]
    smallest: tuple[int, Program, Program, tuple[str, ...]] | None = None
    for seed in range(drawn):
        generator = random.Random(seed)
        decoder = decoders[seed % 2]
        program = decoder.decode(Mesh.grid({"tp": 2}), generator.randbytes(decoder.width))
        verdict = verify(MUTANTS[name](), program, checks=["happens-before"])
        kinds = tuple(f.kind for f in verdict.findings if f.check == "happens-before")
        rewritten = verdict.pair.rewritten
        if not set(kinds) & set(OF_ORDER) or rewritten is None:
            continue
        if smallest is None or rewritten.size < smallest[0]:
            smallest = rewritten.size, program, rewritten, kinds
    if smallest is None:
        return []
    _, program, rewritten, kinds = smallest
    sound = verify(Multistream(), program, checks=["happens-before"])
    cases = [simulated_case(name, rewritten, Contract(), kinds)]
    if sound.status == "passed" and sound.pair.rewritten is not None:
        cases.append(simulated_case(f"sound, as {name}", sound.pair.rewritten, Contract(), ()))
    return [case for case in cases if case is not None]


def exhibited(folder: str) -> list[Case]:
    """The case of an exhibit of the gallery, if it is about streams."""
    torch.set_num_threads(1)
    case = read_counterexample(Path(folder) / "counterexample.json")
    if case.rewritten is None or case.finding.kind not in OF_ORDER or case.finding.check != "happens-before":
        return []
    found = simulated_case(f"exhibit {Path(folder).name}", case.rewritten, case.contract, [case.finding.kind])
    return [] if found is None else [found]


def prepared(drawn: int, workers: int) -> list[Case]:
    """All cases, made by several processes."""
    from tests.mutants.exhibits import GALLERY
    from tests.mutants.multistream import EXPECTED

    names = [name for name, kinds in EXPECTED.items() if set(kinds) & set(OF_ORDER)]
    folders = sorted(str(path.parent) for path in GALLERY.glob("*/counterexample.json"))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(defective, name, drawn) for name in names]
        made += [pool.submit(exhibited, folder) for folder in folders]
        return [case for one in made for case in one.result()]


@dataclass
class Seen:
    """What a device shows of a case: wrong outputs, bits that differ, in how many orders of how many."""

    wrong: int = 0
    differing: int = 0
    orders: int = 0
    seconds: float = 0.0
    error: str = ""


def on_device(case: Case, device: Device) -> Seen:
    """Run a case in its orders."""
    begun = time.monotonic()
    seen = Seen(orders=len(case.orders))
    try:
        program = loads(case.program)
        issued, run = issue(program, case.contract.boundary, case.contract.inputs)
        results = run_orders(issued, device, case.orders)
    except (TcverifyError, RuntimeError) as error:
        seen.error = str(error).splitlines()[0]
        return seen
    alone, _, *others = results
    for found in others:
        seen.wrong += any(compare_orders(run, [alone, found], []))
        seen.differing += not all(map(same_bits, alone, found))
    seen.seconds = time.monotonic() - begun
    return seen


def same_bits(one: RankResult, other: RankResult) -> bool:
    first, second = (list(map(bits, (*result.outputs, *result.inputs))) for result in (one, other))
    return first == second


def bits(value: Any) -> Any:
    """Its bits as numbers, of a tensor: NaN is equal to itself, and 0 is not to −0."""
    return value.contiguous().reshape(-1).view(torch.uint8).tolist() if isinstance(value, torch.Tensor) else value


#: Why a device does not show what the simulation shows of collectives.
MET_AS_ISSUED = "not comparable: on the device, collectives meet as issued"


def judged(case: Case, seen: Seen) -> str:
    """In what static check, simulation and device disagree; "" if they agree."""
    if seen.error:
        return seen.error
    if not case.kinds:
        return f"bits differ in {seen.differing} orders" if seen.differing else ""
    if case.simulated and not seen.wrong:
        return "no order shows it on the device" if "race" in case.kinds else MET_AS_ISSUED
    if seen.wrong and not case.simulated:
        return "the simulation shows no wrong value"
    return ""


def rows(cases: Sequence[Case], device: Device, seconds: float) -> Iterator[tuple[Case, Seen]]:
    for case in cases:
        if time.monotonic() - STARTED > seconds:
            print(f"time is over: {case.name} and later cases did not run", file=sys.stderr)
            return
        yield case, on_device(case, device)


@click.command()
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Time limit for all.")
@click.option("--rehearse", is_flag=True, help="Queues of this process in the place of a CUDA device.")
@click.option("--drawn", type=click.IntRange(1), default=DRAWN, show_default=True, help="Programs drawn per defect.")
@click.option(
    "--workers", type=click.IntRange(1), default=max(1, (os.cpu_count() or 2) - 1), help="Processes that draw."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Where programs on which they disagree are written."
)
def main(seconds: float, rehearse: bool, drawn: int, workers: int, out: Path | None) -> None:
    if not rehearse and not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        sys.exit(2)
    cases = prepared(drawn, workers)
    print(f"{len(cases)} cases after {time.monotonic() - STARTED:.0f} s", file=sys.stderr, flush=True)
    device: Device = QueuedDevice() if rehearse else CudaDevice()
    print("## Schedules on streams: static check, simulation, device" + (" (rehearsal: no device)" if rehearse else ""))
    print("\nOrders with a wrong output, of those tried. Sound schedules must give the same bits in all.\n")
    print("| schedule | ops | static | simulated | device | agree |\n|---|--:|---|---|--:|---|")
    bad = tried = 0
    silent = []
    cases = sorted(cases, key=lambda case: (not case.kinds, case.ops))
    halves = [case for case in cases if case.kinds], [case for case in cases if not case.kinds]
    for half, share in zip(halves, (0.75, 1.0), strict=True):
        for case, seen in rows(half, device, seconds * share):
            tried += 1
            problem = judged(case, seen)
            bad += problem not in ("", MET_AS_ISSUED)
            if problem not in ("", MET_AS_ISSUED) and out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"streams-{tried}.json").write_text(case.program)
            if case.kinds and not case.simulated and not seen.wrong:
                silent.append(case.name)
            simulated = "wrong value" if case.simulated else "-"
            found = f"{seen.wrong if case.kinds else seen.differing} of {seen.orders}"
            print(
                f"| {case.name} | {case.ops} | {', '.join(sorted(set(case.kinds))) or 'passed'} | {simulated} | {found}"
                f" | {problem or 'yes'} |",
                flush=True,
            )
            print(f"{case.name}: {seen.seconds:.1f} s", file=sys.stderr, flush=True)
    print(
        f"\n{tried} of {len(cases)} schedules, {bad} disagreements." + (" Time was over." if tried < len(cases) else "")
    )
    if silent:
        print(f"No order gives a wrong value, simulated or on the device: {', '.join(silent)}.")
    sys.exit(1 if bad or not tried else 0)


if __name__ == "__main__":
    main()
