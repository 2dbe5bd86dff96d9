"""Models with attention over a whole sequence as data, and one training step of them on a single rank.

Drawn for context parallelism, which runs the same model on a part of the sequence per rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.program import GraphBuilder, Mesh, Program, spmd_program
from tcverify.strategies.meshes import WORLD_SIZES, drawn_on
from tcverify.strategies.tracing import write_traced
from tcverify.strategies.training.data_parallel import inputs_of

Tensor = torch.Tensor

#: Name of the mesh dim over which a sequence is divided.
CONTEXT_PARALLEL = "cp"

#: Words of a layer: its mask, another scale, one head of keys and values for all of the queries, and queries and keys that are
#: multiplied by what stands for their positions.
CAUSAL, SCALED, SHARED, PLACED = "causal", "scaled", "shared", "placed"

#: How outputs are returned, and the dim of their positions: rows of tokens, a part per head, or the sum over the batch.
SHOWN: Mapping[str, tuple[int, Callable[[Tensor, int], Tensor]]] = {
    "tokens": (1, lambda h, heads: h),
    "heads": (2, lambda h, heads: h.unflatten(2, (heads, -1)).transpose(1, 2)),
    "positions": (0, lambda h, heads: h.sum(0)),
}

#: Most elements of the scores of a layer.
MOST_SCORES = 1 << 18


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    size = q.shape[-1]
    if size % FLASH_SIZE:
        scale = 1 / math.sqrt(size) if scale is None else scale
        q, k, v = (F.pad(one, (0, -size % FLASH_SIZE)) for one in (q, k, v))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
    return out[..., :size] if size % FLASH_SIZE else out


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    made = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    out: Tensor = made[0]
    return out


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    out: Tensor = made[0]
    return out


#: A head of FlashAttention has a multiple of so many elements; torch fills up smaller ones.
FLASH_SIZE = 8

#: Attention on a GPU, by the name of its kernel: of queries, keys and values, whether these are masked, and of a scale.
KERNELS: Mapping[str, Callable[[Tensor, Tensor, Tensor, bool, float | None], Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
}


@contextmanager
def attention_by(kernel: str) -> Iterator[None]:
    """Let `scaled_dot_product_attention` call this kernel, as it would on a GPU: what it calls on a CPU is another one."""

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        return KERNELS[kernel](query, key, value, is_causal, scale)

    with mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention):
        yield


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A training step of a model whose layers attend to a sequence. All of it is data that options of a program hold.

    The model predicts each token from those in front of it. The loss is the sum of the squares of what it misses.

    Attributes:
        layers: words per layer: "causal", "scaled", "shared", "placed".
        kernel: what computes attention, a name of `KERNELS`.
        batch: number of sequences.
        length: of the sequences.
        heads: of queries.
        size: of a head.
        shown: how outputs are returned, a name of `SHOWN`.
    """

    layers: tuple[str, ...] = (CAUSAL,)
    kernel: str = "flash"
    batch: int = 1
    length: int = 4
    heads: int = 1
    size: int = 2
    shown: str = "tokens"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AttentionStep:
        """Read the options of a program.

        Raises:
            Unsupported: they describe no such training step.
        """
        told = {one.name: options[one.name] for one in fields(cls) if one.name in options}
        try:
            step = cls(**{**told, "layers": tuple(told.get("layers", (CAUSAL,)))})
            sound = (
                bool(step.layers)
                and {word for layer in step.layers for word in layer.split()} <= {CAUSAL, SCALED, SHARED, PLACED}
                and step.kernel in KERNELS
                and step.shown in SHOWN
                and all(type(n) is int and n >= 1 for n in (step.batch, step.length, step.heads, step.size))
                and step.batch * step.heads * step.length**2 <= MOST_SCORES
                and not (step.kernel == "efficient" and any(SHARED in layer.split() for layer in step.layers))
            )
        except (TypeError, AttributeError, ValueError):
            sound = False
        if not sound:
            raise Unsupported("the options of the program describe no training step of a model with attention")
        return step

    def options(self) -> dict[str, Any]:
        """As options of a program."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name: tokens, positions, and the weights of each layer."""
        width = self.heads * self.size
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (self.batch, self.length + 1, width),
            "positions": (self.length, self.size),
        }
        for number, layer in enumerate(self.layers):
            shared = self.size if SHARED in layer.split() else width
            shapes |= {f"q{number}": (width, width), f"k{number}": (width, shared), f"v{number}": (width, shared)}
        return shapes

    def attend(
        self, number: int, h: Tensor, positions: Tensor, values: Mapping[str, Tensor], attention: Callable[..., Tensor]
    ) -> Tensor:
        """Compute a layer: what it gets, and attention added to it.

        Args:
            h: [batch, tokens, heads · size].
            positions: [tokens, size].
            values: weights by name.
            attention: called as `scaled_dot_product_attention`, or that.
        """
        words = self.layers[number].split()
        q, k, v = (
            (h @ values[f"{name}{number}"]).unflatten(2, (-1, self.size)).transpose(1, 2) for name in ("q", "k", "v")
        )
        if PLACED in words:
            q, k = q * positions, k * positions
        scale = 0.75 if SCALED in words else None
        found = attention(q, k, v, is_causal=CAUSAL in words, scale=scale)
        return h + found.transpose(1, 2).flatten(2)

    def loss_of(self, h: Tensor, target: Tensor) -> Tensor:
        """The loss of what the last layer gives."""
        missed = h - target
        return (missed * missed).sum()

    def show(self, h: Tensor) -> Tensor:
        """What the last layer gives, as the step returns it."""
        return SHOWN[self.shown][1](h, self.heads)


