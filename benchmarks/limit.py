"""How far from the limit: process groups against their bare collectives, lockstep against torch's simulations of ranks.

    python benchmarks/limit.py [--programs N] [--rounds N] [--world-size N] [--markdown]

Draws programs, applies the pass, and runs each pair (original and rewritten program):

- on a pool of rank processes, all pairs in flight, and in a campaign that confirms on this pool; against a loop over the same
  pairs' collectives alone, on tensors that are ready, in processes that have joined a process group as those of the pool have:
  with the same scheduling class, on the same core (pinned) or on any (unpinned). Nothing that runs these programs for real can
  be faster than that loop.
- in lockstep; against torch's LocalTensorMode and its threaded process group, where this torch has them, driven by our
  interpreter, on those of the pairs that they can run. What they compute must be what lockstep does.

The sides take turns, round by round, so that what else the machine does hits all of them. The first round warms up and does not
count. CPU time is that of the processes that run the programs: the ranks, or this process.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from bare import Bare
from throughput import PASS, campaign, cpu_seconds, pairs, run_on_group

from tcverify.application import Guarded
from tcverify.domains import FLOAT64
from tcverify.execution import Lockstep, ProcessGroupPool, RankResult
from tcverify.execution.interpreter import fill_arguments, rank_inputs
from tcverify.execution.plan import known_constant, plans_of, rank_constants
from tcverify.execution.process_group.processes import choose_core
from tcverify.ops import distributed
from tcverify.ops.distributed import perform
from tcverify.program import Program
from tcverify.program.graph import RankConstant, Slot

Pairs = Sequence[tuple[Program, Program]]


@dataclass
class Side:
    """One way to run the pairs, and what its rounds took."""

    name: str
    work: Callable[[], int]
    cpu: Callable[[], float]
    programs: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    note: str = ""

    def round(self, counts: bool) -> None:
        before, start = self.cpu(), time.perf_counter()
        done = self.work()
        if counts:
            self.programs += done
            self.seconds += time.perf_counter() - start
            self.spent += self.cpu() - before

    @property
    def each(self) -> tuple[float, float]:
        """Milliseconds per pair: on the clock, and of CPU time."""
        return 1e3 * self.seconds / max(1, self.programs), 1e3 * self.spent / max(1, self.programs)


@dataclass
class Table:
    title: str
    sides: list[Side] = field(default_factory=list)

    def run(self, rounds: int) -> None:
        for number in range(rounds + 1):
            for side in self.sides if number % 2 else reversed(self.sides):
                side.round(number > 0)

    def lines(self, markdown: bool) -> Iterator[str]:
        """The rows; shares are of the first side, which is the limit."""
        clock, cpu = self.sides[0].each
        if markdown:
            yield f"**{self.title}**"
            yield ""
            yield "| | pairs | ms per pair | ms of CPU time per pair | share of the first row, clock | CPU |"
            yield "|---|--:|--:|--:|--:|--:|"
        else:
            yield self.title
        for side in self.sides:
            mine, spent = side.each
            shares = f"{clock / mine:.0%}", f"{cpu / spent:.0%}"
            if markdown:
                name = side.name + (f" ({side.note})" if side.note else "")
                yield f"| {name} | {side.programs} | {mine:.2f} | {spent:.2f} | {shares[0]} | {shares[1]} |"
            else:
                row = f"  {side.name:<46}{side.programs:6} pairs {mine:9.2f} ms {spent:9.2f} ms CPU"
                yield f"{row}   {shares[0]:>5} on the clock, {shares[1]:>5} of CPU   {side.note}".rstrip()
        yield ""


# --------------------------------------------------------------------------------------------------- process groups


def against_collectives(subject: Guarded, size: int, drawn: Pairs, pinned: bool, rounds: int) -> Table:
    """Pairs in flight and a campaign, against the bare collectives."""
    core = choose_core(None) if pinned else None
    bare = Bare(drawn, size, core)
    with ProcessGroupPool(size) as pool:
        pool._core = core
        pool.start()

        def flying() -> int:
            for ticket in [pool.submit(original, rewritten) for original, rewritten in drawn]:
                if any(delta.problem for delta in pool.result(ticket).deltas):
                    raise RuntimeError("the versions differ")
            return len(drawn)

        def one_by_one() -> int:
            for original, rewritten in drawn:
                pool.compare(original, rewritten)
            return len(drawn)

        def ranks(pids: Sequence[int]) -> float:
            return cpu_seconds(pids) - time.process_time()

        where = "all ranks on one core" if pinned else "ranks on any core"
        table = Table(f"{size} ranks, gloo, {where}; {bare.collectives:.1f} collectives per pair")
        table.sides = [
            Side("the bare collectives", bare.run, lambda: ranks(bare.pids)),
            Side("pairs, all in flight", flying, lambda: ranks(pool.pids)),
            Side("pairs, one at a time", one_by_one, lambda: ranks(pool.pids)),
            Side(
                "campaign: drawing, pass, checks, both executors",
                lambda: campaign(subject, size, pool, len(drawn)).statistics.programs,
                lambda: cpu_seconds([*subject.pids, *pool.pids]),
            ),
        ]
        table.run(rounds)
    bare.close()
    return table


# ------------------------------------------------------------------------------------------ torch's simulated ranks


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """A process group that represents one of this many ranks and communicates with no other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        distributed._GROUPS.clear()
        dist.destroy_process_group()


