"""Programs whose tensors carry layouts, as data: the calls on whole tensors, before there are graphs.

Strategies draw plans and the reducer edits them; `PlacedPlan.build` builds the graphs of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import Layout, resolve, schema_of
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.ops.leaves import leaves
from tcverify.program.global_view.builder import Placed, PlacedBuilder
from tcverify.program.inputs import Recipe
from tcverify.program.program import Program

_PLAIN = Recipe()


@dataclass(frozen=True, slots=True)
class Use:
    """Placeholder in arguments for the tensor of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class PlacedInput:
    """An input: `shape` is that of the whole."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    dtype: torch.dtype = torch.float32
    recipe: Recipe = _PLAIN


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """One op on whole tensors.

    Attributes:
        name: of the result, within the plan.
        args: with `Use` for tensors; of `set` the operand, of `reduce` operand, dim and reduction.
        layout: of the result.
        stream_axis: dim of the result whose parts may be computed on separate streams.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    layout: Layout
    kwargs: dict[str, Any] = field(default_factory=dict)
    stream_axis: int | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that it reads, each once, in order."""
        return uses((self.args, self.kwargs))

    @property
    def reshards(self) -> bool:
        return self.op in (SET, REDUCE)

    @property
    def writes(self) -> bool:
        """Whether it writes into an operand."""
        schema = schema_of(resolve(self.op))
        return schema is not None and schema.is_mutable

    def reading(self, others: dict[str, str]) -> PlacedStep:
        """The step with other tensors in place of its operands."""

        def leaf(value: Any) -> Any:
            return Use(others[value.name]) if isinstance(value, Use) and value.name in others else value

        args, kwargs = map_aggregate(self.args, leaf), map_aggregate(self.kwargs, leaf)
        return replace(self, args=args, kwargs=dict(kwargs))


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A program.

    Attributes:
        outputs: names of the tensors of which every rank returns its parts.
    """

    world_size: int
    inputs: tuple[PlacedInput, ...]
    steps: tuple[PlacedStep, ...]
    outputs: tuple[str, ...]
    seed: int = 0
    labels: tuple[str, ...] = ()

    def live(self) -> PlacedPlan:
        """The plan without steps and inputs that no output needs. Ops that write into their operands are kept."""
        needed = set(self.outputs)
        for step in reversed(self.steps):
            if step.name in needed or step.writes:
                needed.update((step.name, *step.reads))
        inputs = tuple(spec for spec in self.inputs if spec.name in needed)
        return replace(self, inputs=inputs, steps=tuple(step for step in self.steps if step.name in needed))

    def build(self) -> Program:
        """Return the program.

        Raises:
            ProgramError: parts do not fit together, or nothing is returned.
            ShapeError: operands of an op do not.
        """
        return self.tensors()[0]

    def tensors(self) -> tuple[Program, dict[str, Placed]]:
        """Return the program, and all tensors by name. Raises as `build` does."""
        builder = PlacedBuilder(self.world_size)
        made: dict[str, Placed] = {}

        def leaf(value: Any) -> Any:
            return made[value.name] if isinstance(value, Use) else value

        for spec in self.inputs:
            made[spec.name] = builder.input(spec.name, spec.shape, spec.layout, spec.dtype, spec.recipe)
        for step in self.steps:
            args, kwargs = map_aggregate(step.args, leaf), dict(map_aggregate(step.kwargs, leaf))
            if step.op == SET:
                made[step.name] = builder.set(args[0], step.layout, stream_axis=step.stream_axis)
            elif step.op == REDUCE:
                x, dim, reduce_op = args
                made[step.name] = builder.reduce(x, dim, step.layout, reduce_op, stream_axis=step.stream_axis)
            else:
                made[step.name] = builder.call(
                    step.op, *args, layout=step.layout, stream_axis=step.stream_axis, **kwargs
                )
        if not self.outputs:
            raise ProgramError("a program returns nothing", "name an output")
        outputs = [made[name] for name in self.outputs]
        return builder.build(*outputs, seed=self.seed, labels=self.labels), made


def uses(value: Any) -> tuple[str, ...]:
    """The names of the tensors in arguments, each once, in order."""
    return tuple(dict.fromkeys(use.name for use in leaves(value, Use)))


__all__ = ["PlacedInput", "PlacedPlan", "PlacedStep", "Use", "uses"]
