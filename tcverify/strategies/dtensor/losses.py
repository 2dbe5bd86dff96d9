"""Cross entropy of logits whose classes are sharded, and its gradient, for the parallel loss of DTensor to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, Recipe, spmd_program
from tcverify.strategies.dtensor.programs import drawn_on_grids
from tcverify.strategies.dtensor.writing import SIZES
from tcverify.strategies.tracing import write_traced

Tensor = torch.Tensor

#: How losses are reduced: the first one on meshes of one dim only, as DTensor says that it does.
REDUCTIONS = ("mean", "sum", "none")

#: Bytes of a whole program: seed, classes, rows, dims behind the classes and their sizes, facts, the mesh dim of the classes,
#: placements of the rows.
WIDTH = 9

#: What targets are ignored by default.
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Loss:
    """A cross entropy.

    Attributes:
        shape: of the logits: rows, classes, and perhaps more; of one row, the classes alone.
        reduction: as `cross_entropy` takes it.
        ignored: the target that does not count, if it occurs.
        masked: whether some targets are it.
        weighted: whether classes have weights.
    """

    shape: tuple[int, ...]
    reduction: str
    ignored: int
    masked: bool
    weighted: bool

    @property
    def classes(self) -> int:
        """The dim of the classes."""
        return min(1, len(self.shape) - 1)

    @property
    def targets(self) -> tuple[int, ...]:
        """The shape of the targets."""
        return tuple(size for dim, size in enumerate(self.shape) if dim != self.classes)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """Logits, targets, and what else it reads: a mask, weights, and the gradient of its result."""
        classes = self.shape[self.classes]
        found = [
            InputSpec("logits", self.shape),
            InputSpec("target", self.targets, torch.int64, recipe=Recipe("integers", float(classes))),
        ]
        if self.masked:
            found.append(InputSpec("mask", self.targets, torch.bool, recipe=Recipe("mask")))
        if self.weighted:
            found.append(InputSpec("weight", (classes,), recipe=Recipe("norm_weight")))
        return (*found, InputSpec("grad", self.targets if self.reduction == "none" else ()))

    def compute(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss, and the gradient of the logits."""
        logits = given["logits"].detach().requires_grad_()
        target = given["target"]
        if self.masked:
            target = torch.where(given["mask"], target, self.ignored)
        loss = F.cross_entropy(logits, target, given.get("weight"), ignore_index=self.ignored, reduction=self.reduction)
        return loss.detach(), torch.autograd.grad(loss, logits, given["grad"])[0]


@lru_cache(maxsize=256)
def _traced(loss: Loss) -> fx.Graph:
    names = [spec.name for spec in loss.inputs]

    def run(*given: Tensor) -> Any:
        return loss.compute(dict(zip(names, given, strict=True)))

    return make_fx(run)(*(torch.zeros(spec.shape, dtype=spec.dtype) for spec in loss.inputs)).graph


def loss_program(mesh: Mesh, loss: Loss, placements: dict[str, str], seed: int = 0) -> Program:
    """The loss and its gradient on whole tensors.

    Args:
        placements: of inputs over the dims of the mesh, as `torch:dtensor` reads them.
    """

    def build(b: GraphBuilder) -> Any:
        return tuple(write_traced(b, _traced(loss), [b.input(spec.name) for spec in loss.inputs]))

    return replace(spmd_program(mesh, loss.inputs, build, seed=seed, labels=("dtensor",)), options=placements)


def decode_loss(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a loss on `mesh`: classes are sharded over one dim of it, rows perhaps over others."""
    seed, classes, rows, dims, one, two, facts, place, data = choices.ljust(WIDTH, b"\0")[:WIDTH]
    sizes = (*SIZES, mesh.world_size + 1, mesh.world_size)
    shape = [1 + rows % 5, sizes[classes % len(sizes)], 1 + one % 3, 1 + two % 3][: (2, 2, 2, 3, 4, 4, 2, 1)[dims % 8]]
    if len(shape) == 1:
        shape = [sizes[classes % len(sizes)]]
    number = shape[min(1, len(shape) - 1)]
    loss = Loss(
        shape=tuple(shape),
        reduction=REDUCTIONS[facts % 3] if len(mesh.dims) == 1 else REDUCTIONS[1 + facts % 2],
        ignored=_IGNORED if facts // 3 % 3 else facts % number,
        masked=bool(facts // 9 % 2),
        weighted=bool(facts // 18 % 2),
    )
    sharded = place % len(mesh.dims)
    by_rows = ["S0" if data >> dim & 1 and len(shape) > 1 and dim != sharded else "R" for dim in range(len(mesh.dims))]
    over = {
        "logits": [f"S{loss.classes}" if dim == sharded else one for dim, one in enumerate(by_rows)],
        **{name: by_rows for name in ("target", "mask")},
    }
    if loss.reduction == "none" and place >= 128:
        over["grad"] = by_rows
    names = [spec.name for spec in loss.inputs]
    return loss_program(mesh, loss, {name: ",".join(each) for name, each in over.items() if name in names}, seed)


def cross_entropy_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw losses for DTensor.

    Args:
        mesh: what they run on; None draws a row-major grid.
        world_size: of the drawn mesh; None draws up to 8.
    """
    return drawn_on_grids(decode_loss, WIDTH, mesh, world_size)


__all__ = ["REDUCTIONS", "WIDTH", "Loss", "cross_entropy_programs", "decode_loss", "loss_program"]
