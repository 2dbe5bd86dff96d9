"""Many ranks at once: where all ranks run one graph, their tensors are stacked, and an op runs once for all of them.

What is equal on all ranks (replicated inputs, and what is computed from them alone) is kept once. Collectives, and ops that
are told something else on every rank, run rank by rank on the slices. Where a graph writes in place, all is kept per rank:
slices share the storage of the stack. One rank also runs alone, given what the collectives gave it: it says how values share
storage, and that its slices are what it computes by itself.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.arithmetic import Domain
from tcverify.execution.asynchrony import Join, Outstanding, Timing, UnderWay, storage_of
from tcverify.execution.compare import compare_ranks, storage_partition
from tcverify.execution.executor import Run
from tcverify.execution.freed import Freed
from tcverify.execution.interpreter import Call, RankResult, arguments, rank_inputs, run_rank
from tcverify.execution.plan import Plan, Step, known_constant, plans_of, rank_constants
from tcverify.ops import Await, Collective, Request, Start, complete, mismatch
from tcverify.program import InputSpec, Mesh, Program
from tcverify.program.graph import RankConstant, Slot, copy_graph
from tcverify.program.inputs import Sources
from tcverify.program.sharing import share

#: From so many ranks on it pays (benchmarks/scale.py).
STACKED_FROM = 16

#: Most elements of one value of all ranks: 512 MiB of float64.
_MOST_ELEMENTS = 1 << 26

#: What rounding may make of another order of the same sums, relative to the largest magnitude.
_ROUNDING = 1e-9


class _NotStackable(Exception):
    """The ranks do not go the same way, or not by the same shapes: they have to run one by one."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Stacked:
    """One tensor per rank: [ranks, *shape of each]."""

    tensor: torch.Tensor


#: Inputs that runs which still exist have read, by all that they depend on: both versions of a program read the same ones.
_READ: weakref.WeakValueDictionary[Any, _Stacked] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """The stack of what a step gives, where it has been made already."""

    tensor: torch.Tensor