def run_local_tensors(program: Program, mode: Any, make: Callable[[dict[int, Any]], Any]) -> list[list[Any]]:
    """Run a program that all ranks share in LocalTensorMode: every op once, on all ranks' tensors. Returns outputs by rank."""
    (plan,) = plans_of(program)
    size = program.world_size
    constants = [rank_constants(program.mesh, rank, program.ranks[rank].constants) for rank in range(size)]
    columns = [rank_inputs(plan, rank, program.sources) for rank in range(size)]
    values: list[Any] = [
        make(dict(enumerate(FLOAT64.carry(v).clone() for v in row))) for row in zip(*columns, strict=True)
    ]

    def fill(leaf: Any, rank: int) -> Any:
        if isinstance(leaf, Slot):
            return values[leaf.index]
        return known_constant(leaf, constants[rank]) if isinstance(leaf, RankConstant) else leaf

    for step in plan.steps:
        args, kwargs = fill_arguments(step, values, lambda leaf: fill(leaf, 0))
        if step.op.collective:
            steps, answer = step.run(0, *args, **kwargs), None
            while True:
                try:
                    request = steps.send(answer)
                except StopIteration as stop:
                    value = stop.value
                    break
                answer = perform(request.collective, request.tensor)
        elif step.nested and _differs(step, constants):
            value = make({r: _on_rank(step, values, fill, r) for r in range(size)})
        else:
            value = step.run(*args, **kwargs)
        if step.carry and isinstance(value, torch.Tensor):
            value = FLOAT64.constant(value) if step.constant else FLOAT64.carry(value)
        values.append(value)
        for slot in step.dead:
            values[slot] = None
    outputs = [fill(leaf, 0) for leaf in _leaves(plan.result)]
    return [[value._local_tensors[rank] for value in outputs] for rank in range(size)]


