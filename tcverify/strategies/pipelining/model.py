"""Models in stages as data, the modules of their stages, and one training step of them without a pipeline.

Subjects build the modules of a rank from the same data, and run them under a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tcverify.errors import Unsupported
from tcverify.ops import qualified_name
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program

Tensor = torch.Tensor

#: Schedules by name, and how they place stages on ranks: one each, in rounds, or there and back.
SCHEDULES: Mapping[str, str] = {
    "GPipe": "one",
    "1F1B": "one",
    "LoopedBFS": "rounds",
    "Interleaved1F1B": "rounds",
    "InterleavedZeroBubble": "rounds",
    "ZBVZeroBubble": "back",
    "DualPipeV": "back",
}

#: Features of activations.
WIDTH = 2

_SQUARE, _ROW = (WIDTH, WIDTH), (WIDTH,)
_Layer = Callable[[Tensor, Sequence[Tensor]], Tensor]

#: Layers by name: the shapes of their parameters, and what they compute.
LAYERS: Mapping[str, tuple[Mapping[str, tuple[int, ...]], _Layer]] = {
    "linear": ({"weight": _SQUARE, "bias": _ROW}, lambda h, p: F.linear(h, p[0], p[1])),
    "mm": ({"weight": _SQUARE}, lambda h, p: h @ p[0]),
    "scale": ({"weight": _ROW}, lambda h, p: h * p[0]),
    "skip": ({"weight": _SQUARE}, lambda h, p: h + torch.tanh(h @ p[0])),
    "twice": ({"weight": _SQUARE}, lambda h, p: torch.tanh(h @ p[0]) @ p[0]),
    "unused": ({"weight": _ROW, "extra": _ROW}, lambda h, p: h * p[0]),
    "tanh": ({}, lambda h, p: torch.tanh(h)),
    "relu": ({}, lambda h, p: torch.relu(h)),
}

#: What a stage hands on beside its activation `h`, by name; `x` is the activation that it got.
ENDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two": lambda h, x: torch.tanh(h),
    "constant": lambda h, x: (h * 2).detach(),
    "mask": lambda h, x: h > 0,
    "through": lambda h, x: x,
}

#: Words of a stage that are no layers: it adds the keyword argument, or does not read the second tensor that it gets.
SHIFT, IGNORE = "shift", "ignore"

#: How losses are reduced over a microbatch.
LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "sum": torch.sum}


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step of a model in stages. All of it is data that options of a program hold.

    Attributes:
        schedule: name of the schedule that is to run it.
        stages: words per stage: "shift" or "ignore", layers, and at the end what is handed on beside the activation.
        microbatches: number of parts of the batch.
        rows: of the batch.
        frozen: stages whose parameters require no gradients.
        loss: how losses are reduced.
        scale_grads: whether gradients are divided by the number of microbatches.
    """

    schedule: str = "GPipe"
    stages: tuple[str, ...] = ("linear",)
    microbatches: int = 1
    rows: int = 1
    frozen: tuple[int, ...] = ()
    loss: str = "mean"
    scale_grads: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TrainingStep:
        """Read the options of a program.

        Raises:
            Unsupported: they describe no training step.
        """
        told = {one.name: options[one.name] for one in fields(cls) if one.name in options}
        try:
            step = cls(**told)
            known = {*LAYERS, *ENDS, SHIFT, IGNORE}
            sound = step.stages and all(stage and set(stage.split()) <= known for stage in step.stages)
            sound = sound and step.loss in LOSSES and step.schedule in SCHEDULES and 1 <= step.microbatches <= step.rows <= 64
        except (TypeError, AttributeError):
            sound = False
        if not sound or not isinstance(step.frozen, tuple):
            raise Unsupported("the options of the program describe no training step of a model in stages")
        return step

    def options(self) -> dict[str, Any]:
        """As options of a program."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank, of so many, on which the schedule expects a stage."""
        if SCHEDULES[self.schedule] == "back" and stage // ranks % 2:
            return ranks - 1 - stage % ranks
        return stage % ranks

    @property
    def shifted(self) -> bool:
        """Whether stages take the keyword argument."""
        return any(SHIFT in stage.split() for stage in self.stages)

    def parameters(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters of a stage."""
        return {
            f"s{stage}_{place}_{layer}_{name}": shape
            for place, layer in enumerate(self.stages[stage].split())
            if layer in LAYERS
            for name, shape in LAYERS[layer][0].items()
        }

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all inputs: the batch, its targets, the keyword argument, parameters."""
        batch = ["x", "target", *([SHIFT] if self.shifted else [])]
        found = dict.fromkeys(batch, (self.rows, WIDTH))
        for stage in range(len(self.stages)):
            found.update(self.parameters(stage))
        return found

    def module(self, stage: int, values: Mapping[str, Tensor]) -> Stage:
        """The module of a stage; its parameters share memory with these values."""
        return Stage(self, stage, values)

    def loss_of(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a microbatch."""
        differences = [one - target for one in as_tuple(output)]
        return reduce(torch.add, [LOSSES[self.loss](one * one) for one in differences])


class Stage(nn.Module):
    """The module of a stage: takes one or two tensors and gives one or two."""

    def __init__(self, step: TrainingStep, number: int, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._words = step.stages[number].split()
        wanted = number not in step.frozen
        for name in step.parameters(number):
            self.register_parameter(name, nn.Parameter(values[name], requires_grad=wanted))
        self._names = list(step.parameters(number))

    def forward(self, x: Tensor, other: Tensor | None = None, *, shift: Tensor | None = None) -> Any:
        """Compute what the words say."""
        rest = iter([getattr(self, name) for name in self._names])
        h = x
        if other is not None and IGNORE not in self._words:
            h = h * other if other.dtype == torch.bool else h + other
        for word in self._words:
            if word == SHIFT and shift is not None:
                h = h + shift
            elif word in LAYERS:
                shapes, compute = LAYERS[word]
                h = compute(h, [next(rest) for _ in shapes])
        second = next((ENDS[word](h, x) for word in self._words if word in ENDS), None)
        return h if second is None else (h, second)


def chunks(step: TrainingStep, batch: Tensor) -> Sequence[Tensor]:
    """The microbatches of a batch."""
    return batch.tensor_split(step.microbatches)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """What a stage gives, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def run_without_pipeline(step: TrainingStep, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """One training step as autograd takes it, a microbatch after the other.

    Returns:
        losses, by microbatch; the outputs of the batch; gradients by parameter, of those that have some.
    """
    modules, weights = [], []
    for number in range(len(step.stages)):
        own = {name: values[name].detach() for name in step.parameters(number)}
        weights.append({name: one.requires_grad_(number not in step.frozen) for name, one in own.items()})
        with torch.no_grad():
            modules.append(step.module(number, {name: torch.zeros(one.shape) for name, one in own.items()}))
    trained = {name: one for own in weights for name, one in own.items() if one.requires_grad}
    grads: dict[str, Tensor] = {}
    losses, outputs = [], []
    split = {name: chunks(step, values[name]) for name in ("x", "target", *([SHIFT] if step.shifted else []))}
    for number in range(step.microbatches):
        given: tuple[Any, ...] = (split["x"][number],)
        named = {SHIFT: split[SHIFT][number]} if step.shifted else {}
        for module, own in zip(modules, weights, strict=True):
            given = as_tuple(torch.func.functional_call(module, own, given, named))
        loss = step.loss_of(given, split["target"][number])
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for name, grad in zip(trained, found, strict=True):
            if grad is not None:
                grads[name] = grads[name] + grad if name in grads else grad
        losses.append(loss)
        outputs.append(given)
    scale = step.microbatches if step.scale_grads else 1
    whole = tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
    return {"losses": losses, "outputs": whole, "grads": {name: grad / scale for name, grad in grads.items()}}


@lru_cache(maxsize=64)
def _traced(step: TrainingStep) -> tuple[fx.Graph, Any]:
    """The graph of a training step."""
    shapes = step.inputs()
    tree: list[Any] = []

    def run(*given: Tensor) -> Any:
        found = run_without_pipeline(step, dict(zip(shapes, given, strict=True)))
        flat, spec = torch.utils._pytree.tree_flatten(found)
        tree.append(spec)
        return flat

    return make_fx(run)(*(torch.zeros(shape) for shape in shapes.values())).graph, tree[-1]


#: Views that tracing writes where autograd begins or ends: they change no value.
_MARKS = frozenset({"aten::detach", "aten::alias"})


def training_program(mesh: Mesh, step: TrainingStep, seed: int = 0) -> Program:
    """The training step without a pipeline, on every rank of a mesh alike."""
    traced, tree = _traced(step)
    shapes = step.inputs()

    def build(b: GraphBuilder) -> Any:
        made: dict[fx.Node, Any] = {}
        names = iter(shapes)
        for node in traced.nodes:
            if node.op == "placeholder":
                made[node] = b.input(next(names))
            elif node.op == "output":
                flat = fx.node.map_aggregate(node.args[0], lambda one: made[one] if isinstance(one, fx.Node) else one)
                return torch.utils._pytree.tree_unflatten(list(flat), tree)
            else:
                args, kwargs = fx.node.map_aggregate(
                    (node.args, dict(node.kwargs)), lambda one: made[one] if isinstance(one, fx.Node) else one
                )
                name = qualified_name(node.target)
                plain = {key: value for key, value in kwargs.items() if key not in _WHERE}
                made[node] = args[0] if name in _MARKS else b.call(name, *args, **plain)
        raise AssertionError("a traced graph has an output")

    inputs = [InputSpec(name, shape) for name, shape in shapes.items()]
    return spmd_program(mesh, inputs, build, seed=seed, labels=("pipelining", step.schedule))


#: Arguments that say where an op runs.
_WHERE = frozenset({"device", "layout", "pin_memory"})


def boundaries(step: TrainingStep, values: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """What each stage gets of its first microbatch, and last what the model gives."""
    given: tuple[Any, ...] = (chunks(step, values["x"])[0],)
    named = {SHIFT: chunks(step, values[SHIFT])[0]} if step.shifted else {}
    yield given
    for number in range(len(step.stages)):
        given = as_tuple(step.module(number, values)(*given, **named))
        yield given


__all__ = [
    "ENDS", "IGNORE", "LAYERS", "LOSSES", "SCHEDULES", "SHIFT", "WIDTH", "Stage", "TrainingStep", "as_tuple", "boundaries",
    "training_program",
]  # fmt: skip
