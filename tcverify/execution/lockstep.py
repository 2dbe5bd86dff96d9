"""Lockstep: all ranks in one process. Deterministic, fast, and it knows who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from tcverify.arithmetic import FLOAT64, Domain
from tcverify.arithmetic.float64 import PERTURBATION
from tcverify.errors import UnsupportedOp
from tcverify.execution.compare import compare_native, compare_ranks
from tcverify.execution.executor import Comparison, Hang, Run, Wait
from tcverify.execution.interpreter import Call, NodeError, RankResult, Watch, rank_inputs, run_rank
from tcverify.execution.plan import check_supported, plans_of
from tcverify.ops import Request, complete, mismatch
from tcverify.program import Program

RankGenerator = Generator[tuple[str, Request], torch.Tensor, RankResult]


class Lockstep:
    """Drives the ranks' generators and matches their requests. Collectives block until all members have joined."""

    name = "lockstep"

    def run(self, program: Program, *, observe: bool = False, domain: Domain = FLOAT64) -> Run:
        """Run a program. See `Executor.run`."""
        return _execute(program, observe, None, domain=domain)

    def compare(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Comparison:
        """Run and compare both versions. See `Executor.compare`."""
        before = self.run(original, domain=domain)
        after = before if rewritten is original else self.run(rewritten, domain=domain)
        return self.compare_runs(before, after, None if domain.carries else self.run(original))

    def start_comparison(
        self, original: Program, rewritten: Program, domain: Domain = FLOAT64
    ) -> Callable[[], Comparison]:
        """See `Executor.start_comparison`."""
        return lambda: self.compare(original, rewritten, domain)

    def compare_with(self, before: Run, rewritten: Program) -> Comparison:
        """As `compare`, for an original that has already run here."""
        return self.compare_runs(before, self.run(rewritten))

    def compare_runs(self, before: Run, after: Run, reference: Run | None = None) -> Comparison:
        """As `compare`, for versions that have both run here: one and the same run for a program that a pass left alone.

        Args:
            reference: the original in float64, for runs in the native domain.
        """
        comparison = Comparison(self.name, before, after, reference=reference)
        if before.finished and after.finished:
            for rank, (expected, actual) in enumerate(zip(before.ranks, after.ranks, strict=True)):
                if reference is None:
                    comparison.deltas += compare_ranks(expected, actual)
                elif reference.finished:
                    comparison.deltas += compare_native(reference.ranks[rank], expected, actual)
        return comparison

    def probe(self, program: Program, baseline: Run, reruns: int = 3, domain: Domain = FLOAT64) -> dict[str, float]:
        """Measure the conditioning of a program's outputs.

        Reruns it with the output of every node perturbed by a relative 2⁻⁵¹ and sums accumulated in another order.

        Args:
            baseline: an unperturbed run of the same program, in the same domain.

        Returns:
            Per output label (see `Delta.label`), the largest change over ranks and reruns; infinite when the set of
            finite elements or a discrete value changed.
        """
        changes: dict[str, float] = {}
        for seed in range(1, reruns + 1):
            run = _execute(program, False, _Perturbation(seed), domain=domain)
            for expected, actual in zip(baseline.ranks, run.ranks, strict=True):
                for delta in compare_ranks(expected, actual):
                    if delta.alias:
                        continue
                    change = float("inf") if delta.problem or delta.overflow else delta.difference
                    changes[delta.label] = max(changes.get(delta.label, 0.0), change)
        return changes


class _Perturbation:
    """Multiplies results by 1 ± 2⁻⁵¹, and permutes the order of sums; a function of its seed and of call order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return value * (1 + signs * PERTURBATION)

    def order(self, members: int) -> list[int]:
        return torch.randperm(members, generator=self._generator).tolist()


@dataclass(slots=True)
class _Pending:
    rank: int
    call: Call
    tensor: torch.Tensor
    ordinal: int


@dataclass(slots=True)
class _Matcher:
    """Who waits where."""

    waiting: dict[tuple[int, ...], dict[int, _Pending]] = field(default_factory=dict)
    of_rank: dict[int, _Pending] = field(default_factory=dict)
    counts: dict[tuple[int, tuple[int, ...], str], int] = field(default_factory=dict)

    def join(self, rank: int, node: str, request: Request) -> dict[int, _Pending] | None:
        """Let a rank enter a collective; returns the members' calls once all have entered."""
        collective = request.collective
        key = (rank, collective.communicator, collective.kind)
        self.counts[key] = ordinal = self.counts.get(key, 0) + 1
        pending = _Pending(rank, Call(node, collective), request.tensor, ordinal)
        members = self.waiting.setdefault(collective.communicator, {})
        members[rank] = self.of_rank[rank] = pending
        if len(members) < len(collective.communicator):
            return None
        del self.waiting[collective.communicator]
        for member in members:
            del self.of_rank[member]
        return members

    def hang(self) -> Hang | None:
        """Describe the ranks that still wait, by following whom each waits for."""
        if not self.of_rank:
            return None
        path: list[int] = []
        rank = min(self.of_rank)
        while rank in self.of_rank and rank not in path:
            path.append(rank)
            communicator = self.of_rank[rank].call.collective.communicator
            rank = next(m for m in communicator if m not in self.waiting[communicator])
        cycle = rank in self.of_rank
        ranks = path[path.index(rank) :] if cycle else path
        waits = tuple(Wait(r, self.of_rank[r].call, self.of_rank[r].ordinal) for r in ranks)
        return Hang(waits, cycle, None if cycle else rank)


#: Makes what watches a rank, from its number and its inputs as the domain carries them; it may write into them.
Watcher: TypeAlias = Callable[[int, list[torch.Tensor]], Watch]

#: Gives the order in which so many contributions are summed.
Order: TypeAlias = Callable[[int], list[int]]


def run_watched(program: Program, watcher: Watcher, *, domain: Domain = FLOAT64, order: Order | None = None) -> Run:
    """Run a program and let every step of every rank be watched. Raises as `Executor.run` does.

    Args:
        order: of the sums of collectives; by default that of the group.
    """
    return _execute(program, False, None, watcher, domain, order)


def _execute(
    program: Program,
    observe: bool,
    perturbation: _Perturbation | None,
    watcher: Watcher | None = None,
    domain: Domain = FLOAT64,
    order_of: Order | None = None,
) -> Run:
    order_of = perturbation.order if perturbation is not None else order_of
    plans = plans_of(program, domain)
    sources = program.sources
    check_supported(plans, domain)
    run = Run("lockstep", [RankResult(rank) for rank in range(program.world_size)], domain=domain.name)
    generators: list[RankGenerator] = []
    for rank, binding in enumerate(program.ranks):
        perturb: Callable[[torch.Tensor], torch.Tensor] | None = perturbation
        plan, result = plans[binding.graph], run.ranks[rank]
        inputs = rank_inputs(plan, rank, sources, domain)
        watch: Watch | None = None
        if watcher is not None:
            inputs = [domain.carry(value).clone() for value in inputs]  # of its own: kept ones are shared
            watch = watcher(rank, list(inputs))
        steps = run_rank(
            plan, rank, binding.constants, inputs,
            observe=observe, perturb=perturb, watch=watch, result=result, domain=domain,
        )  # fmt: skip
        generators.append(steps)
    matcher = _Matcher()
    runnable: deque[tuple[int, Any]] = deque((rank, None) for rank in range(program.world_size))
    with torch.no_grad(), domain.running():
        while runnable:
            rank, answer = runnable.popleft()
            try:
                node, request = generators[rank].send(answer)
            except StopIteration as stop:
                run.ranks[rank] = stop.value
                continue
            stranger = next((r for r in request.collective.communicator if not 0 <= r < program.world_size), None)
            if stranger is not None:
                generators[rank].close()
                run.ranks[rank].error = NodeError(
                    node, f"ValueError: it names rank {stranger}, which the mesh does not have"
                )
                continue
            members = matcher.join(rank, node, request)
            if members is None:
                continue
            ordered = [members[r] for r in request.collective.communicator]
            calls = [pending.call.collective for pending in ordered]
            sentence = mismatch(calls)
            if sentence is not None:
                run.mismatch = sentence, {pending.rank: pending.call for pending in ordered}
                return run
            order = order_of(len(ordered)) if order_of is not None else None
            try:
                answers = complete(calls, [pending.tensor for pending in ordered], order)
            except UnsupportedOp:
                raise
            except Exception as error:  # noqa: BLE001 - arguments that torch refuses, equal on all members
                first = ordered[0]
                problem = str(error).strip().splitlines() or [type(error).__name__]
                run.ranks[first.rank].error = NodeError(first.call.node, f"{type(error).__name__}: {problem[0]}")
                return run
            runnable.extend((pending.rank, answer) for pending, answer in zip(ordered, answers, strict=True))
    if run.error is None:
        run.hang = matcher.hang()
    return run