def _differs(step: Any, constants: list[dict[str, Any]]) -> bool:
    """Whether ranks give a step other constants."""
    names = [leaf.name for leaf in _leaves([step.args, step.kwargs]) if isinstance(leaf, RankConstant)]
    return any(constants[0].get(name) != other.get(name) for name in names for other in constants)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []

    def look(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    torch.fx.node.map_aggregate(value, look)
    return found


def _on_rank(step: Any, values: list[Any], fill: Callable[[Any, int], Any], rank: int) -> Any:
    def own(leaf: Any) -> Any:
        value = fill(leaf, rank)
        return value._local_tensors[rank] if hasattr(value, "_local_tensors") else value

    args, kwargs = fill_arguments(step, values, own)
    return step.run(*args, **kwargs)


class _PerThread(dict[Any, Any]):
    """Groups by thread: each thread is a rank."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((threading.get_ident(), key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((threading.get_ident(), key), value)


def run_on_threads(programs: Sequence[Program]) -> list[list[RankResult]]:
    """Run programs on torch's threaded process group: one thread per rank, which lives for all of them."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    size = programs[0].world_size
    results: list[list[RankResult]] = [[] for _ in range(size)]
    errors: list[BaseException] = []
    plans = [plans_of(program) for program in programs]
    groups, distributed._GROUPS = distributed._GROUPS, _PerThread()
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            for program, plan in zip(programs, plans, strict=True):
                results[rank].append(run_on_group(program, plan, rank))
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    try:
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        threaded._uninstall_threaded_pg()
        distributed._GROUPS = groups
    if errors:
        raise errors[0]
    return results


def _agree(program: Program, outputs: list[list[Any]]) -> bool:
    """Whether all ranks computed what they do in lockstep, up to the order of sums."""
    run = Lockstep().run(program)
    return all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
        for result, mine in zip(run.ranks, outputs, strict=True)
        for a, b in zip(result.outputs, mine, strict=True)
        if isinstance(a, torch.Tensor)
    )


def against_torch(size: int, drawn: Pairs, rounds: int) -> Table:
    """Lockstep against LocalTensorMode and the threaded process group, without comparing the versions."""
    try:
        from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    except ImportError:
        LocalTensorMode = None  # type: ignore[assignment, misc]
    local: list[Program] = []
    shared = [program for pair in drawn for program in pair if len(program.graphs) == 1]
    if LocalTensorMode is not None:
        with fake_group(size), LocalTensorMode(size) as mode, torch.no_grad():
            for program in shared:
                try:
                    outputs = run_local_tensors(program, mode, LocalTensor)
                except Exception:  # noqa: BLE001 - private API, and views or ops that it does not take
                    continue
                with mode.disable():
                    agrees = _agree(program, outputs)
                if agrees:
                    local.append(program)
    threads = shared
    for program, results in zip(threads, zip(*run_on_threads(threads), strict=True), strict=True):
        if not _agree(program, [result.outputs for result in results]):
            raise RuntimeError("the threaded process group computes something else")

    def lockstep(programs: list[Program]) -> Callable[[], int]:
        def work() -> int:
            for program in programs:
                Lockstep().run(program)
            return len(programs)

        return work

    def local_tensors() -> int:
        with fake_group(size), LocalTensorMode(size) as mode, torch.no_grad():
            for program in local:
                run_local_tensors(program, mode, LocalTensor)
        return len(local)

    table = Table(f"{size} ranks in one process; single programs")
    cpu = time.process_time
    table.sides = [
        Side("lockstep", lockstep(threads), cpu),
        Side("threaded process group", lambda: len(run_on_threads(threads)[0]), cpu),
    ]
    if local:
        note = f"{len(local)} of {len(shared)} programs"
        table.sides.insert(1, Side("lockstep, on the programs of the next row", lockstep(local), cpu))
        table.sides.insert(2, Side("LocalTensorMode", local_tensors, cpu, note=note))
    table.run(rounds)
    return table


@click.command()
@click.option("--programs", type=click.IntRange(5), default=60, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True)
@click.option("--world-size", type=click.IntRange(2), multiple=True, default=(2, 4), show_default=True)
@click.option("--markdown", is_flag=True, help="Print tables for docs/performance.md.")
def main(programs: int, rounds: int, world_size: tuple[int, ...], markdown: bool) -> None:
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}\n")
    with Guarded(PASS) as subject:
        for size in world_size:
            drawn = [pair for pair in pairs(subject, size, programs) if pair[0] is not pair[1]]
            tables = [
                partial(against_collectives, subject, size, drawn, True, rounds),
                partial(against_collectives, subject, size, drawn, False, rounds),
                partial(against_torch, size, drawn, rounds),
            ]
            for table in tables:
                print("\n".join(table().lines(markdown)), flush=True)


if __name__ == "__main__":
    main()