def _run(step: AttentionStep, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The training step on one rank that has whole sequences.

    Args:
        values: inputs by name.
    """
    tokens = values["tokens"]
    x, target = tokens[:, :-1], tokens[:, 1:]
    read = {"x": x, **{name: one for name, one in values.items() if name not in ("tokens", "positions")}}
    own = {name: one.detach().requires_grad_() for name, one in read.items()}
    h = own["x"]
    for number in range(len(step.layers)):
        h = step.attend(number, h, values["positions"], own, F.scaled_dot_product_attention)
    loss = step.loss_of(h, target)
    grads = torch.autograd.grad(loss, list(own.values()))
    buffers = {"x": x, "target": target, "positions": values["positions"]}
    return {
        "loss": loss,
        "outputs": step.show(h),
        "grads": dict(zip(own, grads, strict=True)),
        "buffers": {name: one * 2 for name, one in buffers.items()},
    }


@functools.lru_cache(maxsize=16)
def _traced(step: AttentionStep) -> tuple[fx.Graph, Any]:
    """A graph that takes the inputs in order, and the containers of its results."""
    names = list(step.inputs())
    tree: list[Any] = []

    def run(*given: Tensor) -> Any:
        flat, spec = pytree.tree_flatten(_run(step, dict(zip(names, given, strict=True))))
        tree.append(spec)
        return flat

    with attention_by(step.kernel):
        made = make_fx(run, tracing_mode="fake")(*(torch.zeros(shape) for shape in step.inputs().values()))
    return made.graph, tree[-1]


def attention_program(mesh: Mesh, step: AttentionStep, seed: int = 0) -> Program:
    """The training step on every rank of a mesh.

    It returns the loss, outputs, gradients, and twice the batch, as it is behind the step. Over other dims of the mesh than that
    of context parallelism, ranks have sequences of their own; their gradients are not reduced.
    """

    def build(b: GraphBuilder) -> Any:
        traced, tree = _traced(step)
        return pytree.tree_unflatten(list(write_traced(b, traced, [b.input(name) for name in step.inputs()])), tree)

    inputs = inputs_of(mesh, step.inputs(), ("tokens",), CONTEXT_PARALLEL)
    return spmd_program(mesh, inputs, build, seed=seed, labels=("attention", step.kernel))


# ------------------------------------------------------------------------------------------------------------- drawing

#: How many tokens a half of the part of a rank has, by kernel: some fill their blocks.
_HALVES: Mapping[str, Sequence[int]] = {
    "flash": (1, 2, 3, 2),
    "efficient": (32, 32, 32, 16),
    "cudnn": (1, 2, 3, 2),
}
_KERNELS = ("flash", "efficient", "cudnn", "flash")
_SHOWN = ("tokens", "heads", "tokens", "heads", "tokens", "positions")

#: Bytes of a whole program: seed, kernel, length, batch and heads, how outputs are returned; then each layer.
WIDTH = 7


def decode_attention(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a training step on every rank of a mesh."""
    ranks = next((len(dim.group(0)) for dim in mesh.dims if dim.name == CONTEXT_PARALLEL), 1)
    step = decode_step(ranks, choices)
    return replace(attention_program(mesh, step, choices[0] if choices else 0), options=step.options())


def decode_step(ranks: int, choices: bytes) -> AttentionStep:
    """Decode any bytes into a training step whose sequences that many ranks can divide."""
    _, kernel, long, many, how, *words = choices.ljust(WIDTH, b"\0")[:WIDTH]
    chosen = _KERNELS[kernel % len(_KERNELS)]
    masked = kernel >> 3 & 3 != 3  # all layers, which some settings of context parallelism want
    layers = [_layer(word, chosen, masked) for word in words[: 1 + how % 2]]
    halves = _HALVES[chosen][long % 4] * (1 if not masked and long & 4 else 2)
    return AttentionStep(
        layers=tuple(layers),
        kernel=chosen,
        batch=1 + many % 2,
        length=ranks * halves,
        heads=1 + (many >> 1) % 2,
        size=(4, 8)[(many >> 2) % 2],
        shown=_SHOWN[how // 2 % len(_SHOWN)],
    )


def _layer(word: int, kernel: str, masked: bool) -> str:
    chosen = {
        CAUSAL: masked or word & 1,
        SCALED: word & 2,
        SHARED: word & 4 and kernel != "efficient",
        PLACED: word & 8,
    }
    return " ".join(name for name, wanted in chosen.items() if wanted)


def grid(world_size: int, dims: int) -> Mesh:
    """A mesh for context parallelism. Of two dims, the first is of data parallelism, where the number of ranks is even."""
    if dims == 1 or world_size == 2 or world_size % 2:
        return Mesh.grid({CONTEXT_PARALLEL: world_size})
    return Mesh.grid({"dp": 2, CONTEXT_PARALLEL: world_size // 2})


def attention_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw training steps of models with attention.

    Args:
        mesh: what they run on; None draws one or two dims.
        world_size: of the drawn mesh; None draws 2, 3 or 4.
    """
    sizes = WORLD_SIZES if world_size is None else (world_size,)
    listed = [grid(size, dims) for size in sizes for dims in (1, 2)] if mesh is None else [mesh]
    return drawn_on(listed, decode_attention, WIDTH)


__all__ = [
    "CONTEXT_PARALLEL", "KERNELS", "SHOWN", "WIDTH",
    "AttentionStep", "attention_by", "attention_program", "attention_programs", "decode_attention", "decode_step", "grid",
]  # fmt: skip
