"""Many ranks at once: if all ranks run the same graph, their tensors are stacked, and an op runs once for all of them.

Values that are equal on all ranks (replicated inputs, and values computed only from them) are stored once, and values that are
equal on some ranks (shards, and values gathered or reduced over a group) once for these. Collectives, and ops with different
arguments on every rank, run rank by rank on the slices. Values that a graph writes into later are stored per rank: slices share
the storage of the stack. One rank also runs alone, with the recorded results of the collectives: it determines which values share
storage, and confirms its slices.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.domains import Domain
from tcverify.execution.asynchrony import Join, Moment, PendingCollective, Timing, storage_of
from tcverify.execution.compare import compare_ranks, overlapping_outputs
from tcverify.execution.executor import Run
from tcverify.execution.freed_storages import FreedStorages
from tcverify.execution.interpreter import RankResult, fill_arguments, rank_inputs, run_rank
from tcverify.execution.lockstep.rank_rows import (
    MOST_ELEMENTS,
    Alignment,
    ByRank,
    NotStackable,
    Rows,
    ScatteredRows,
    StackedRows,
    arguments_of,
    first_ranks,
    last_writes,
    memory_layout_of,
    slots_of,
    stack_rows,
    storages_of,
)
from tcverify.execution.lockstep.stacked_collectives import Collectives
from tcverify.execution.perturbation import Perturbation
from tcverify.execution.plan import ExecutionPlan, PlanStep, known_constant, plans_of, rank_constants
from tcverify.program import InputSpec, Mesh, Program
from tcverify.program.graph import RankConstant, Slot, copy_graph
from tcverify.program.sharing import share

#: Number of ranks from which it pays (benchmarks/scale.py).
STACKED_FROM = 16

#: What rounding may make of another order of the same sums, relative to the largest magnitude.
_ROUNDING = 1e-9

#: Of what collectives are given, a magnitude that may be what has remained of larger values.
_SMALL = 1e-6


#: Inputs that runs which still exist have read, by all that they depend on: both versions of a program read the same ones.
_READ: weakref.WeakValueDictionary[Any, StackedRows] = weakref.WeakValueDictionary()


@dataclass(slots=True, eq=False)
class _Kept:
    """What the slices of a run's results are parts of."""

    inputs: Sequence[Any]
    outputs: Sequence[Any] = ()


def run_stacked(
    program: Program,
    domain: Domain,
    timing: Moment | Timing = "issue",
    beside: Run | None = None,
    perturbation: Perturbation | None = None,
) -> Run | None:
    """Run a program with its ranks stacked; its plans are supported in the domain.

    Args:
        timing: when asynchronous collectives read and write, as of `Lockstep.run`; all ranks alike.
        beside: a run of another version: bitwise equal outputs are kept once.
        perturbation: of the results of ops, and of the order of sums. Then no rank runs alone as a check.

    Returns:
        The run, finished on all ranks; None if the ranks have to run one by one, which also shows the problem.
    """
    program = _merged(program)
    plan = plans_of(program, domain)[0]
    if len(program.graphs) > 1 or not domain.carries or FreedStorages.of(plan) is not None:
        return None
    try:
        ranks = _Ranks(program, plan, domain, timing, beside.keeps if beside is not None else None, perturbation)
        with torch.no_grad(), domain.running(), _silent():
            results = ranks.run()
            if perturbation is not None:
                return Run("lockstep", results, domain=domain.name, keeps=ranks.kept)
            first, contributed = ranks.alone()
        tolerance = 0.0 if domain.kind == "exact" else _ROUNDING
        _check(first, results[0], tolerance)
        alone, together = (RankResult(0, list(some)) for some in (contributed, ranks.collectives.contributed))
        _check(alone, together, tolerance, _SMALL)
    except Exception:  # noqa: BLE001 - whatever it is, the ranks one by one will say it, with its rank
        return None
    return Run("lockstep", results, domain=domain.name, keeps=ranks.kept)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without torch's warnings about ops that vmap runs slice by slice."""
    tell = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", lambda told: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tell(False)
        try:
            yield
        finally:
            tell(True)


