"""A resharding program under construction: the values so far, their layouts, and bounds of their magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import DeviceMesh, Layout, Resharding, TensorSpec, infer, resolve
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.ops.reductions import ReduceOp
from tcverify.ops.shapes import ShapeError
from tcverify.program import PlacedInput, PlacedPlan, PlacedStep, Recipe, Use
from tcverify.strategies.draft import NoSite
from tcverify.strategies.resharding.choices import ReshardingRecord, ReshardingSetting

#: Upper bound of values: next to large ones, small differences are lost in rounding.
LARGEST = 500.0


@dataclass(frozen=True, slots=True)
class ReshardingTensor:
    """A value.

    Attributes:
        shape: of the whole.
        spec: of each rank's part.
        bound: of the magnitude of elements.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    spec: TensorSpec
    bound: float

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def mesh(self) -> DeviceMesh:
        return self.layout.mesh

    @property
    def outer(self) -> bool:
        """Whether the one sharded dim, if any, is the outermost in memory."""
        return all(
            dim is None or all(size == 1 for size in self.spec.shape[:dim])
            for dim, parts in zip(self.layout.sharding, self.mesh.shape, strict=True)
            if parts > 1
        )


@dataclass
class ReshardingFlow:
    """A program so far.

    Attributes:
        pool: values, the newest last.
        outputs: values to be returned whether or not something reads them.
        marks: labels, by the step without which they are not earned.
    """

    world_size: int
    setting: ReshardingSetting
    inputs: list[PlacedInput] = field(default_factory=list)
    steps: list[PlacedStep] = field(default_factory=list)
    pool: list[ReshardingTensor] = field(default_factory=list)
    outputs: list[ReshardingTensor] = field(default_factory=list)
    marks: list[tuple[str, str]] = field(default_factory=list)
    given: dict[str, ReshardingTensor] = field(default_factory=dict)
    _storages: int = 0

    def attempt(self, motif: Callable[[ReshardingFlow, ReshardingRecord], None], record: ReshardingRecord) -> bool:
        """Write a record; one that does not fit leaves no trace. Returns whether it fits."""
        grown: tuple[list[Any], ...] = self.inputs, self.steps, self.pool, self.outputs, self.marks
        before = [len(items) for items in grown]
        try:
            motif(self, record)
        except (NoSite, ProgramError, ShapeError):
            for items, length in zip(grown, before, strict=True):
                del items[length:]
            return False
        return True

    def input(self, shape: Sequence[int], layout: Layout, dtype: torch.dtype | None = None) -> ReshardingTensor:
        """A new input, of values that hardly grow in sums of products."""
        name, kind = f"x{len(self.inputs)}", self.setting.dtype if dtype is None else dtype
        whole = kind.is_floating_point
        recipe = Recipe() if whole else Recipe("integers", 3.0)
        local = layout.local_shape(shape)
        self.inputs.append(PlacedInput(name, tuple(shape), layout, kind, recipe))
        plain = TensorSpec.contiguous(local, kind)
        spec = TensorSpec(local, plain.stride, kind, 0, self._fresh())
        found = self.given[name] = ReshardingTensor(name, tuple(shape), layout, spec, 1.0 if whole else 2.0)
        self.pool.append(found)
        return found

    def call(
        self,
        op: str,
        *args: Any,
        layout: Layout | None = None,
        stream_axis: int | None = None,
        bound: float | None = None,
    ) -> ReshardingTensor:
        """A local op. By default its result has the layout of its first operand, and is no larger.

        Raises:
            NoSite: its operands do not fit together, or its result may be too large.
        """
        operands = [arg for arg in args if isinstance(arg, ReshardingTensor)]
        if any(operand.mesh != operands[0].mesh for operand in operands):
            raise NoSite
        specs = map_aggregate(args, lambda leaf: leaf.spec if isinstance(leaf, ReshardingTensor) else leaf)
        spec = infer(resolve(op), specs, {}, self._fresh)
        made = operands[0].layout if layout is None else layout
        shape = made.global_shape(spec.shape)
        made.check(shape)
        return self._add(op, args, made, shape, spec, operands[0].bound if bound is None else bound, stream_axis)

    def set(self, x: ReshardingTensor, layout: Layout, stream_axis: int | None = None) -> ReshardingTensor:
        """The value in another layout. Raises as `call` does."""
        made = Resharding(x.layout, layout, x.shape)
        return self._add(SET, (x,), layout, x.shape, self._part(made, x), x.bound, stream_axis)

    def reduce(
        self, x: ReshardingTensor, dim: int, layout: Layout, reduction: ReduceOp, stream_axis: int | None = None
    ) -> ReshardingTensor:
        """The value reduced over a dim, in another layout. Raises as `call` does."""
        if reduction == "avg" and not x.dtype.is_floating_point:
            reduction = "sum"
        made = Resharding(x.layout, layout, x.shape, dim, reduction)
        count = x.shape[dim]
        bound = {"sum": x.bound * count, "product": max(x.bound, 1.0) ** count}.get(reduction, x.bound)
        args = x, dim, reduction
        return self._add(REDUCE, args, layout, made.result_shape, self._part(made, x), bound, stream_axis)

    def read(self, number: int) -> ReshardingTensor:
        """A value, counted from the newest."""
        return self.pool[-1 - number % len(self.pool)]

    def mark(self, label: str) -> None:
        """Label the program, if the newest step is still needed at the end."""
        self.marks.append((self.steps[-1].name, label))

    def own(self, x: ReshardingTensor) -> bool:
        """Whether something made the value's storage: it is no input and shares none with one."""
        return all(given.spec.alias != x.spec.alias for given in self.given.values())

    def plan(self, labels: Sequence[str]) -> PlacedPlan:
        """The program, without what is dead: it returns the outputs and, newest first, unused values."""
        read = {name for step in self.steps for name in step.reads}
        unread = [value.name for value in reversed(self.pool) if value.name not in read]
        wanted = dict.fromkeys([self.pool[-1].name, *(value.name for value in self.outputs), *unread])
        names = tuple(wanted)[: self.setting.outputs]
        steps, inputs = tuple(self.steps), tuple(self.inputs)
        plan = PlacedPlan(self.world_size, inputs, steps, names, self.setting.seed).live()
        alive = {step.name for step in plan.steps}
        earned = [label for name, label in self.marks if name in alive]
        return PlacedPlan(
            plan.world_size, plan.inputs, plan.steps, names, plan.seed, tuple(dict.fromkeys([*labels, *earned]))
        )

    def _part(self, made: Resharding, x: ReshardingTensor) -> TensorSpec:
        local = made.target.local_shape(made.result_shape)
        plain = TensorSpec.contiguous(local, x.dtype)
        return TensorSpec(local, plain.stride, x.dtype, 0, self._fresh())

    def _add(
        self,
        op: str,
        args: Any,
        layout: Layout,
        shape: tuple[int, ...],
        spec: TensorSpec,
        bound: float,
        axis: int | None,
    ) -> ReshardingTensor:
        if bound > LARGEST or (axis is not None and axis >= len(shape)):
            raise NoSite
        name = f"v{len(self.steps)}"
        given = map_aggregate(args, lambda leaf: Use(leaf.name) if isinstance(leaf, ReshardingTensor) else leaf)
        self.steps.append(PlacedStep(name, op, given, layout, stream_axis=axis))
        self.pool.append(ReshardingTensor(name, shape, layout, spec, bound))
        return self.pool[-1]

    def _fresh(self) -> int:
        self._storages += 1
        return self._storages


__all__ = ["LARGEST", "ReshardingFlow", "ReshardingTensor"]
