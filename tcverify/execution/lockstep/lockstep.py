"""Lockstep: all ranks in one process. Deterministic, fast, and it knows who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch

from tcverify.domains import FLOAT64, Domain
from tcverify.errors import UnsupportedOp
from tcverify.execution.asynchrony import Join, Moment, PendingCollective, Timing
from tcverify.execution.compare import compare_native, compare_ranks
from tcverify.execution.executor import Comparison, Run
from tcverify.execution.interpreter import Event, NodeError, RankResult, Watch, rank_inputs, run_rank
from tcverify.execution.lockstep.collective_matching import MatchEntry, Matcher
from tcverify.execution.lockstep.stacked import STACKED_FROM, run_stacked
from tcverify.execution.perturbation import Perturbation
from tcverify.execution.plan import check_supported, plans_of, rank_constants
from tcverify.ops import complete, mismatch
from tcverify.program import Program

RankGenerator = Generator[tuple[str, Event], Any, RankResult]


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Drives the ranks' generators and matches their requests.

    Collectives block until all members have joined; asynchronous ones do so at the wait.

    Attributes:
        conservative: whether asynchronous collectives block where they start.
    """

    conservative: bool = False

    name: ClassVar[str] = "lockstep"

    def run(
        self,
        program: Program,
        *,
        observe: bool = False,
        domain: Domain = FLOAT64,
        timing: Moment | Timing = "issue",
        beside: Run | None = None,
    ) -> Run:
        """Run a program. See `Executor.run`.

        Args:
            timing: when asynchronous collectives read and write: one of `TIMINGS`, or by rank and node.
            beside: a run of another version of the program, in the same domain. Large values that are equal in both are
                kept once.
        """
        if not observe and program.world_size >= STACKED_FROM:
            check_supported(plans_of(program, domain), domain)
            stacked = run_stacked(program, domain, timing, beside)
            if stacked is not None:
                return stacked
        return _execute(program, observe, None, domain=domain, timing=timing, conservative=self.conservative)

    def compare(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Comparison:
        """Run and compare both versions. See `Executor.compare`."""
        before = self.run(original, domain=domain)
        after = before if rewritten is original else self.run(rewritten, domain=domain, beside=before)
        return self.compare_runs(before, after, None if domain.carries else self.run(original))

    def start_comparison(
        self, original: Program, rewritten: Program, domain: Domain = FLOAT64
    ) -> Callable[[], Comparison]:
        """See `Executor.start_comparison`."""
        return lambda: self.compare(original, rewritten, domain)

    def compare_with(self, before: Run, rewritten: Program) -> Comparison:
        """As `compare`, for an original that has already run here."""
        return self.compare_runs(before, self.run(rewritten, beside=before))

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

        Reruns it with the output of every node, and what ranks add up, perturbed by a relative 2⁻⁵¹, and sums accumulated in
        another order.

        Args:
            baseline: an unperturbed run of the same program, in the same domain.

        Returns:
            Per output label (see `Delta.label`), the largest change over ranks and reruns; infinite when the set of
            finite elements or a discrete value changed.
        """
        changes: dict[str, float] = {}
        for seed in range(1, reruns + 1):
            many = program.world_size >= STACKED_FROM
            stacked = run_stacked(program, domain, perturbation=Perturbation(seed)) if many else None
            run = stacked or _execute(program, False, Perturbation(seed), domain=domain)
            for expected, actual in zip(baseline.ranks, run.ranks, strict=True):
                for delta in compare_ranks(expected, actual):
                    if delta.alias:
                        continue
                    change = float("inf") if delta.problem or delta.overflow else delta.difference
                    changes[delta.label] = max(changes.get(delta.label, 0.0), change)
        return changes


#: Creates the observer of a rank from its number and its inputs in the domain; it may write into them.
Watcher: TypeAlias = Callable[[int, list[torch.Tensor]], Watch]

#: Returns the order in which this many contributions are summed.
Order: TypeAlias = Callable[[int], list[int]]


def run_watched(
    program: Program,
    watcher: Watcher,
    *,
    domain: Domain = FLOAT64,
    order: Order | None = None,
    timing: Moment | Timing = "issue",
) -> Run:
    """Run a program and let every step of every rank be watched. Raises as `Executor.run` does.

    Args:
        order: of the sums of collectives; by default that of the group.
        timing: when asynchronous collectives read and write, as of `Lockstep.run`.
    """
    return _execute(program, False, None, watcher, domain, order, timing)


def _execute(
    program: Program,
    observe: bool,
    perturbation: Perturbation | None,
    watcher: Watcher | None = None,
    domain: Domain = FLOAT64,
    order_of: Order | None = None,
    timing: Moment | Timing = "issue",
    conservative: bool = False,
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
            inputs = [domain.carry(value).clone() for value in inputs]  # a separate copy: cached ones are shared
            watch = watcher(rank, list(inputs))
        steps = run_rank(
            plan, rank, rank_constants(program.mesh, rank, binding.constants), inputs, observe=observe, perturb=perturb,
            watch=watch, result=result, domain=domain, timing=timing if isinstance(timing, str) else partial(timing, rank),
        )  # fmt: skip
        generators.append(steps)
    return drive_ranks(run, generators, domain, order_of, conservative, perturbation)


def drive_ranks(
    run: Run,
    generators: list[RankGenerator],
    domain: Domain = FLOAT64,
    order_of: Order | None = None,
    conservative: bool = False,
    perturbation: Perturbation | None = None,
) -> Run:
    """Advance generators of all ranks, from `run_rank` or elsewhere, until all have ended or wait forever.

    Args:
        run: to which the results are added.
        order_of: of the sums of collectives; by default that of the group.
        conservative: whether asynchronous collectives block where they start.
        perturbation: of what ranks add up.
    """
    drive = _Drive(run, generators, order_of, conservative, perturbation)
    with torch.no_grad(), domain.running():
        drive.all()
    return run


@dataclass(frozen=True, slots=True)
class MetCollective:
    """The members' matched calls of a collective, which wait until nothing else can proceed: the `number`-th such one."""

    number: int
    members: list[MatchEntry]


@dataclass(slots=True)
class _Drive:
    """Advances the ranks' generators until all have ended, or wait forever."""

    run: Run
    generators: list[RankGenerator]
    order_of: Order | None
    conservative: bool
    perturbation: Perturbation | None = None
    matcher: Matcher = field(default_factory=Matcher)
    runnable: deque[tuple[int, Any]] = field(default_factory=deque)
    entries: dict[int, MatchEntry] = field(
        default_factory=dict
    )  # by the address of what is under way, which the entry keeps
    late: dict[int, MetCollective] = field(default_factory=dict)  # by the address of each entry, which it keeps
    met: int = 0  # how many collectives have been late

    def all(self) -> None:
        """Drive all ranks to their ends."""
        self.runnable.extend((rank, None) for rank in range(len(self.generators)))
        while True:
            while self.runnable:
                rank, answer = self.runnable.popleft()
                if not self._advance(rank, answer):
                    return
            if not self._quiescent():
                break
        if self.run.error is None and self.run.mismatch is None:
            self.run.hang = self.matcher.hang()

    def _advance(self, rank: int, answer: Any) -> bool:
        """Advance a rank to its next request. Returns whether the run continues."""
        try:
            node, event = self.generators[rank].send(answer)
        except StopIteration as stop:
            self.run.ranks[rank] = stop.value
            return True
        if isinstance(event, Join):
            self._wait(rank, [self.entries.pop(id(one)) for one in event.under_way])
            return True
        collective = event.collective
        strangers = [r for r in collective.communicator if not (isinstance(r, int) and 0 <= r < len(self.generators))]
        if strangers:
            self.generators[rank].close()
            problem = f"ValueError: it names rank {strangers[0]!r}, which the mesh does not have"
            self.run.ranks[rank].error = NodeError(node, problem)
            return True
        under_way = event if isinstance(event, PendingCollective) else None
        entry, members = self.matcher.enter(rank, node, collective, event.tensor, under_way)
        if under_way is None:
            self.matcher.parked[rank] = [entry]
        else:
            self.entries[id(under_way)] = entry
            if under_way.early or self.conservative:
                self.matcher.parked[rank] = [entry]
                if not self.conservative:
                    self.matcher.lingering.add(rank)
            else:
                self.runnable.append((rank, None))
        return not members or self._meet(members)

    def _meet(self, members: list[MatchEntry]) -> bool:
        """All members of a collective have issued it."""
        calls = [entry.call.collective for entry in members]
        sentence = mismatch(calls)
        if sentence is not None:
            self.run.mismatch = sentence, {entry.rank: entry.call for entry in members}
            return False
        if any(entry.under_way is not None and entry.under_way.late for entry in members) and not self.conservative:
            met = MetCollective(self.met, members)
            self.met += 1
            self.late.update((id(entry), met) for entry in members)
            return True
        return self._carry_out(members)

    def _carry_out(self, members: list[MatchEntry]) -> bool:
        order = self.order_of(len(members)) if self.order_of is not None else None
        calls, tensors = [e.call.collective for e in members], [e.tensor for e in members]
        if self.perturbation is not None:
            tensors = self.perturbation.addends(calls, tensors)
        try:
            answers = complete(calls, tensors, order)
            for entry, answer in zip(members, answers, strict=True):
                if entry.under_way is not None:
                    entry.under_way.write(answer)
        except UnsupportedOp:
            raise
        except Exception as error:  # noqa: BLE001 - arguments that torch refuses, equal on all members
            first = members[0]
            problem = str(error).strip().splitlines() or [type(error).__name__]
            self.run.ranks[first.rank].error = NodeError(first.call.node, f"{type(error).__name__}: {problem[0]}")
            return False
        for entry, answer in zip(members, answers, strict=True):
            entry.done = True
            waiting = self.matcher.parked.get(entry.rank)
            if waiting is not None and all(e.done for e in waiting):
                self._go_on(entry.rank, None if waiting[-1].under_way is not None else answer)
        return True

    def _wait(self, rank: int, entries: list[MatchEntry]) -> None:
        if all(entry.done for entry in entries):
            self.runnable.append((rank, None))
        else:
            self.matcher.parked[rank] = entries

    def _go_on(self, rank: int, answer: Any) -> None:
        del self.matcher.parked[rank]
        self.matcher.lingering.discard(rank)
        self.runnable.append((rank, answer))

    def _quiescent(self) -> bool:
        """No rank can proceed: carry out a collective that one waits for, or release ranks that need not stay. Returns
        whether anything changed."""
        parked = (entry for entries in self.matcher.parked.values() for entry in entries)
        wanted = min((self.late[id(e)] for e in parked if id(e) in self.late), key=lambda met: met.number, default=None)
        if wanted is not None:
            for entry in wanted.members:
                del self.late[id(entry)]
            return self._carry_out(wanted.members)
        if self.matcher.lingering:
            for rank in sorted(self.matcher.lingering):
                self._go_on(rank, None)
            return True
        return False
