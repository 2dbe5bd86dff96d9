"""What optimizers of torch and the clipping of gradients compute, written with plain ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

Tensor = torch.Tensor

RATE, MOMENTUM, DECAY = 0.5, 0.25, 0.125
BETAS = (0.5, 0.75)
#: Added to roots. It is large: next to a root of almost nothing, an update would be as large as rounding happens to be.
EPS = 0.25

#: The norm to which the gradients of all parameters are clipped.
MAX_NORM = 0.25

#: Norms by name, as `clip_grad_norm_` takes them; "" clips nothing.
CLIPS: Mapping[str, float] = {"": 0.0, "1": 1.0, "2": 2.0, "inf": torch.inf}

#: What an optimizer keeps of a parameter between steps; numbers at first.
State = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer.

    Attributes:
        torch: the class of torch.optim.
        options: arguments of the class.
        rule: computes the parameter and the state behind a step from the number of the step (from 1), parameter, gradient and
            state.
        fused: whether torch has a fused kernel of it.
    """

    torch: str
    options: Mapping[str, Any]
    rule: Callable[[int, Tensor, Tensor, State], tuple[Tensor, State]]
    fused: bool = False

    @property
    def decays(self) -> bool:
        """Whether parameters whose gradients are zeros change."""
        return "weight_decay" in self.options


def _sgd(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    return p - RATE * g, ()


def _decayed(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    return p - RATE * (g + DECAY * p), ()


def _momentum(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    kept = MOMENTUM * state[0] + g
    return p - RATE * kept, (kept,)


def _nesterov(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    kept = MOMENTUM * state[0] + g
    return p - RATE * (g + MOMENTUM * kept), (kept,)


def _moments(number: int, g: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    """Both moments of Adam, without their bias, and as they are kept."""
    first = BETAS[0] * state[0] + (1 - BETAS[0]) * g
    second = BETAS[1] * state[1] + (1 - BETAS[1]) * g * g
    return first / (1 - BETAS[0] ** number), second / (1 - BETAS[1] ** number), (first, second)


def _adam(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    first, second, kept = _moments(number, g, state)
    return p - RATE * first / (second.sqrt() + EPS), kept


def _adamw(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    return _adam(number, p * (1 - RATE * DECAY), g, state)


def _amsgrad(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    first, _, kept = _moments(number, g, state)
    largest = kept[1] if number == 1 else torch.maximum(state[2], kept[1])
    return p - RATE * first / ((largest / (1 - BETAS[1] ** number)).sqrt() + EPS), (*kept, largest)


def _adagrad(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    squares = state[0] + g * g
    return p - RATE * g / (squares.sqrt() + EPS), (squares,)


def _rmsprop(number: int, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    squares = BETAS[1] * state[0] + (1 - BETAS[1]) * g * g
    return p - RATE * g / (squares.sqrt() + EPS), (squares,)


_ADAM = {"lr": RATE, "betas": BETAS, "eps": EPS}

#: Optimizers by name.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer("SGD", {"lr": RATE}, _sgd, fused=True),
    "decay": Optimizer("SGD", {"lr": RATE, "weight_decay": DECAY}, _decayed, fused=True),
    "momentum": Optimizer("SGD", {"lr": RATE, "momentum": MOMENTUM}, _momentum, fused=True),
    "nesterov": Optimizer("SGD", {"lr": RATE, "momentum": MOMENTUM, "nesterov": True}, _nesterov, fused=True),
    "adam": Optimizer("Adam", _ADAM, _adam, fused=True),
    "adamw": Optimizer("AdamW", {**_ADAM, "weight_decay": DECAY}, _adamw, fused=True),
    "amsgrad": Optimizer("Adam", {**_ADAM, "amsgrad": True}, _amsgrad, fused=True),
    "adagrad": Optimizer("Adagrad", {"lr": RATE, "eps": EPS}, _adagrad),
    "rmsprop": Optimizer("RMSprop", {"lr": RATE, "alpha": BETAS[1], "eps": EPS}, _rmsprop),
}


def _clipped(how: str, grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients as `clip_grad_norm_` leaves them.

    Args:
        how: a name of `CLIPS`.
    """
    if not how:
        return list(grads)
    each = torch.stack([torch.linalg.vector_norm(grad, CLIPS[how]) for grad in grads])
    factor = torch.clamp(MAX_NORM / (torch.linalg.vector_norm(each, CLIPS[how]) + 1e-6), max=1.0)
    return [grad * factor for grad in grads]


@lru_cache(maxsize=256)
def traced_update(optimizer: str, clip: str, number: int, shapes: tuple[tuple[int, ...], ...]) -> fx.Graph:
    """The graph of what an optimizer does behind a step.

    Args:
        number: of the step, from 1.
        shapes: of the parameters.

    Returns:
        a graph that takes parameters, gradients and, behind the first step, what was kept of each parameter, and gives
        parameters, clipped gradients and what is kept.
    """
    many, rule = len(shapes), OPTIMIZERS[optimizer].rule
    kept = 0 if number == 1 else len(rule(1, torch.zeros(1), torch.zeros(1), (0.0, 0.0))[1])

    def run(*given: Tensor) -> list[Tensor]:
        grads = _clipped(clip, given[many : 2 * many])
        states = [given[2 * many + k * kept : 2 * many + (k + 1) * kept] or (0.0, 0.0) for k in range(many)]
        both = [rule(number, p, g, state) for p, g, state in zip(given, grads, states, strict=False)]
        return [*(p for p, _ in both), *grads, *(one for _, state in both for one in state)]

    given = [*shapes, *shapes, *(shape for shape in shapes for _ in range(kept))]
    return make_fx(run)(*map(torch.zeros, given)).graph  # a tensor each: the same one twice would be one input


__all__ = ["CLIPS", "MAX_NORM", "OPTIMIZERS", "Optimizer", "traced_update"]
