"""What is known of the steps of a sketch: what they really produce, and how their recorded metadata relates to that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tcverify.ops import TensorSpec
from tcverify.shrink.graph.sketch import Ref, Sketch, SketchStep, live_names

#: The result of a step if unknown.
UNKNOWN = object()

#: How recorded metadata relates to what a step produces: it says so; it follows from what is recorded for the operands,
#: which is wrong; it says something else.
RIGHT, FOLLOWS, WRONG = "right", "follows", "wrong"


@dataclass(frozen=True, slots=True)
class Typing:
    """What is known of one graph.

    Attributes:
        real: what each step produces, as specs, or UNKNOWN.
        records: how the recorded metadata of each step relates to it; steps without a record are left out.
        misfits: steps whose operands do not fit together, as they came.
    """

    real: dict[str, Any]
    records: dict[str, str]
    misfits: frozenset[str]


#: Of a graph of which nothing is known.
NOTHING = Typing({}, {}, frozenset())


@dataclass(frozen=True)
class Facts:
    """A sketch and the typing of each of its graphs."""

    sketch: Sketch
    typings: tuple[Typing, ...]

    @cached_property
    def steps(self) -> tuple[dict[str, SketchStep], ...]:
        """Per graph, its steps by name, in order."""
        return tuple({step.name: step for step in graph} for graph in self.sketch.graphs)

    @cached_property
    def users(self) -> tuple[dict[str, list[SketchStep]], ...]:
        """Per graph, the steps that read each step."""
        found: list[dict[str, list[SketchStep]]] = []
        for graph in self.sketch.graphs:
            users: dict[str, list[SketchStep]] = {step.name: [] for step in graph}
            for step in graph:
                for name in step.reads:
                    users[name].append(step)
            found.append(users)
        return tuple(found)

    @cached_property
    def positions(self) -> tuple[dict[str, int], ...]:
        return tuple({step.name: i for i, step in enumerate(graph)} for graph in self.sketch.graphs)

    @cached_property
    def calls(self) -> list[str]:
        """The names of all calls, in order, each once."""
        return list(dict.fromkeys(step.name for graph in self.sketch.graphs for step in graph if step.calls))

    @cached_property
    def aligned(self) -> bool:
        """Whether all graphs do the same calls under the same names: ranks then gain and lose collectives together."""
        outlines = {tuple((s.name, s.op, tuple(s.reads)) for s in graph) for graph in self.sketch.graphs}
        return len(outlines) == 1

    @cached_property
    def live(self) -> tuple[set[str], ...]:
        return tuple(live_names(graph, lambda step: step.effect) for graph in self.sketch.graphs)

    @cached_property
    def names(self) -> set[str]:
        """All names that are taken."""
        return {name for steps in self.steps for name in steps} | {spec.name for spec in self.sketch.inputs}

    def where(self, name: str) -> list[int]:
        """The graphs that have this step."""
        return [i for i, steps in enumerate(self.steps) if name in steps]

    def types(self, name: str, graphs: Sequence[int] | None = None) -> list[tuple[tuple[int, ...], Any]] | None:
        """Shape and dtype of a step in every graph, or in these, that has it; None when it is not known to be one tensor."""
        found = []
        for i in self.where(name):
            if graphs is not None and i not in graphs:
                continue
            real = self.typings[i].real[name]
            if not isinstance(real, TensorSpec):
                return None
            found.append((real.shape, real.dtype))
        return found

    def tensor(self, name: str) -> bool:
        """Whether a step is known to be one tensor in every graph that has it."""
        return self.types(name) is not None

    def precedes(self, first: str, second: str) -> bool:
        """Whether `first` stands before `second` in every graph that has `second`."""
        return all(self.positions[i].get(first, math.inf) < self.positions[i][second] for i in self.where(second))

    def replaceable(self, name: str, by: str) -> bool:
        """Whether `by` stands before `name` in every graph that has it, and is of the same shape and dtype."""
        if name == by:
            return False
        for i in self.where(name):
            first, second = self.typings[i].real.get(by), self.typings[i].real[name]
            if not isinstance(first, TensorSpec) or not isinstance(second, TensorSpec):
                return False
            if (first.shape, first.dtype) != (second.shape, second.dtype):
                return False
            if self.positions[i][by] > self.positions[i][name]:
                return False
        return True

    def rank_shapes(self, name: str, graphs: Sequence[int] | None = None) -> dict[int, tuple[int, ...]]:
        """The shape of a step by rank that has it; empty where it is not a tensor of one dtype and number of dims on all.

        Args:
            graphs: ranks that run others do not count.
        """
        specs = {}
        for rank, binding in enumerate(self.sketch.ranks):
            if graphs is not None and binding.graph not in graphs:
                continue
            if name in self.steps[binding.graph]:
                specs[rank] = self.typings[binding.graph].real[name]
        tensors = {rank: spec for rank, spec in specs.items() if isinstance(spec, TensorSpec)}
        if len(tensors) < len(specs) or len({(len(t.shape), t.dtype) for t in tensors.values()}) > 1:
            return {}
        return {rank: tensor.shape for rank, tensor in tensors.items()}


def rename_steps(facts: Facts, names: Mapping[str, str]) -> Facts:
    """Return the same under other names of steps and inputs."""

    def leaf(value: Any) -> Any:
        return Ref(names[value.name]) if isinstance(value, Ref) and value.name in names else value

    def step_renamed(step: SketchStep) -> SketchStep:
        name = names.get(step.name, step.name)
        target = name if step.op == "placeholder" and step.target == step.name else step.target
        return replace(step.mapped(leaf), name=name, target=target)

    def keys(known: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in known.items()}

    sketch = replace(
        facts.sketch,
        graphs=tuple(tuple(step_renamed(step) for step in graph) for graph in facts.sketch.graphs),
        inputs=tuple(replace(spec, name=names.get(spec.name, spec.name)) for spec in facts.sketch.inputs),
    )
    typings = (Typing(keys(t.real), keys(t.records), frozenset(keys(dict.fromkeys(t.misfits)))) for t in facts.typings)
    return Facts(sketch, tuple(typings))


__all__ = ["FOLLOWS", "NOTHING", "RIGHT", "UNKNOWN", "WRONG", "Facts", "Typing", "rename_steps"]