def _merged(program: Program) -> Program:
    """The program with one graph in place of several that differ in integers, and in metadata, alone."""
    if not 1 < len(program.graphs) <= program.world_size or any(program.modules):
        return program
    found = _MERGED.get(program)
    if found is None:
        bare = [copy_graph(graph, meta=lambda node: {}) for graph in program.graphs]
        constants = [binding.constants for binding in program.ranks]
        graphs, bindings = share([bare[binding.graph] for binding in program.ranks], constants)
        found = _MERGED[program] = replace(program, graphs=graphs, ranks=bindings) if len(graphs) == 1 else program
    return found


_MERGED: weakref.WeakKeyDictionary[Program, Program] = weakref.WeakKeyDictionary()


class _Ranks:
    """All ranks of a program of one graph, on their way through it together."""

    def __init__(
        self,
        program: Program,
        plan: ExecutionPlan,
        domain: Domain,
        timing: Moment | Timing,
        beside: Any,
        perturbation: Perturbation | None,
    ) -> None:
        self.program, self.plan, self.domain, self.timing = program, plan, domain, timing
        self.perturbation = perturbation
        self.size = program.world_size
        self.alignment = Alignment(self.size)
        self.collectives = Collectives(self.size, self.alignment, domain, timing, perturbation)
        self.last_writes = last_writes(plan)
        self.constants = [rank_constants(program.mesh, r, b.constants) for r, b in enumerate(program.ranks)]
        first = self.constants[0]
        # Made before the domain runs: it means what programs compute.
        self.inputs = [
            self._own(made) if write >= 0 else made
            for made, write in zip(self._inputs(), self.last_writes, strict=False)
        ]
        self.inputs_alone = rank_inputs(plan, 0, program.sources, domain)
        self.different = {name for one in self.constants for name in one if one[name] != first.get(name)}
        self.kept = _Kept(self.inputs)
        self.known: Sequence[Any] | None = beside.outputs if isinstance(beside, _Kept) else None

    def run(self) -> list[RankResult]:
        """Run the graph; return every rank's result."""
        values: list[Any] = list(self.inputs)
        for number, step in enumerate(self.plan.steps):
            apart = self.last_writes[len(values)] > number  # it is still written into
            by_rank = any(name in self.different for name in _constants_of(step))
            if step.op.collective or by_rank or self._copied_too_soon(step, values):
                values.append(self._one_by_one(step, values, apart))
            else:
                values.append(self._together(step, values, apart))
            if self.perturbation is not None and not step.op.aliases and step.op.phase != "start":
                values[-1] = pytree.tree_map(partial(_perturbed, self.perturbation), values[-1])
            for slot in step.dead:
                values[slot] = None
        flat, tree = pytree.tree_flatten(map_aggregate(self.plan.result, _filler(values, self.constants[0])))
        if any(isinstance(leaf, RankConstant) for leaf in pytree.tree_leaves(self.plan.result)):
            raise NotStackable
        overlaps = [overlapping_outputs(RankResult(r, own)) for r, own in enumerate(_slices(flat, self.size))]
        if self.known is not None and len(flat) == len(self.known):
            flat = [known if _same(value, known) else value for value, known in zip(flat, self.known, strict=True)]
        self.kept.outputs = flat
        # Of the first version alone: the others are compared with it.
        scales = [_scales(value, self.size) for value in flat] if self.known is None else []
        outputs, kept = _slices(flat, self.size), _slices(self.inputs, self.size)
        return [
            RankResult(
                r,
                outputs[r],
                str(tree),
                kept[r],
                self.plan.placeholders,
                mutates=self.plan.mutates,
                calls=self.collectives.calls[r],
                overlaps=overlaps[r],
                scales=[of[r] for of in scales],
            )
            for r in range(self.size)
        ]

    def alone(self) -> tuple[RankResult, list[torch.Tensor]]:
        """Run the first rank by itself, given what the collectives gave it.

        Returns:
            What it computes, and what it contributes to each collective.
        """
        timing = self.timing if isinstance(self.timing, str) else partial(self.timing, 0)
        steps = run_rank(self.plan, 0, self.constants[0], self.inputs_alone, domain=self.domain, timing=timing)
        answers = iter(self.collectives.answers)
        answer: torch.Tensor | None = None
        contributed: list[torch.Tensor] = []
        while True:
            try:
                _, event = steps.send(answer)
            except StopIteration as stop:
                return stop.value, contributed
            answer = None
            arriving: Sequence[Any] = [event] if isinstance(event, PendingCollective) and event.early else []
            if isinstance(event, Join):
                arriving = [one for one in event.under_way if not one.done]
            for one in arriving:
                contributed.append(one.tensor.clone())
                one.write(next(answers))
            if not isinstance(event, (Join, PendingCollective)):
                contributed.append(event.tensor.clone())
                answer = next(answers)

    def _inputs(self) -> list[Any]:
        specs = self.program.sources.chosen(self.plan.placeholders, 0)
        parts: dict[tuple[str, ...], list[Any]] = {}
        inputs = []
        for spec in specs:
            names = tuple(name for name, placement in spec.placements if placement.kind != "replicated")
            if names not in parts:
                parts[names] = [_part(names, self.program.mesh, rank) for rank in range(self.size)]
            key = spec, self.program.mesh, self.program.seed, self.domain.name
            made = _READ.get(key)
            if made is None:
                made = self._input(spec, parts[names])
                if isinstance(made, StackedRows):
                    _READ[key] = made
            inputs.append(made)
        return inputs

    def _input(self, spec: InputSpec, parts: Sequence[Any]) -> Any:
        """An input on all ranks: made once for those of the same part."""
        sources, rows = self.program.sources, self.alignment.rows_of(parts)
        ranks = first_ranks(rows)
        shapes = {spec.local_shape(sources.mesh, rank) for rank in ranks}
        if len(shapes) > 1 or (len(ranks) > 1 and len(ranks) * prod(*shapes) > MOST_ELEMENTS):
            raise NotStackable
        made = self.domain.carry(spec.values_of(sources.mesh, ranks, sources.seed, self.domain))
        return StackedRows(made, rows) if len(ranks) > 1 else made[0]

    def _copied_too_soon(self, step: PlanStep, values: Sequence[Any]) -> bool:
        """Whether a step may make views of what a collective has still to write into, of which ranks share other rows than of
        another operand: it would be copied."""
        if not self.collectives.under_way or step.op.collective or not step.op.aliases:
            return False
        leaves = pytree.tree_leaves([values[slot] for slot in slots_of(step)])
        stacked = [leaf for leaf in leaves if isinstance(leaf, StackedRows)]
        pending = (storage_of(leaf.tensor) in self.collectives.under_way for leaf in stacked)
        return len({leaf.rows for leaf in stacked}) > 1 and any(pending)

    def _together(self, step: PlanStep, values: list[Any], apart: bool) -> Any:
        """Call an op once for all ranks.

        Args:
            apart: whether each rank needs a separate row in the result.
        """
        args, kwargs = fill_arguments(step, values, _filler(values, self.constants[0]))
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, ScatteredRows) for leaf in leaves):
            if step.op.aliases or step.writes:
                return self._one_by_one(step, values, apart)
            leaves = [self._gathered(leaf.tensors) if isinstance(leaf, ScatteredRows) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, tree)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, StackedRows)]
        if not places:
            made = self._carried(step, step.run(*args, **kwargs))
            return pytree.tree_map_only(torch.Tensor, self._own, made) if apart else made

        def call(*tensors: torch.Tensor) -> Any:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            rank_args, rank_kwargs = pytree.tree_unflatten(given, tree)
            return self._carried(step, step.run(*rank_args, **rank_kwargs))

        stacked = [leaves[place] for place in places]
        rows = self.alignment.apart if apart else self.alignment.common(stacked)
        try:
            found = torch.vmap(call)(*(self._within(one, rows) for one in stacked))
        except NotStackable:
            raise
        except Exception:  # noqa: BLE001 - a kernel that looks at values, or one that raises on some rank
            return self._one_by_one(step, values, apart)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: stack_rows(tensor, rows), found)

    def _one_by_one(self, step: PlanStep, values: Sequence[Any], apart: bool) -> Any:
        """Call an op on every rank's slices; let collectives meet."""
        slots = slots_of(step)
        leaves, tree = pytree.tree_flatten([values[slot] for slot in slots])
        plain = not any(isinstance(values[slot], (tuple, list, dict)) for slot in slots)
        found: list[Any] = []
        slices = _slices(leaves, self.size)
        for rank, one in enumerate(slices):
            given = dict(zip(slots, one if plain else pytree.tree_unflatten(one, tree), strict=True))
            args, kwargs = fill_arguments(step, given, _filler(given, self.constants[rank]))  # type: ignore[arg-type]
            found.append(step.run(rank, *args, **kwargs) if step.op.collective else step.run(*args, **kwargs))
        if step.op.collective:
            found = self.collectives.meet(step, found, slices, apart)
            if isinstance(found, StackedRows):
                return found
        known = {
            memory_layout_of(one): leaf for leaf, one in zip(leaves, slices[0], strict=True) if isinstance(leaf, ByRank)
        }
        # Collectives return operands, and new tensors: no parts of operands
        inside = set() if step.op.collective else storages_of(slices)
        made = self._restacked(found, apart, known, inside)
        return pytree.tree_map(partial(self._carried_rows, step), made)

    def _carried(self, step: PlanStep, value: Any) -> Any:
        if not step.carry:
            return value
        return self.domain.constant(value) if step.constant else self.domain.carry(value)

    def _carried_rows(self, step: PlanStep, value: Any) -> Any:
        if isinstance(value, ScatteredRows):
            return value  # views are carried as what they are views of
        if not isinstance(value, StackedRows):
            return self._carried(step, value)
        made = self._carried(step, value.tensor)
        return value if made is value.tensor else StackedRows(made, value.rows)

    def _restacked(self, found: Sequence[Any], apart: bool, operands: Mapping[Any, ByRank], inside: set[int]) -> Any:
        """Every rank's value as one; they have to nest alike, and to have the same shapes.

        Args:
            operands: by where the slice of the first rank is: what is returned as it was given.
            inside: the storages of operands, of which values may be parts.
        """
        if all(isinstance(one, torch.Tensor) for one in found):
            return self._column(found, apart, operands, inside)
        flat = [pytree.tree_flatten(one) for one in found]
        tree = flat[0][1]
        if any(other != tree for _, other in flat):
            raise NotStackable
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([self._column(column, apart, operands, inside) for column in columns], tree)

    def _column(self, column: Sequence[Any], apart: bool, operands: Mapping[Any, ByRank], inside: set[int]) -> Any:
        """One leaf of every rank's value."""
        first = column[0]
        if not isinstance(first, torch.Tensor):
            if all(type(one) is type(first) and one == first for one in column):
                return first
            raise NotStackable
        if any(one.shape != first.shape or one.dtype != first.dtype for one in column):
            raise NotStackable
        places = list(map(memory_layout_of, column))
        operand = operands.get(places[0])
        if operand is not None and places == list(map(memory_layout_of, operand.slices())):
            return operand
        if any(storage_of(one) in inside for one in column):
            return ScatteredRows(tuple(column))
        if apart:
            return stack_rows(torch.stack(list(column)), self.alignment.apart)
        return self._gathered(column)

    def _gathered(self, column: Sequence[torch.Tensor]) -> Any:
        """A copy of what ranks hold: a row for each place in memory."""
        rows = self.alignment.rows_of(list(map(memory_layout_of, column)))
        return stack_rows(torch.stack([column[rank] for rank in first_ranks(rows)]), rows) if any(rows) else column[0]

    def _own(self, value: Any) -> StackedRows:
        """A row for each rank, where all ranks may write into theirs."""
        if isinstance(value, StackedRows):
            within = self._within(value, self.alignment.apart)
            return StackedRows(within.clone() if within is value.tensor else within, self.alignment.apart)
        if value.numel() * self.size > MOST_ELEMENTS:
            raise NotStackable
        return StackedRows(torch.stack([value] * self.size), self.alignment.apart)

    def _within(self, value: StackedRows, rows: Rows) -> torch.Tensor:
        if self.alignment.elements(value, rows) > MOST_ELEMENTS:
            raise NotStackable
        return self.alignment.within(value, rows)


