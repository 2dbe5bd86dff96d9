"""Models in stages as data, the modules of their stages, and one training step of them on a single rank.

Subjects build the modules of a rank from the same data, and run them under a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.strategies.tracing import write_traced
from tcverify.strategies.training.optimizers import CLIPS, OPTIMIZERS, traced_update

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
    "bias": ({"bias": _ROW}, lambda h, p: h + p[0]),
    "skip": ({"weight": _SQUARE}, lambda h, p: h + torch.tanh(h @ p[0])),
    "twice": ({"weight": _SQUARE}, lambda h, p: torch.tanh(h @ p[0]) @ p[0]),
    "unused": ({"weight": _ROW, "extra": _ROW}, lambda h, p: h * p[0]),
    "tied": ({"bias": _ROW}, lambda h, p: F.linear(h, p[0], p[1])),
    "biases": ({"bias": _ROW}, lambda h, p: h + (p[0] + p[1])),
    "tanh": ({}, lambda h, p: torch.tanh(h)),
    "relu": ({}, lambda h, p: torch.relu(h)),
}

#: Layers that share a parameter with a layer in front of them, their first one: its shape.
SHARED: Mapping[str, tuple[int, ...]] = {"tied": _SQUARE, "biases": _ROW}

#: What a stage hands on beside its activation `h`, by name; `x` is the activation that it got.
ENDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two": lambda h, x: torch.tanh(h),
    "constant": lambda h, x: (h * 2).detach(),
    "mask": lambda h, x: h > 0,
    "through": lambda h, x: x,
}

#: Words of a stage that are no layers: it adds the keyword argument, does not read the second tensor that it gets, or has its
#: parameters in the reverse of the order in which it uses them.
SHIFT, IGNORE, REVERSED = "shift", "ignore", "reversed"

#: Words of a stage that runs in every other microbatch only: the first, third, …, or the second, fourth, …
FIRST, SECOND = "first", "second"

#: Most rows of a batch that are read.
MAX_ROWS = 64

#: Inputs that are divided into microbatches.
BATCH = ("x", "target", SHIFT)

#: How losses are reduced over a microbatch.
LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "sum": torch.sum}


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step of a model in stages. All of it is data that options of a program hold.

    Attributes:
        schedule: name of the schedule that is to run it.
        stages: words per stage: "shift", "ignore", "reversed", "first" or "second", layers, and at the end what is handed on
            beside the activation. The last one runs in all microbatches.
        microbatches: number of parts of the batch.
        rows: of the batch; microbatches have equally many.
        frozen: stages whose parameters require no gradients.
        loss: how losses are reduced.
        scale_grads: whether gradients are divided by the number of microbatches.
        passes: how often a batch runs through all stages, one time after the other.
        steps: how often the step is taken.
        optimizer: what updates the parameters behind each step, a name of `OPTIMIZERS`; "" for none.
        clip: the norm to which gradients are clipped in front of updates, a name of `CLIPS`.
    """

    schedule: str = "GPipe"
    stages: tuple[str, ...] = ("linear",)
    microbatches: int = 1
    rows: int = 1
    frozen: tuple[int, ...] = ()
    loss: str = "mean"
    scale_grads: bool = True
    passes: int = 1
    steps: int = 1
    optimizer: str = ""
    clip: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TrainingStep:
        """Read the options of a program.

        Raises:
            Unsupported: they describe no training step.
        """
        told = {one.name: options[one.name] for one in fields(cls) if one.name in options}
        try:
            step = cls(**told)
            words = {word for stage in step.stages for word in stage.split()}
            trained = [
                any(read for k in step.running(number) for _, read in step.layers(k) if k not in step.frozen)
                for number in range(min(step.microbatches, 2))
            ]
            sound = (
                all(stage.split() for stage in step.stages)
                and bool(step.stages)
                and words <= {*LAYERS, *ENDS, SHIFT, IGNORE, REVERSED, FIRST, SECOND}
                and step.loss in LOSSES
                and step.schedule in SCHEDULES
                and 1 <= step.microbatches <= step.rows <= MAX_ROWS
                and step.rows % step.microbatches == 0
                and {step.passes, step.steps} <= {1, 2}
                and (step.optimizer in OPTIMIZERS or (not step.optimizer and step.steps == 1 and not step.clip))
                and step.clip in CLIPS
                and isinstance(step.frozen, tuple)
                and all(trained)
                and not {FIRST, SECOND} & {*step.stages[-1].split()}
            )
        except (TypeError, AttributeError, ValueError):
            sound = False
        if not sound:
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
    def alternating(self) -> bool:
        """Whether microbatches run different stages."""
        return self.microbatches > 1 and self.running(0) != self.running(1)

    def running(self, microbatch: int) -> list[int]:
        """The stages that run in a microbatch."""
        left_out = FIRST if microbatch % 2 else SECOND
        return [stage for stage, words in enumerate(self.stages) if left_out not in words.split()]

    @property
    def shifted(self) -> bool:
        """Whether stages take the keyword argument."""
        return any(SHIFT in stage.split() for stage in self.stages)

    def layers(self, stage: int) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
        """The layers of a stage, each with names and shapes of the parameters that it reads: the one that it shares comes first.

        Raises:
            ValueError: one has nothing to share.
        """
        found, known = [], dict[str, tuple[int, ...]]()
        for place, layer in enumerate(self.stages[stage].split()):
            if layer not in LAYERS:
                continue
            shared = [(name, shape) for name, shape in known.items() if shape == SHARED.get(layer)][:1]
            if layer in SHARED and not shared:
                raise ValueError(f"no parameter in front of '{layer}' can be shared")
            own = {f"s{stage}_{place}_{layer}_{name}": shape for name, shape in LAYERS[layer][0].items()}
            found.append((layer, {**dict(shared), **own}))
            known |= own
        return found

    def parameters(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters of a stage, in the order in which its module has them."""
        found = {name: shape for _, read in self.layers(stage) for name, shape in read.items()}
        return dict(reversed(found.items())) if REVERSED in self.stages[stage].split() else found

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all inputs: the batch, its targets, the keyword argument, parameters."""
        batch = [name for name in BATCH if name != SHIFT or self.shifted]
        found: dict[str, tuple[int, ...]] = {name: (self.rows, WIDTH) for name in batch}
        for stage in range(len(self.stages)):
            found.update(self.parameters(stage))
        return found

    def loss_of(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a microbatch."""
        differences = [one - target for one in as_tuple(output)]
        return reduce(torch.add, [LOSSES[self.loss](one * one) for one in differences])


class Stage(nn.Module):
    """The module of a stage: takes one or two tensors and gives one or two. Its parameters share memory with the given values."""

    def __init__(self, step: TrainingStep, number: int, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._words = step.stages[number].split()
        wanted = number not in step.frozen
        for name in step.parameters(number):
            self.register_parameter(name, nn.Parameter(values[name], requires_grad=wanted))
        self._layers = step.layers(number)

    def forward(self, x: Tensor, other: Tensor | None = None, *, shift: Tensor | None = None) -> Any:
        """Compute what the words say."""
        h = x
        if other is not None and IGNORE not in self._words:
            h = h * other if other.dtype == torch.bool else h + other
        if SHIFT in self._words and shift is not None:
            h = h + shift
        for layer, read in self._layers:
            h = LAYERS[layer][1](h, [getattr(self, name) for name in read])
        second = next((ENDS[word](h, x) for word in self._words if word in ENDS), None)
        return h if second is None else (h, second)


class Model(nn.Module):
    """All stages of a training step, one behind the other."""

    def __init__(self, step: TrainingStep, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(step, number, values) for number in range(len(step.stages)))
        self._step = step

    def forward(self, x: Tensor, shift: Tensor | None = None, microbatch: int = 0) -> Any:
        """Compute what the last stage gives."""
        given: tuple[Any, ...] = (x,)
        for stage in self._step.running(microbatch) * self._step.passes:
            given = as_tuple(self.stages[stage](*given, shift=shift))
        return given


def as_tuple(value: Any) -> tuple[Any, ...]:
    """What a stage gives, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def run_microbatch(step: TrainingStep, number: int, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Forward and backward of one microbatch, as autograd takes them.

    Args:
        number: which of them it is.
        values: inputs by name, with the rows of the microbatch.

    Returns:
        its loss, its outputs, and gradients by parameter, of those that have some.
    """
    modules, weights = [], []
    for stage in range(len(step.stages)):
        own = {name: values[name].detach() for name in step.parameters(stage)}
        weights.append({name: one.requires_grad_(stage not in step.frozen) for name, one in own.items()})
        modules.append(Stage(step, stage, {name: torch.zeros(one.shape) for name, one in own.items()}))
    trained = {name: one for own in weights for name, one in own.items() if one.requires_grad}
    given: tuple[Any, ...] = (values["x"],)
    named = {SHIFT: values[SHIFT]} if step.shifted else {}
    for stage in step.running(number) * step.passes:
        given = as_tuple(torch.func.functional_call(modules[stage], weights[stage], given, named))
    loss = step.loss_of(given, values["target"])
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    found = {name: grad for name, grad in zip(trained, grads, strict=True) if grad is not None}
    return {"loss": loss, "outputs": given, "grads": found}


@lru_cache(maxsize=64)
def _traced(step: TrainingStep, number: int) -> tuple[fx.Graph, Any]:
    """The graph of one microbatch, which takes the inputs in order, and the containers of its results."""
    shapes = step.inputs()
    tree: list[Any] = []

    def run(*given: Tensor) -> Any:
        flat, spec = pytree.tree_flatten(run_microbatch(step, number, dict(zip(shapes, given, strict=True))))
        tree.append(spec)
        return flat

    return make_fx(run)(*(torch.zeros(shape) for shape in shapes.values())).graph, tree[-1]


def training_program(mesh: Mesh, step: TrainingStep, seed: int = 0) -> Program:
    """The training step without a pipeline, on every rank of a mesh alike: see `write_step`."""

    def build(b: GraphBuilder) -> Any:
        return write_step(b, step, {name: b.input(name) for name in step.inputs()})

    inputs = [InputSpec(name, shape) for name, shape in step.inputs().items()]
    return spmd_program(mesh, inputs, build, seed=seed, labels=("pipelining", step.schedule))


def write_step(b: GraphBuilder, step: TrainingStep, inputs: Mapping[str, fx.Node]) -> dict[str, Any]:
    """Write one microbatch after the other, of one step.

    Returns:
        the losses of the microbatches, the outputs of the batch, and gradients by parameter.
    """
    rows = step.rows // step.microbatches
    one = replace(step, microbatches=1, rows=rows)
    grads: dict[str, fx.Node] = {}
    parts = []
    for number, start in enumerate(range(0, step.rows, rows)):
        own = [b.call("aten::slice.Tensor", x, 0, start, start + rows) if n in BATCH else x for n, x in inputs.items()]
        traced, tree = _traced(one, number % 2)
        parts.append(pytree.tree_unflatten(list(write_traced(b, traced, own)), tree))
        for name, grad in parts[-1]["grads"].items():
            grads[name] = b.call("aten::add.Tensor", grads[name], grad) if name in grads else grad
    if step.scale_grads:
        grads = {name: b.call("aten::div.Tensor", grad, step.microbatches) for name, grad in grads.items()}
    outputs = tuple(b.call("aten::cat", list(each)) for each in zip(*(part["outputs"] for part in parts), strict=True))
    return {"losses": [part["loss"] for part in parts], "outputs": outputs, "grads": grads}


def write_update(
    b: GraphBuilder,
    step: TrainingStep,
    number: int,
    values: Mapping[str, fx.Node],
    grads: Mapping[str, fx.Node],
    kept: Sequence[fx.Node],
) -> tuple[dict[str, fx.Node], dict[str, fx.Node], list[fx.Node]]:
    """Write what the optimizer does behind one step.

    Args:
        number: of the step, from 1.
        values: parameters by name, perhaps among other inputs.
        grads: the gradients of those that are updated.
        kept: what the optimizer kept behind the step before; empty behind the first.

    Returns:
        the parameters, the gradients as clipped, and what the optimizer keeps.
    """
    shapes = tuple(tuple(step.inputs()[name]) for name in grads)
    traced = traced_update(step.optimizer, step.clip, number, shapes)
    made = write_traced(b, traced, [*(values[name] for name in grads), *grads.values(), *kept])
    many = len(grads)
    return dict(zip(grads, made, strict=False)), dict(zip(grads, made[many:], strict=False)), list(made[2 * many :])


def boundaries(step: TrainingStep, values: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """What each stage gets of its first microbatch, and last what the model gives."""
    rows = step.rows // step.microbatches
    given: tuple[Any, ...] = (values["x"][:rows],)
    named = {SHIFT: values[SHIFT][:rows]} if step.shifted else {}
    yield given
    for number in range(len(step.stages)):
        given = as_tuple(Stage(step, number, values)(*given, **named))
        yield given


__all__ = [
    "BATCH", "ENDS", "FIRST", "IGNORE", "LAYERS", "LOSSES", "REVERSED", "SCHEDULES", "SECOND", "SHARED", "SHIFT", "WIDTH",
    "Model", "Stage", "TrainingStep", "as_tuple", "boundaries", "training_program", "write_step", "write_update",
]  # fmt: skip
