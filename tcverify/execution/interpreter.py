"""The one interpreter: a rank is a generator that walks its FX graph and yields what it asks for at every collective.

It yields a `Request` and is sent the result; a `PendingCollective` where an asynchronous collective starts, and a `Join` where it
waits for such collectives, and is sent None.

Lockstep drives all generators of a program in one process; a rank process drives one and answers with a real process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.domains import FLOAT64, Domain, domain_of
from tcverify.errors import UnsupportedOp
from tcverify.execution.allocations import Contents
from tcverify.execution.asynchrony import Join, Moment, Outstanding, PendingCollective
from tcverify.execution.freed_storages import FreedStorages
from tcverify.execution.plan import ExecutionPlan, PlanStep, first_line, known_constant
from tcverify.ops import Await, Collective, Request, Start
from tcverify.program import InputSpec, Mesh
from tcverify.program.graph import RankConstant, Slot
from tcverify.program.inputs import Sources, prepare_inputs

#: What a rank asks for.
Event: TypeAlias = Request | PendingCollective | Join

#: Observer of a step, its arguments and its result; returns the value to use as the result.
Watch: TypeAlias = Callable[[PlanStep, list[Any], dict[str, Any], Any], Any]


@dataclass(frozen=True, slots=True)
class NodeError:
    """A node raised on a rank."""

    node: str
    message: str

    def __str__(self) -> str:
        return f"node '{self.node}' raises {self.message}"


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective that a rank entered."""

    node: str
    collective: Collective


@dataclass(slots=True)
class RankResult:
    """The execution of one rank.

    Attributes:
        outputs: leaves of the output, in order. Empty if the rank did not finish or ran elsewhere.
        structure: how the outputs nest, as text.
        inputs: the input tensors after the run.
        input_names: the names of `inputs`.
        mutates: whether the graph writes into anything.
        calls: the collectives it entered, in order.
        values: every node's value, when observed.
        error: set when a node raised.
        digest: projections of the outputs, when the rank ran elsewhere; see `compare.digest`.
        overlaps: see `compare.overlapping_outputs`; None if the outputs show it.
        scales: for each output its largest magnitude, if known.
    """

    rank: int
    outputs: list[Any] = field(default_factory=list)
    structure: str = ""
    inputs: list[torch.Tensor] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    mutates: bool = False
    calls: list[CollectiveCall] = field(default_factory=list)
    values: dict[str, Any] | None = None
    error: NodeError | None = None
    digest: list[list[float]] = field(default_factory=list)
    overlaps: list[list[int]] | None = None
    scales: Sequence[float | None] = ()


def rank_inputs(plan: ExecutionPlan, rank: int, sources: Sources, domain: Domain = FLOAT64) -> Sequence[torch.Tensor]:
    """Return the inputs of a rank. Plans that write into nothing share them with each other: do not write into them.

    Raises:
        ProgramError: the inputs are too large to make.
    """
    specs = sources.chosen(plan.placeholders, rank)
    if plan.mutates or sum(math.prod(spec.shape) for spec in specs) > _KEPT_ELEMENTS:
        return [domain.carry(spec.values(sources.mesh, rank, sources.seed, domain)) for spec in specs]
    return _kept_inputs(specs, sources.mesh, rank, sources.seed, domain.name)


#: Largest number of elements of a rank's inputs that are cached: 64 of these take 64 MiB, at most twice that.
_KEPT_ELEMENTS = 1 << 17


@lru_cache(maxsize=128)  # ranks but the first take two: all their inputs, and those that are placed
def _kept_inputs(specs: tuple[InputSpec, ...], mesh: Mesh, rank: int, seed: int, name: str) -> list[torch.Tensor]:
    """Inputs as the domain of this name carries them. The original and the rewritten program have the same ones."""
    domain = domain_of(name)
    if rank and any(not spec.placements for spec in specs):
        first = _kept_inputs(specs, mesh, 0, seed, name)
        own = iter(_kept_inputs(tuple(spec for spec in specs if spec.placements), mesh, rank, seed, name))
        return [next(own) if spec.placements else value for spec, value in zip(specs, first, strict=True)]
    prepare_inputs(specs, mesh, rank, seed, domain)
    return [domain.carry(spec.values(mesh, rank, seed, domain)) for spec in specs]