def _perturbed(perturbation: Perturbation, value: Any) -> Any:
    if isinstance(value, StackedRows):
        return StackedRows(perturbation(value.tensor), value.rows)
    return perturbation(value) if isinstance(value, torch.Tensor) else value


def _same(value: Any, known: Any) -> bool:
    """Whether a value is another one, to the bit."""
    if not isinstance(value, StackedRows) or not isinstance(known, StackedRows):
        return False
    mine, other = value.tensor, known.tensor
    if value.rows != known.rows:
        return False
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    bits = mine.dtype == torch.float64
    return torch.equal(*(t.view(torch.int64) if bits else t for t in (mine, other)))


def _scales(value: Any, ranks: int) -> list[float | None]:
    """The largest magnitude of a value on each rank, if it is floating point."""
    one = value.tensor if isinstance(value, StackedRows) else None
    if one is None or not one.is_floating_point() or not one.numel():
        return [None] * ranks
    found = one.abs().flatten(1).amax(1).tolist() if one.dim() > 1 else one.abs().tolist()
    return [found[row] for row in value.rows]


def _check(alone: RankResult, stacked: RankResult, tolerance: float, least: float = 0.0) -> None:
    """Raise unless the values that a rank has computed alone equal its slices, and overlap in memory in the same way.

    Args:
        least: the magnitude that the tolerance is relative to at least.
    """
    if alone.error is not None or overlapping_outputs(alone) != overlapping_outputs(stacked):
        raise NotStackable
    for delta in compare_ranks(alone, stacked):
        if delta.problem or delta.overflow or delta.difference > tolerance * max(delta.scale, least):
            raise NotStackable


def _part(dims: Sequence[str], mesh: Mesh, rank: int) -> tuple[Any, ...]:
    """Positions of a rank in mesh dims: the values of inputs that are placed over these depend on them."""
    return tuple((dim.position(rank), len(dim.group(rank))) for dim in map(mesh.dim, dims))


def _filler(values: Any, constants: dict[str, Any]) -> Callable[[Any], Any]:
    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return values[leaf.index]
        return known_constant(leaf, constants) if isinstance(leaf, RankConstant) else leaf

    return fill


def _constants_of(step: PlanStep) -> list[str]:
    return [leaf.name for leaf in arguments_of(step) if isinstance(leaf, RankConstant)] if step.nested else []


def _slices(leaves: Sequence[Any], ranks: int) -> list[list[Any]]:
    """Per rank, its part of each of some values."""
    columns = [leaf.slices() if isinstance(leaf, ByRank) else [leaf] * ranks for leaf in leaves]
    return [[column[rank] for column in columns] for rank in range(ranks)]


__all__ = ["STACKED_FROM", "run_stacked"]
