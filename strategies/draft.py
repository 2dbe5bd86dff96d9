"""A program on its way: steps over numbered values, the same for all ranks, of which only what is needed becomes graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tcverify.program import GraphBuilder, InputSpec, Mesh, Placement, Program, Recipe, spmd_program


@dataclass(frozen=True, slots=True)
class Layout:
    """How activations are laid out: [B, S, ·] when `order` is "bs", [S, B, ·] when "sb"; `flat` makes the two one dim."""

    order: str = "bs"
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Value:
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
    layout: Layout = Layout()
    rms: float = 1.0
    dense: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Stands in arguments for the rank's group of a mesh dim."""

    dim: str


class _Rank:
    """Stands in arguments for the rank's number."""


RANK = _Rank()


@dataclass(frozen=True, slots=True)
class _Step:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: tuple[str, ...]


@dataclass(slots=True)
class Draft:
    """Collects inputs and steps. `labels` and `scope` (the labels of what is being written) go into the program's."""

    mesh: Mesh
    scope: tuple[str, ...] = ()
    _makers: list[InputSpec | _Step] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def input(
        self,
        role: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placements: tuple[tuple[str, Placement], ...],
        recipe: Recipe,
        layout: Layout = Layout(),
        rms: float = 1.0,
    ) -> Value:
        """Add an input whose name begins with `role`."""
        name, number = role, 1
        while name in self._names:
            number += 1
            name = f"{role}{number}"
        self._names.add(name)
        self._makers.append(InputSpec(name, shape, dtype, placements, recipe))
        return Value(len(self._makers) - 1, dtype, layout, rms)

    def call(self, op: str, like: Value, *args: Any, labels: tuple[str, ...] = (), **kwargs: Any) -> Value:
        """Add a call of `op`, whose result has the dtype, layout and size of `like`."""
        self._makers.append(_Step(op, args, kwargs, (*self.scope, *labels)))
        return Value(len(self._makers) - 1, like.dtype, like.layout, like.rms, like.dense)

    def program(self, result: Any, seed: int, labels: Iterable[str]) -> Program:
        """Build the program that returns `result`: a value or nested tuples, lists and dicts of values.

        What the result does not need is left out, and so are its labels.
        """
        live = self._live(result)
        steps = [(number, self._makers[number]) for number in sorted(live)]
        inputs = [(number, maker) for number, maker in steps if isinstance(maker, InputSpec)]
        calls = [(number, maker) for number, maker in steps if isinstance(maker, _Step)]
        found = dict.fromkeys(label for _, step in calls for label in step.labels)
        layers = sum(label.startswith("layer ") for label in found)
        shown = [f"layers={layers}", *labels, *sorted(label for label in found if not label.startswith("layer "))]
        if any(spec.recipe.kind in ("zero_rows", "cancelling") for _, spec in inputs):
            shown.append("degenerate")

        def build(builder: GraphBuilder) -> Any:
            nodes: dict[int, fx.Node] = {number: builder.input(spec.name) for number, spec in inputs}
            groups = {dim.name: builder.group(dim.name) for dim in self.mesh.dims}

            def fill(arg: Any) -> Any:
                if isinstance(arg, Value):
                    return nodes[arg.number]
                if isinstance(arg, Group):
                    return groups[arg.dim]
                return builder.rank if arg is RANK else arg

            for number, step in calls:
                if step.op == "getitem":
                    nodes[number] = builder.getitem(nodes[step.args[0].number], step.args[1])
                else:
                    nodes[number] = builder.call(step.op, *map(fill, step.args), **step.kwargs)
            return _map(lambda value: nodes[value.number], result)

        return spmd_program(self.mesh, [spec for _, spec in inputs], build, seed=seed, labels=shown)

    def _live(self, result: Any) -> set[int]:
        live: set[int] = set()
        _map(lambda value: live.add(value.number), result)
        for number in range(len(self._makers) - 1, -1, -1):
            maker = self._makers[number]
            if number in live and isinstance(maker, _Step):
                live.update(arg.number for arg in maker.args if isinstance(arg, Value))
        return live


def _map(function: Callable[[Value], Any], result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(_map(function, r) for r in result)
    if isinstance(result, dict):
        return {key: _map(function, r) for key, r in result.items()}
    return function(result)
