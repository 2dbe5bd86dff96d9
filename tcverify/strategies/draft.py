"""A program under construction: inputs, and steps over numbered values, which are the same for all ranks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import InternalError
from tcverify.ops import Op, ShapeError, TensorSpec, infer, lookup, resolve
from tcverify.ops.leaves import leaves
from tcverify.program import GraphBuilder, InputSpec, Mesh, Placement, Program, Recipe, spmd_program

T = TypeVar("T")

UNIFORM = Recipe()

#: Largest number of results of a step.
MOST_RESULTS = 4096


class NoSite(Exception):
    """The program has no place for the intended step."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How activations are laid out: [B, S, ·] when `order` is "bs", [S, B, ·] when "sb"; `flat` makes the two one dim."""

    order: str = "bs"
    flat: bool = False


@dataclass(frozen=True, slots=True)
class DraftValue:
    """The result of an input or a step of the draft: a tensor, or several.

    Attributes:
        number: of the input or step.
        dtype: of its elements.
        layout: of its tokens, if they are activations of a transformer.
        rms: roughly, the root mean square of its elements; weights are scaled by it.
        dense: whether it is row-major, so that it can be viewed.
    """

    number: int
    dtype: torch.dtype = torch.float32
    layout: TokenLayout = TokenLayout()
    rms: float = 1.0
    dense: bool = True


@dataclass(frozen=True, slots=True)
class PerRank:
    """Placeholder in arguments for an integer, or list of integers, that depends on the rank; equal ones share a name."""

    name: str
    of: Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class DraftGroup:
    """Placeholder in arguments for the rank's group of a mesh dim."""

    dim: str


#: Placeholder in arguments for the rank's number.
RANK = PerRank("rank", lambda rank: rank)

_SLICE = torch.ops.aten.slice.Tensor


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A call of the draft.

    Attributes:
        at: its position: steps run in this order; those at one position in the order in which they were added.
        on: if set, the step is kept as long as that value is needed, even if its result is unused: it writes.
        only: ranks that run it; None means all. The result of such a step is not read elsewhere.
        reads: numbers of its operands.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: tuple[str, ...]
    at: int
    on: DraftValue | None = None
    only: frozenset[int] | None = None
    reads: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        numbers = dict.fromkeys(value.number for value in leaves((self.args, self.kwargs), DraftValue))
        object.__setattr__(self, "reads", tuple(numbers))


