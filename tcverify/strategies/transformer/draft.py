"""A program on its way: steps over numbered values, the same for all ranks, of which only what is needed becomes graphs."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import InternalError
from tcverify.ops import ShapeError, TensorSpec, infer, lookup, resolve
from tcverify.ops.leaves import leaves
from tcverify.program import GraphBuilder, InputSpec, Mesh, Placement, Program, Recipe, spmd_program


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How activations are laid out: [B, S, ·] when `order` is "bs", [S, B, ·] when "sb"; `flat` makes the two one dim."""

    order: str = "bs"
    flat: bool = False


@dataclass(frozen=True, slots=True)
class DraftValue:
    """An activation, weight or tuple of the draft.

    Attributes:
        number: of the input or step that makes it.
        dtype: of its elements.
        layout: of its tokens; of no meaning for weights.
        rms: roughly, the root mean square of its elements; weights are scaled by it.
        dense: whether it is row-major, so that it can be viewed.
    """

    number: int
    dtype: torch.dtype
    layout: TokenLayout = TokenLayout()
    rms: float = 1.0
    dense: bool = True


@dataclass(frozen=True, slots=True)
class PerRank:
    """Stands in arguments for an integer, or list of integers, that depends on the rank; equal ones have one name."""

    name: str
    of: Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class DraftGroup:
    """Stands in arguments for the rank's group of a mesh dim."""

    dim: str


_SLICE = torch.ops.aten.slice.Tensor

#: Stands in arguments for the rank's number.
RANK = PerRank("rank", lambda rank: rank)


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A call of the draft.

    Attributes:
        at: where it stands: steps run in this order, those of one place in the order in which they were added.
        record: makes what the metadata says from what is true; None as a result means that it says nothing.
        on: where set, the step stays as long as that value is needed, although nobody may read its result: it writes.
        reads: numbers of its operands.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: tuple[str, ...]
    at: int
    record: Callable[[Any], Any] | None = None
    on: DraftValue | None = None
    reads: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        numbers = dict.fromkeys(value.number for value in leaves((self.args, self.kwargs), DraftValue))
        object.__setattr__(self, "reads", tuple(numbers))