@dataclass(slots=True, eq=False)
class _Kept:
    """What the slices of a run's results are parts of."""

    inputs: Sequence[Any]
    outputs: Sequence[Any] = ()


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A collective that all ranks have started, and that is carried out when it is waited for.

    Attributes:
        starts: of the ranks, with what each contributes: a copy where it reads at once.
        result: of the step, where that is a copy of what the starts write into.
    """

    starts: Sequence[Start]
    tensors: Sequence[torch.Tensor]
    result: torch.Tensor | None = None


def run_stacked(
    program: Program, domain: Domain, timing: str | Timing = "issue", beside: Run | None = None
) -> Run | None:
    """Run a program with its ranks stacked; its plans are supported in the domain.

    Args:
        timing: when asynchronous collectives read and write, as of `Lockstep.run`; all ranks alike.
        beside: a run of another version: outputs that are the same to the bit are kept once.

    Returns:
        The run, finished on all ranks; None where the ranks have to run one by one, which also says what goes wrong.
    """
    program = _merged(program)
    plan = plans_of(program, domain)[0]
    if len(program.graphs) > 1 or not domain.carries or Freed.of(plan) is not None:
        return None
    try:
        ranks = _Ranks(program, plan, domain, timing, beside.keeps if beside is not None else None)
        with torch.no_grad(), domain.running(), _silent():
            results = ranks.run()
            first = ranks.alone()
        _check(first, results[0], 0.0 if domain.kind == "exact" else _ROUNDING)
    except Exception:  # noqa: BLE001 - whatever it is, the ranks one by one will say it, with its rank
        return None
    return Run("lockstep", results, domain=domain.name, keeps=ranks.kept)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what torch says of ops that vmap runs slice by slice itself, in Python and beside it."""
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

    def __init__(self, program: Program, plan: Plan, domain: Domain, timing: str | Timing, beside: Any) -> None:
        self.program, self.plan, self.domain, self.timing = program, plan, domain, timing
        self.size = program.world_size
        self.under_way: dict[int, _UnderWay] = {}  # by the storages that are written at the wait
        self.calls: list[list[Call]] = [[] for _ in range(self.size)]
        self.answers: list[torch.Tensor] = []  # of the collectives of the first rank
        self.constants = [rank_constants(program.mesh, r, b.constants) for r, b in enumerate(program.ranks)]
        first = self.constants[0]
        # Made before the domain runs: it means what programs compute.
        self.inputs = self._inputs()
        if plan.mutates:
            self.inputs = [self._spread(value) for value in self.inputs]
        self.inputs_alone = rank_inputs(plan, 0, program.sources, domain)
        self.different = {name for one in self.constants for name in one if one[name] != first.get(name)}
        self.kept = _Kept(self.inputs)
        self.known: Sequence[Any] = beside.outputs if isinstance(beside, _Kept) else ()

    def run(self) -> list[RankResult]:
        """Run the graph; return every rank's result."""
        values: list[Any] = list(self.inputs)
        for step in self.plan.steps:
            if step.op.collective or any(name in self.different for name in _constants_of(step)):
                values.append(self._one_by_one(step, values))
            else:
                values.append(self._together(step, values))
            for slot in step.dead:
                values[slot] = None
        flat, tree = pytree.tree_flatten(map_aggregate(self.plan.result, _filler(values, self.constants[0])))
        if any(isinstance(leaf, RankConstant) for leaf in pytree.tree_leaves(self.plan.result)):
            raise _NotStackable
        sharing = [storage_partition(RankResult(r, own)) for r, own in enumerate(_slices(flat, self.size))]
        if len(flat) == len(self.known):
            flat = [known if _same(value, known) else value for value, known in zip(flat, self.known, strict=True)]
        self.kept.outputs = flat
        outputs, kept = _slices(flat, self.size), _slices(self.inputs, self.size)
        return [
            RankResult(
                r,
                outputs[r],
                str(tree),
                kept[r],
                self.plan.placeholders,
                mutates=self.plan.mutates,
                calls=self.calls[r],
                sharing=sharing[r],
            )
            for r in range(self.size)
        ]

    def alone(self) -> RankResult:
        """Run the first rank by itself, given what the collectives gave it, and return what it computes."""
        timing = self.timing if isinstance(self.timing, str) else partial(self.timing, 0)
        steps = run_rank(self.plan, 0, self.constants[0], self.inputs_alone, domain=self.domain, timing=timing)
        answers = iter(self.answers)
        answer: torch.Tensor | None = None
        while True:
            try:
                _, event = steps.send(answer)
            except StopIteration as stop:
                result: RankResult = stop.value
                return result
            answer = None
            if isinstance(event, Join):
                for one in event.under_way:
                    if not one.done:
                        one.write(next(answers))
            elif not isinstance(event, UnderWay):
                answer = next(answers)
            elif event.early:
                event.write(next(answers))

    def _inputs(self) -> list[Any]:
        specs = self.program.sources.chosen(self.plan.placeholders, 0)
        parts: dict[tuple[str, ...], list[Any]] = {}
        inputs = []
        for spec in specs:
            names = tuple(name for name, placement in spec.placements if placement.kind != "replicated")
            if names not in parts:
                parts[names] = [_part(names, self.program.mesh, rank) for rank in range(self.size)]
            key = spec, self.program.mesh, self.program.seed, self.domain.name
            made = None if self.plan.mutates else _READ.get(key)
            if made is None:
                made = _input(spec, self.program.sources, parts[names], self.domain)
                if isinstance(made, _Stacked) and not self.plan.mutates:
                    _READ[key] = made
            inputs.append(made)
        return inputs

    def _together(self, step: Step, values: list[Any]) -> Any:
        """Call an op once for all ranks."""
        args, kwargs = arguments(step, values, _filler(values, self.constants[0]))
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _Stacked)]
        if not places:
            made = self._carried(step, step.run(*args, **kwargs))
            return pytree.tree_map_only(torch.Tensor, self._spread, made) if self.plan.mutates else made

        def call(*tensors: torch.Tensor) -> Any:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            rank_args, rank_kwargs = pytree.tree_unflatten(given, tree)
            return self._carried(step, step.run(*rank_args, **rank_kwargs))

        try:
            found = torch.vmap(call)(*(leaves[place].tensor for place in places))
        except Exception:  # noqa: BLE001 - a kernel that looks at values, or one that raises on some rank
            return self._one_by_one(step, values)
        return pytree.tree_map_only(torch.Tensor, self._stacked, found)

    def _one_by_one(self, step: Step, values: Sequence[Any]) -> Any:
        """Call an op on every rank's slices; let collectives meet."""
        slots = _slots_of(step)
        leaves, tree = pytree.tree_flatten([values[slot] for slot in slots])
        plain = not any(isinstance(values[slot], (tuple, list, dict)) for slot in slots)
        found: list[Any] = []
        for rank, one in enumerate(_slices(leaves, self.size)):
            given = dict(zip(slots, one if plain else pytree.tree_unflatten(one, tree), strict=True))
            args, kwargs = arguments(step, given, _filler(given, self.constants[rank]))  # type: ignore[arg-type]
            found.append(step.run(rank, *args, **kwargs) if step.op.collective else step.run(*args, **kwargs))
        if step.op.collective:
            found = self._met(step, found)
        if isinstance(found[0], _Whole):
            return self._stacked(found[0].tensor)
        return self._restacked([self._carried(step, one) for one in found])

    def _met(self, step: Step, generators: Sequence[Any]) -> list[Any]:
        """Drive every rank's side of a collective to its end; return what each of them returns."""
        answers: list[Any] = [None] * self.size
        late: list[_UnderWay] = []
        while True:
            requests: list[Request] = []
            starts: list[Start] = []
            waits = 0
            ended: list[Any] = []
            for rank, generator in enumerate(generators):
                try:
                    asked = generator.send(answers[rank])
                except StopIteration as stop:
                    ended.append(stop.value)
                    continue
                if isinstance(asked, Await):
                    waits += 1
                    self._arrive(asked.tensor)
                    continue
                self.calls[rank].append(Call(step.name, asked.collective))
                if isinstance(asked, Start):
                    starts.append(asked)
                requests.append(Request(asked.collective, asked.tensor))
            if self.size not in (len(ended), waits, len(requests)) or len(starts) not in (0, self.size):
                raise _NotStackable
            if ended:
                return self._started(late, ended)
            answers = [None] * self.size
            if starts:
                late += self._start(step, starts)
            elif requests:
                answers = self._answers_to(requests)

    def _answers_to(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        answers = self._complete(requests)
        self.answers.append(answers[0])
        return answers

    def _start(self, step: Step, starts: Sequence[Start]) -> list[_UnderWay]:
        """Let all ranks start a collective; returns it if it is to be carried out later."""
        timing = self.timing if isinstance(self.timing, str) else self.timing(0, step.name)
        under_way = [Outstanding(timing, self.domain).start(step.name, one) for one in starts]
        begun = _UnderWay(starts, [one.tensor for one in under_way])
        if timing != "issue":
            return [begun]
        self._carry_out(begun)
        return []

    def _carry_out(self, begun: _UnderWay) -> None:
        requests = [Request(s.collective, t) for s, t in zip(begun.starts, begun.tensors, strict=True)]
        for start, answer in zip(begun.starts, self._answers_to(requests), strict=True):
            if start.output.numel():
                start.output.copy_(answer.view(start.output.shape))
        if begun.result is not None:
            begun.result.copy_(torch.stack([start.output for start in begun.starts]))

    def _started(self, late: Sequence[_UnderWay], ended: list[Any]) -> list[Any]:
        """What a step gives that has started collectives: the stack of it is what is written into when they arrive."""
        if not late:
            return ended
        if not all(isinstance(one, torch.Tensor) for one in ended):
            raise _NotStackable
        result = torch.stack(ended)
        for begun in late:
            for tensor in (result, begun.starts[0].output):
                self.under_way[storage_of(tensor)] = begun
            begun.result = result if storage_of(ended[0]) == storage_of(begun.starts[0].output) else None
        return [_Whole(result)] * self.size

    def _arrive(self, tensor: torch.Tensor) -> None:
        """Carry out what was to write into the storage of a tensor."""
        begun = self.under_way.pop(storage_of(tensor), None)
        if begun is not None:
            self.under_way = {place: one for place, one in self.under_way.items() if one is not begun}
            self._carry_out(begun)

    def _complete(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """What every rank is answered. All ranks ask at once; those of a communicator meet if all its members name it."""
        answers: list[Any] = [None] * self.size
        for rank, request in enumerate(requests):
            members = request.collective.communicator
            if answers[rank] is not None:
                continue
            if rank not in members or not all(0 <= m < self.size and answers[m] is None for m in members):
                raise _NotStackable
            calls: list[Collective] = [requests[m].collective for m in members]
            if any(call.channel != request.collective.channel for call in calls) or mismatch(calls) is not None:
                raise _NotStackable
            for member, answer in zip(members, complete(calls, [requests[m].tensor for m in members]), strict=True):
                answers[member] = answer
        return answers

    def _carried(self, step: Step, value: Any) -> Any:
        if not step.carry:
            return value
        return self.domain.constant(value) if step.constant else self.domain.carry(value)

    def _restacked(self, found: Sequence[Any]) -> Any:
        """Every rank's value as one; they have to nest alike, and to have the same shapes."""
        if all(isinstance(one, torch.Tensor) for one in found):
            return self._column(found)
        flat = [pytree.tree_flatten(one) for one in found]
        tree = flat[0][1]
        if any(other != tree for _, other in flat):
            raise _NotStackable
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([self._column(column) for column in columns], tree)

    def _column(self, column: Sequence[Any]) -> Any:
        """One leaf of every rank's value."""
        first = column[0]
        if isinstance(first, torch.Tensor):
            if any(one.shape != first.shape or one.dtype != first.dtype for one in column):
                raise _NotStackable
            return self._stacked(torch.stack(list(column)))
        if all(type(one) is type(first) and one == first for one in column):
            return first
        raise _NotStackable

    def _spread(self, value: Any) -> _Stacked:
        """One value for each rank, where all ranks may write into theirs."""
        if isinstance(value, _Stacked):
            return value
        if value.numel() * self.size > _MOST_ELEMENTS:
            raise _NotStackable
        return _Stacked(torch.stack([value] * self.size))

    def _stacked(self, tensor: torch.Tensor) -> _Stacked:
        if tensor.numel() > _MOST_ELEMENTS:
            raise _NotStackable
        return _Stacked(tensor)


def _same(value: Any, known: Any) -> bool:
    """Whether a value is another one, to the bit."""
    if not isinstance(value, _Stacked) or not isinstance(known, _Stacked):
        return False
    mine, other = value.tensor, known.tensor
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    bits = mine.dtype == torch.float64
    return torch.equal(*(t.view(torch.int64) if bits else t for t in (mine, other)))


def _check(alone: RankResult, stacked: RankResult, tolerance: float) -> None:
    """Raise unless what a rank has computed alone stands in its slices, and shares storage as these do."""
    if alone.error is not None or storage_partition(alone) != storage_partition(stacked):
        raise _NotStackable
    for delta in compare_ranks(alone, stacked):
        if delta.problem or delta.overflow or delta.difference > tolerance * delta.scale:
            raise _NotStackable


def _input(spec: InputSpec, sources: Sources, parts: Sequence[Any], domain: Domain) -> Any:
    """An input on all ranks: made once for those of the same part; kept once where that is all of them."""
    first: dict[Any, int] = {}
    for rank, part in enumerate(parts):
        first.setdefault(part, rank)
    shapes = {spec.local_shape(sources.mesh, rank) for rank in first.values()}
    if len(shapes) > 1 or (len(first) > 1 and len(parts) * prod(*shapes) > _MOST_ELEMENTS):
        raise _NotStackable
    made = domain.carry(spec.values_of(sources.mesh, list(first.values()), sources.seed, domain))
    if len(first) == 1:
        return made[0]
    if len(first) == len(parts):
        return _Stacked(made)
    numbers = {part: number for number, part in enumerate(first)}
    return _Stacked(made[torch.tensor([numbers[part] for part in parts])])


def _part(dims: Sequence[str], mesh: Mesh, rank: int) -> tuple[Any, ...]:
    """Where a rank stands in mesh dims: what the values of inputs that are placed over these depend on."""
    return tuple((dim.position(rank), len(dim.group(rank))) for dim in map(mesh.dim, dims))


def _filler(values: Any, constants: dict[str, Any]) -> Callable[[Any], Any]:
    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return values[leaf.index]
        return known_constant(leaf, constants) if isinstance(leaf, RankConstant) else leaf

    return fill


def _slots_of(step: Step) -> list[int]:
    found = {leaf.index for leaf in _templates(step) if isinstance(leaf, Slot)}
    return sorted(found | {slot for _, slot in step.slots})


def _constants_of(step: Step) -> list[str]:
    return [leaf.name for leaf in _templates(step) if isinstance(leaf, RankConstant)] if step.nested else []


def _templates(step: Step) -> list[Any]:
    found: list[Any] = []
    map_aggregate((step.args, step.kwargs), found.append)
    return found


def _slices(leaves: Sequence[Any], ranks: int) -> list[list[Any]]:
    """Per rank, its part of each of some values."""
    columns = [leaf.tensor.unbind(0) if isinstance(leaf, _Stacked) else (leaf,) * ranks for leaf in leaves]
    return [[column[rank] for column in columns] for rank in range(ranks)]


__all__ = ["STACKED_FROM", "run_stacked"]