@dataclass(slots=True)
class ProgramDraft:
    """Collects inputs and steps. Their results are inferred on demand, once for all ranks of equal shapes.

    Attributes:
        scope: labels of the current part; they are added to the program's.
        behind: the value after which further steps are placed; None puts them at the end.
    """

    mesh: Mesh
    scope: tuple[str, ...] = ()
    behind: DraftValue | None = None
    _makers: list[InputSpec | DraftStep] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _classes: list[list[int]] = field(default_factory=list)
    _specs: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _inputs: list[InputSpec] = field(default_factory=list)
    _typed_inputs: int = -1

    def __len__(self) -> int:
        """Number of inputs and steps."""
        return len(self._makers)

    # ------------------------------------------------------------------------------------------------------- writing

    def input(
        self,
        role: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        placements: tuple[tuple[str, Placement], ...] = (),
        recipe: Recipe = UNIFORM,
        layout: TokenLayout = TokenLayout(),
        rms: float = 1.0,
    ) -> DraftValue:
        """Add an input whose name begins with `role`."""
        name, number = role, 1
        while name in self._names:
            number += 1
            name = f"{role}{number}"
        self._names.add(name)
        spec = InputSpec(name, shape, dtype, placements, recipe)
        self._makers.append(spec)
        self._inputs.append(spec)
        return DraftValue(len(self._makers) - 1, dtype, layout, rms)

    def call(
        self,
        op: str,
        *args: Any,
        like: DraftValue | None = None,
        rms: float | None = None,
        labels: tuple[str, ...] = (),
        only: frozenset[int] | None = None,
        **kwargs: Any,
    ) -> DraftValue:
        """Add a call of `op`, without checks.

        Args:
            like: has the dtype, layout and size of the result; by default the first operand.
            rms: of the result, where it has another size.
        """
        number = len(self._makers)
        at = number if self.behind is None else self._place(self.behind)
        self._makers.append(DraftStep(op, args, kwargs, (*self.scope, *labels), at, only=only))
        if like is None and args and isinstance(args[0], DraftValue):
            like = args[0]
        elif like is None:
            like = next(iter(leaves((args, kwargs), DraftValue)), DraftValue(number))
        return DraftValue(number, like.dtype, like.layout, like.rms if rms is None else rms, like.dense)

    def item(self, value: DraftValue, index: int, labels: tuple[str, ...] = ()) -> DraftValue:
        """Select one of several results."""
        return self.call("getitem", value, index, labels=labels)

    def typed_call(self, op: str, *args: Any, **kwargs: Any) -> DraftValue:
        """Add a call as `call` does. Raises NoSite, and adds nothing, if some rank cannot run it."""
        made = ProgramDraft.call(self, op, *args, **kwargs)
        try:
            found = self.specs(made)[0]
            self._admit(made.number)
        except (ShapeError, NoSite):
            self._specs.pop(made.number, None)
            self._makers.pop()
            raise NoSite from None
        if isinstance(found, TensorSpec) and found.dtype is not made.dtype:
            return replace(made, dtype=found.dtype)
        return made

    def _admit(self, number: int) -> None:
        """Raise NoSite if a new step fits by its shapes, but not otherwise."""

    def _place(self, value: DraftValue) -> int:
        maker = self._makers[value.number]
        return maker.at if isinstance(maker, DraftStep) else -1

    # ------------------------------------------------------------------------------------------------------- editing

    def step(self, value: DraftValue) -> DraftStep | None:
        """The step that makes a value; None for inputs."""
        maker = self._makers[value.number]
        return maker if isinstance(maker, DraftStep) else None

    def steps(self, result: Any) -> list[tuple[DraftValue, DraftStep]]:
        """The steps that `result` needs, in order, and their results."""
        found = []
        for number in self._order(self._live(result)):
            maker = self._makers[number]
            if isinstance(maker, DraftStep):
                found.append((DraftValue(number, torch.float32), maker))
        return found

    def change(self, value: DraftValue, **fields: Any) -> None:
        """Change fields of the step that makes `value`; it gets the labels of `scope` as well."""
        step = self._makers[value.number]
        if not isinstance(step, DraftStep):
            raise InternalError("an input of a draft cannot be changed")
        self._makers[value.number] = replace(step, labels=(*step.labels, *self.scope), **fields)
        self._specs.clear()

    def redirect(self, old: DraftValue, new: DraftValue) -> None:
        """Make the steps that read `old` read `new`, except those that `new` depends on."""
        before = self._live(new, effects=False)

        def turned(arg: Any) -> Any:
            return new if isinstance(arg, DraftValue) and arg.number == old.number else arg

        for number, maker in enumerate(self._makers):
            if not isinstance(maker, DraftStep) or number in before:
                continue
            if old.number in maker.reads:
                args = tuple(map_aggregate(maker.args, turned))
                kwargs = dict(map_aggregate(maker.kwargs, turned))
                self._makers[number] = replace(maker, args=args, kwargs=kwargs)
        self._specs.clear()

    def state(self) -> Any:
        """The state that `restore` needs to undo later changes."""
        return _contents(self)

    def restore(self, state: Any) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def check(self, result: Any) -> None:
        """Raise ShapeError unless every rank can run what `result` needs."""
        self._type(self._order(self._live(result)))

    # ------------------------------------------------------------------------------------------------------- shapes

    def specs(self, value: DraftValue) -> tuple[Any, ...]:
        """What the value is on each class of ranks: a spec, or a tuple of them.

        Raises:
            ShapeError: the arguments of the step, or of one that it depends on, do not fit together on some rank.
        """
        self._classify()
        if value.number not in self._specs:
            maker = self._makers[value.number]
            direct = isinstance(maker, InputSpec) or all(number in self._specs for number in maker.reads)
            self._type([value.number] if direct else self._order(self._live(value, effects=False)))
        return self._specs[value.number]

    def spec(self, value: DraftValue, rank: int = 0) -> TensorSpec:
        """The spec of a tensor on a rank. Raises NoSite if it is not a tensor."""
        specs = self.specs(value)
        found = specs[next(number for number, ranks in enumerate(self._classes) if rank in ranks) if rank else 0]
        if not isinstance(found, TensorSpec):
            raise NoSite
        return found

    def shape(self, value: DraftValue) -> tuple[int, ...]:
        """Shape of a tensor. Raises NoSite if it is not a tensor, or ranks differ in its shape."""
        shapes = {spec.shape if isinstance(spec, TensorSpec) else None for spec in self.specs(value)}
        found = shapes.pop()
        if shapes or found is None:
            raise NoSite
        return found

    def _type(self, numbers: Iterable[int]) -> None:
        self._classify()
        for number in numbers:
            if number not in self._specs:
                self._specs[number] = self._infer(number, self._makers[number])

    def _classify(self) -> None:
        if len(self._inputs) == self._typed_inputs:
            return
        classes: dict[Any, list[int]] = {}
        for rank in range(self.mesh.world_size):
            shapes = tuple(spec.local_shape(self.mesh, rank) for spec in self._inputs)
            classes.setdefault((shapes, tuple(len(dim.group(rank)) for dim in self.mesh.dims)), []).append(rank)
        found = list(classes.values())
        if found != self._classes:
            self._classes = found
            self._specs = {}
        self._typed_inputs = len(self._inputs)

    def _infer(self, number: int, maker: InputSpec | DraftStep) -> tuple[Any, ...]:
        """The result of an input or step on each class of ranks. Its storages have the same numbers on all."""
        storage = number * MOST_RESULTS
        if isinstance(maker, InputSpec):
            shapes = [maker.local_shape(self.mesh, ranks[0]) for ranks in self._classes]
            plain = {shape: TensorSpec.contiguous(shape, maker.dtype) for shape in dict.fromkeys(shapes)}
            found = {shape: replace(spec, alias=storage) for shape, spec in plain.items()}
            return tuple(found[shape] for shape in shapes)
        if maker.op == "getitem":
            value, index = maker.args
            return tuple(spec[index] for spec in self._specs[value.number])
        target = resolve(maker.op)
        op = lookup(target)

        def infer_on(rank: int, known: int) -> Any:
            """The result of the step on a rank of class `known`."""

            def fill(arg: Any) -> Any:
                return self._specs[arg.number][known] if isinstance(arg, DraftValue) else self._constant(arg, rank)

            args, kwargs = map_aggregate(maker.args, fill), dict(map_aggregate(maker.kwargs, fill))
            groups = self.mesh.groups(rank) if op.sized else {}
            return infer(target, args, kwargs, itertools.count(storage).__next__, groups)

        inferred = [infer_on(self._classes[0][0], 0)]
        if len(self._classes) > 1:
            given = maker.args, maker.kwargs
            varies = op.sized or bool(leaves(given, PerRank) or leaves(given, DraftGroup))
            operands = [[self._specs[operand][known] for operand in maker.reads] for known in range(len(self._classes))]
            for known, ranks in enumerate(self._classes[1:], 1):
                alike = not varies and operands[known] == operands[known - 1]
                inferred.append(inferred[-1] if alike else infer_on(ranks[0], known))
        if target is _SLICE and any(isinstance(arg, PerRank) for arg in maker.args):
            # Bounds may have been chosen for an operand that has become smaller since then.
            for known, ranks in enumerate(self._classes):
                if any(infer_on(rank, known).shape != inferred[known].shape for rank in ranks[1:]):
                    raise ShapeError(f"{maker.op}: the chunks of ranks differ in shape")
        if op.collective and op.phase != "wait" and len(self._classes) > 1:
            self._require_agreement(maker, op, inferred)
        return tuple(inferred)

    def _require_agreement(self, step: DraftStep, op: Op, inferred: Sequence[Any]) -> None:
        """Raise ShapeError unless the members of each group of a collective contribute equal shapes."""
        if op.group is not None and "all_to_all" in step.op:
            return  # its arguments determine how much each member sends to each
        numbers = {rank: number for number, ranks in enumerate(self._classes) for rank in ranks}
        if "compute" in op.resources:  # it sends a computed value of the shape of its result
            contributed = [inferred]
        else:
            contributed = [self._specs[value.number] for value in leaves(step.args[:1], DraftValue)]
        for rank, number in numbers.items():
            members = self._members(step, op, rank)
            for specs in contributed:
                if any(specs[numbers[member]].shape != specs[number].shape for member in members):
                    raise ShapeError(f"{step.op}: the members of {members} contribute different shapes")

    def _members(self, step: DraftStep, op: Op, rank: int) -> Sequence[int]:
        """The group of a collective; empty for communication between two ranks."""
        over = step.args[-1]
        if op.group is not None:
            return self.mesh.dim(over).group(rank)
        found = self._constant(over, rank)
        return found if isinstance(found, list) else ()

    def _constant(self, arg: Any, rank: int) -> Any:
        if isinstance(arg, DraftGroup):
            return list(self.mesh.dim(arg.dim).group(rank))
        return arg.of(rank) if isinstance(arg, PerRank) else arg

    # ------------------------------------------------------------------------------------------------------ building

    def program(self, result: Any, seed: int, labels: Iterable[str]) -> Program:
        """Build the program that returns `result`: a value or nested tuples, lists and dicts of values.

        Steps that the result does not need are dropped, with their labels.
        """
        steps = [(number, self._makers[number]) for number in self._order(self._live(result))]
        inputs = [maker for _, maker in steps if isinstance(maker, InputSpec)]
        calls = [(number, maker) for number, maker in steps if isinstance(maker, DraftStep)]
        found = dict.fromkeys(label for _, step in calls for label in step.labels)
        layers = sum(label.startswith("layer ") for label in found)
        shown = [f"layers={layers}", *labels, *sorted(label for label in found if not label.startswith("layer "))]
        if any(spec.recipe.kind in ("zero_rows", "cancelling") for spec in inputs):
            shown.append("degenerate")

        def build(builder: GraphBuilder) -> Any:
            for dim in self.mesh.dims:
                builder.group(dim.name)
            nodes = self._write(builder, [number for number, _ in steps])
            return map_aggregate(result, lambda arg: nodes[arg.number] if isinstance(arg, DraftValue) else arg)

        return spmd_program(self.mesh, inputs, build, seed=seed, labels=list(dict.fromkeys(shown)))

    def _write(
        self, builder: GraphBuilder, numbers: Iterable[int], instead: Mapping[tuple[int, int], int] | None = None
    ) -> dict[int, fx.Node]:
        """Add inputs and steps to a graph; return their nodes.

        Args:
            instead: by step and operand, what the step reads in its place.
        """
        nodes: dict[int, fx.Node] = {}
        number = -1

        def fill(arg: Any) -> Any:
            if isinstance(arg, DraftValue):
                return nodes[(instead or {}).get((number, arg.number), arg.number)]
            if isinstance(arg, DraftGroup):
                return builder.group(arg.dim)
            return builder.constant(arg.name, arg.of) if isinstance(arg, PerRank) else arg

        for number in numbers:
            maker = self._makers[number]
            if isinstance(maker, InputSpec):
                nodes[number] = builder.input(maker.name)
            elif maker.op == "getitem":
                nodes[number] = builder.getitem(nodes[maker.args[0].number], maker.args[1])
            else:
                kwargs = dict(map_aggregate(maker.kwargs, fill))
                nodes[number] = builder.call(maker.op, *map_aggregate(maker.args, fill), **kwargs)
        return nodes

    def _live(self, result: Any, effects: bool = True) -> set[int]:
        """Numbers of what `result` needs, including steps that write into it."""
        live: set[int] = set()
        writers = [
            (number, maker.on.number)
            for number, maker in enumerate(self._makers)
            if effects and isinstance(maker, DraftStep) and maker.on is not None
        ]
        todo = [value.number for value in leaves(result, DraftValue)]
        while todo:
            while todo:
                number = todo.pop()
                maker = self._makers[number]
                if number not in live and isinstance(maker, DraftStep):
                    todo += maker.reads
                live.add(number)
            todo = [number for number, on in writers if on in live and number not in live]
        return live

    def _order(self, numbers: set[int]) -> list[int]:
        """Inputs and other operands first, then by position, then by number."""
        readers: dict[int, list[int]] = {}
        missing: dict[int, int] = {}
        ready: list[tuple[int, int]] = []
        for number in numbers:
            maker = self._makers[number]
            operands = maker.reads if isinstance(maker, DraftStep) else ()
            missing[number] = len(operands)
            for operand in operands:
                readers.setdefault(operand, []).append(number)
            if not operands:
                ready.append((maker.at if isinstance(maker, DraftStep) else -1, number))
        heapq.heapify(ready)
        found = []
        while ready:
            _, number = heapq.heappop(ready)
            found.append(number)
            for reader in readers.get(number, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    step = self._makers[reader]
                    heapq.heappush(ready, (step.at if isinstance(step, DraftStep) else -1, reader))
        return found


# -------------------------------------------------------------------------------------------------- what may not fit


def fork(writer: T) -> T:
    """A copy of a writer, with its own lists, dicts and draft, that can be changed independently."""
    made = copy(writer)
    for name, value in _contents(writer).items():
        setattr(made, name, fork(value) if isinstance(value, ProgramDraft) else value)
    return made


def attempt(writer: Any, write: Callable[..., object], *args: Any) -> bool:
    """Call `write(writer, *args)`. If that does not fit, the writer and its draft are restored."""
    before, draft = _contents(writer), writer.draft.state()
    try:
        write(writer, *args)
    except (NoSite, ShapeError):
        for name, value in before.items():
            setattr(writer, name, value)
        writer.draft.restore(draft)
        return False
    return True


def _contents(of: Any) -> dict[str, Any]:
    """The fields of a dataclass that can change, with copies of lists, sets and dicts."""
    found = {}
    for name in of.__dataclass_fields__:
        if hasattr(of, name):
            value = getattr(of, name)
            found[name] = value.copy() if type(value) in (list, set, dict) else value
    return found


__all__ = [
    "RANK", "UNIFORM", "DraftGroup", "DraftStep", "DraftValue", "NoSite", "PerRank", "ProgramDraft", "TokenLayout",
    "attempt", "fork",
]  # fmt: skip