@dataclass(slots=True)
class ProgramDraft:
    """Collects inputs and steps.

    Attributes:
        scope: labels of what is being written; they go into the program's.
        behind: the value behind which further steps stand; None puts them at the end.
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
    _fresh: Iterator[int] = field(default_factory=itertools.count)

    # ------------------------------------------------------------------------------------------------------- writing

    def input(
        self,
        role: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placements: tuple[tuple[str, Placement], ...],
        recipe: Recipe,
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

    def call(self, op: str, like: DraftValue, *args: Any, labels: tuple[str, ...] = (), **kwargs: Any) -> DraftValue:
        """Add a call of `op`, whose result has the dtype, layout and size of `like`."""
        number = len(self._makers)
        at = number if self.behind is None else self._place(self.behind)
        self._makers.append(DraftStep(op, args, kwargs, (*self.scope, *labels), at))
        return DraftValue(number, like.dtype, like.layout, like.rms, like.dense)

    def attempt(
        self, op: str, like: DraftValue, *args: Any, labels: tuple[str, ...] = (), **kwargs: Any
    ) -> DraftValue | None:
        """Add a call if every rank can run it, else nothing."""
        made = self.call(op, like, *args, labels=labels, **kwargs)
        try:
            found = self.specs(made)
        except ShapeError:
            self._makers.pop()
            return None
        first = found[0]
        return replace(made, dtype=first.dtype) if isinstance(first, TensorSpec) else made

    def _place(self, value: DraftValue) -> int:
        maker = self._makers[value.number]
        return maker.at if isinstance(maker, DraftStep) else -1

    # ------------------------------------------------------------------------------------------------------- editing

    def step(self, value: DraftValue) -> DraftStep | None:
        """The step that makes a value; None for inputs."""
        maker = self._makers[value.number]
        return maker if isinstance(maker, DraftStep) else None

    def steps(self, result: Any) -> list[tuple[DraftValue, DraftStep]]:
        """The steps that `result` needs, in order, and what they make."""
        found = []
        for number in self._order(self._live(result)):
            maker = self._makers[number]
            if isinstance(maker, DraftStep):
                found.append((DraftValue(number, torch.float32), maker))
        return found

    def change(self, value: DraftValue, **fields: Any) -> None:
        """Change fields of the step that makes `value`; it gets the labels of `scope` besides its own."""
        step = self._makers[value.number]
        if not isinstance(step, DraftStep):
            raise InternalError("an input of a draft cannot be changed")
        self._makers[value.number] = replace(step, labels=(*step.labels, *self.scope), **fields)
        self._specs.clear()

    def redirect(self, old: DraftValue, new: DraftValue) -> None:
        """Let the steps that read `old` read `new`, except those that `new` depends on."""
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

    def copy(self) -> ProgramDraft:
        """A copy to which steps and inputs can be added, and which can be changed, apart from this draft."""
        made = copy(self)
        made._makers, made._inputs = self._makers.copy(), self._inputs.copy()
        made._names, made._specs = self._names.copy(), self._specs.copy()
        return made

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
            direct = isinstance(maker, DraftStep) and all(number in self._specs for number in maker.reads)
            self._type([value.number] if direct else self._order(self._live(value, effects=False)))
        return self._specs[value.number]

    def _type(self, numbers: Iterable[int]) -> None:
        self._classify()
        for number in numbers:
            if number not in self._specs:
                self._specs[number] = self._infer(self._makers[number])

    def shape(self, value: DraftValue) -> tuple[int, ...] | None:
        """Shape of the value; None where it is not a tensor of one shape on all ranks."""
        found = self.specs(value)
        shapes = {spec.shape if isinstance(spec, TensorSpec) else None for spec in found}
        return shapes.pop() if len(shapes) == 1 else None

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

    def _infer(self, maker: InputSpec | DraftStep) -> tuple[Any, ...]:
        if isinstance(maker, InputSpec):
            found = []
            for ranks in self._classes:
                plain = TensorSpec.contiguous(maker.local_shape(self.mesh, ranks[0]), maker.dtype)
                found.append(replace(plain, alias=next(self._fresh)))
            return tuple(found)
        if maker.op == "getitem":
            value, index = maker.args
            return tuple(spec[index] for spec in self._specs[value.number])
        target = resolve(maker.op)
        inferred = [self._infer_on(ranks[0], maker, number) for number, ranks in enumerate(self._classes)]
        if target is _SLICE and any(isinstance(arg, PerRank) for arg in maker.args):
            # Bounds may have been chosen for an operand that has become smaller since.
            for number, ranks in enumerate(self._classes):
                if any(self._infer_on(rank, maker, number).shape != inferred[number].shape for rank in ranks[1:]):
                    raise ShapeError(f"{maker.op}: the chunks of ranks differ in shape")
        op = lookup(target)
        if op.collective and len(self._classes) > 1:
            fused = "compute" in op.resources  # what it sends is what it has computed, of the shape of its result
            self._require_agreement(maker, inferred if fused else self._specs[maker.args[0].number])
        return tuple(inferred)

    def _infer_on(self, rank: int, step: DraftStep, number: int) -> Any:
        """What a step makes on a rank of class `number`."""

        def known(arg: Any) -> Any:
            return self._specs[arg.number][number] if isinstance(arg, DraftValue) else self._constant(arg, rank)

        args, kwargs = map_aggregate(step.args, known), dict(map_aggregate(step.kwargs, known))
        return infer(resolve(step.op), args, kwargs, self._fresh.__next__)

    def _require_agreement(self, step: DraftStep, specs: Any) -> None:
        """Raise ShapeError unless the members of each group of a collective contribute equal shapes."""
        numbers = {rank: number for number, ranks in enumerate(self._classes) for rank in ranks}
        for rank, number in numbers.items():
            members = self._constant(step.args[-1], rank)
            if any(specs[numbers[member]].layout != specs[number].layout for member in members):
                raise ShapeError(f"{step.op}: the members of {members} contribute different shapes")

    def _constant(self, arg: Any, rank: int) -> Any:
        if isinstance(arg, DraftGroup):
            return list(self.mesh.dim(arg.dim).group(rank))
        return arg.of(rank) if isinstance(arg, PerRank) else arg

    # ------------------------------------------------------------------------------------------------------ building

    def program(self, result: Any, seed: int, labels: Iterable[str]) -> Program:
        """Build the program that returns `result`: a value or nested tuples, lists and dicts of values.

        What the result does not need is left out, and so are its labels.
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
            nodes = {n: builder.input(maker.name) for n, maker in steps if isinstance(maker, InputSpec)}
            groups = {dim.name: builder.group(dim.name) for dim in self.mesh.dims}

            def fill(arg: Any) -> Any:
                if isinstance(arg, DraftValue):
                    return nodes[arg.number]
                if isinstance(arg, DraftGroup):
                    return groups[arg.dim]
                return builder.constant(arg.name, arg.of) if isinstance(arg, PerRank) else arg

            for number, step in calls:
                if step.op == "getitem":
                    nodes[number] = builder.getitem(nodes[step.args[0].number], step.args[1])
                else:
                    kwargs = dict(map_aggregate(step.kwargs, fill))
                    nodes[number] = builder.call(step.op, *map_aggregate(step.args, fill), **kwargs)
            for number, step in calls:
                if step.record is not None:
                    _record(nodes[number], step.record)
            return map_aggregate(result, fill)

        return spmd_program(self.mesh, inputs, build, seed=seed, labels=list(dict.fromkeys(shown)))

    def _live(self, result: Any, effects: bool = True) -> set[int]:
        """Numbers of what `result` needs, steps that write into it included."""
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
        """Inputs and other operands first, then by place, then by number."""
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


def _record(node: fx.Node, record: Callable[[Any], Any]) -> None:
    said = record(node.meta["val"])
    if said is None:
        del node.meta["val"]
    else:
        node.meta["val"] = said