def run_rank(
    plan: ExecutionPlan,
    rank: int,
    constants: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    *,
    observe: bool = False,
    perturb: Callable[[torch.Tensor], torch.Tensor] | None = None,
    watch: Watch | None = None,
    domain: Domain = FLOAT64,
    result: RankResult | None = None,
    timing: Moment | Callable[[str], Moment] = "issue",
) -> Generator[tuple[str, Event], Any, RankResult]:
    """Run one rank. Yields (node name, request) at every collective and receives its result.

    Args:
        inputs: values of the placeholders; the graph may write into them.
        observe: keep every node's value in the result.
        perturb: changes the result of every op that returns a fresh tensor; for the conditioning probe.
        watch: called for every step, in order; may replace its result.
        result: filled in as the rank advances, so that it shows the progress of a rank that never ends.
        timing: one of `TIMINGS`, for all asynchronous collectives or by node.

    Returns:
        The rank's result; an op that raises ends the rank with `error` set.

    Raises:
        UnsupportedOp: an op has no meaning for these arguments.
    """
    result = RankResult(rank) if result is None else result
    values: list[Any] = [domain.carry(value) for value in inputs]
    carried = values[:]
    contents = _observe(plan, values, result) if observe else None
    outstanding = Outstanding(timing, domain)
    fill = _filler(values, constants)
    started: dict[str, Any] = {}  # what starts have returned, where values are kept
    arrived = _arrival(result.values, started, perturb)
    freed = FreedStorages.of(plan)
    for step in plan.steps:
        args, kwargs = fill_arguments(step, values, fill)
        problem = freed.step(step, args, kwargs) if freed is not None else None
        if problem is not None:
            result.error = NodeError(step.name, problem)
            return result
        if contents is not None:
            contents.before(step, args, kwargs)
        try:
            if step.op.collective:
                value = yield from collective_events(
                    step.name, step.run(rank, *args, **kwargs), result, outstanding, arrived
                )
            else:
                value = step.run(*args, **kwargs)
        except UnsupportedOp:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a kernel is an observation about the program
            result.error = NodeError(step.name, f"{type(error).__name__}: {first_line(error)}")
            return result
        if step.carry:
            value = domain.constant(value) if step.constant else domain.carry(value)
        starts = step.op.phase == "start"  # whose result is written later, and identified by its storage
        if perturb is not None and not step.op.aliases and not starts:
            value = pytree.tree_map_only(torch.Tensor, perturb, value)
        if watch is not None:
            seen = watch(step, args, kwargs, value)
            value = value if starts else seen
        values.append(value)
        if result.values is not None:
            if starts:
                started[step.name] = value
            result.values[step.name] = pytree.tree_map_only(torch.Tensor, torch.clone, value)
            if contents is not None:
                contents.made(len(values) - 1, step, value)
        for slot in step.dead:
            values[slot] = None
    if contents is not None:
        contents.end()
    flat, tree = pytree.tree_flatten(map_aggregate(plan.result, fill))
    result.outputs, result.structure = flat, str(tree)
    result.inputs, result.input_names, result.mutates = carried, plan.placeholders, plan.mutates
    return result


def _observe(plan: ExecutionPlan, inputs: Sequence[torch.Tensor], result: RankResult) -> Contents | None:
    """Keep the inputs in the result, next to the values of all nodes; return the tracker of allocations."""
    result.values = {name: value.clone() for name, value in zip(plan.placeholders, inputs, strict=True)}
    return Contents.of(plan, result.values)


def _filler(values: Sequence[Any], constants: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A function that turns a slot or a rank constant into its value, and leaves all else as it is."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return values[leaf.index]
        return known_constant(leaf, constants) if isinstance(leaf, RankConstant) else leaf

    return fill


def _arrival(
    kept: dict[str, Any] | None, started: Mapping[str, Any], perturb: Callable[[torch.Tensor], torch.Tensor] | None
) -> Callable[[str, torch.Tensor], None]:
    """A function that is called when an asynchronous collective has written its result.

    Args:
        kept: values that are kept; the result is among them only now.
        started: what the starts have returned.
    """

    def arrived(node: str, output: torch.Tensor) -> None:
        if perturb is not None:
            output.copy_(perturb(output))
        if kept is not None and node in started:
            kept[node] = pytree.tree_map_only(torch.Tensor, torch.clone, started[node])

    return arrived


def fill_arguments(step: PlanStep, values: list[Any], fill: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a step.

    Args:
        values: of the slots.
        fill: turns a slot or a rank constant into its value, and leaves all else as it is.
    """
    if step.nested:
        return [map_aggregate(a, fill) for a in step.args], dict(map_aggregate(step.kwargs, fill))
    args = step.args.copy()
    for position, slot in step.slots:
        args[position] = values[slot]
    return args, step.kwargs


def collective_events(
    node: str,
    steps: Generator[Any, Any, Any],
    result: RankResult,
    outstanding: Outstanding,
    arrived: Callable[[str, torch.Tensor], None],
) -> Generator[tuple[str, Event], Any, Any]:
    """Yield what a rank asks for at one call of a collective, and return what the call returns.

    Args:
        steps: of the op, called with its arguments.
        result: whose calls it is added to.
        outstanding: what the rank has started and not waited for.
        arrived: called with the node and the result when an asynchronous collective has written that.
    """
    answer: torch.Tensor | None = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = None
        if isinstance(asked, Await):
            found = outstanding.take(asked.tensor)
            if found:
                yield node, Join(found)
            continue
        result.calls.append(CollectiveCall(node, asked.collective))
        if isinstance(asked, Start):
            begun = outstanding.start(node, asked)
            begun.finish = partial(arrived, node)
            yield node, begun
        else:
            answer = yield node, asked
