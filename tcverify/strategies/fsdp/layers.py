"""The layers of FSDP programs: their parameters, what they compute, and their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from tcverify.program import VARYING, GraphBuilder, InputSpec, Recipe, shard
from tcverify.strategies.fsdp.choices import FsdpLayer, FsdpSetting
from tcverify.strategies.transformer.roles import Roles

F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter that is sharded along dim 0.

    Attributes:
        shape: of the whole parameter.
        unit: the number of which the rows of all shards together are a multiple.
        dtype: of the shards.
        role: "w", "up", "down", "norm" or "bias".
    """

    name: str
    shape: tuple[int, ...]
    unit: int
    dtype: torch.dtype
    role: str

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Rows of all shards together: FSDP pads rows that cannot be divided evenly."""
        return (-(-self.shape[0] // self.unit) * self.unit, *self.shape[1:])

    @property
    def padded(self) -> bool:
        return self.shape != self.padded_shape

    @property
    def scale(self) -> float:
        """Of the values of a matrix: a power of two, so that its products are O(1)."""
        return 2.0 ** round(-math.log2(math.sqrt(self.shape[0]))) if len(self.shape) == 2 else 0.5


@dataclass(slots=True, eq=False)
class LayerParams:
    """A layer.

    Attributes:
        number: its place in the forward.
        dim: the mesh dim that its parameters are sharded over.
        of: the layer whose parameters it uses: itself, or an earlier one.
    """

    number: int
    record: FsdpLayer
    dim: str
    params: tuple[Param, ...]
    of: LayerParams = field(default=None)  # type: ignore[assignment] # itself

    def __post_init__(self) -> None:
        if self.of is None:
            self.of = self

    @property
    def kind(self) -> str:
        """The layer whose parameters it uses."""
        return self.of.record.kind

    def role(self, role: str) -> Param:
        """The parameter of this role."""
        return next(param for param in self.params if param.role == role)


def inputs_of(roles: Roles, setting: FsdpSetting, layers: list[LayerParams]) -> list[InputSpec]:
    """The activations; and for every layer with its own parameters: their shards, the full parameters, and accumulated
    gradients."""
    hidden = layers[0].params[0].shape[0]
    varying = tuple((dim, VARYING) for dim in roles.members)
    compute = compute_dtype(setting)
    inputs = [InputSpec("x", (setting.tokens, hidden), compute, varying)]
    for layer in layers:
        if layer.of is not layer:
            continue
        placed = roles.declared([(layer.dim, shard(0))])
        for param in layer.params:
            recipe = Recipe("norm_weight") if param.role == "norm" else Recipe(scale=param.scale)
            inputs.append(InputSpec(f"{param.name}_shard", param.padded_shape, param.dtype, placed, recipe))
            if setting.target == "input":
                inputs.append(InputSpec(param.name, param.shape, compute))
            if setting.backward and setting.accumulate == "add":
                inputs.append(InputSpec(f"{param.name}_grad", param.padded_shape, F32, placed))
    return inputs


def compute_dtype(setting: FsdpSetting) -> torch.dtype:
    """Of activations and of parameters in full."""
    return F32 if setting.dtypes == "f32" else BF16


def gathered_dtype(setting: FsdpSetting) -> torch.dtype:
    """Of gathered values."""
    return F32 if setting.dtypes in ("f32", "late") else BF16


def forward(b: GraphBuilder, layer: LayerParams, weights: dict[str, fx.Node], x: fx.Node) -> fx.Node:
    """The result of a layer on activations [tokens, hidden]."""

    def of(role: str) -> fx.Node:
        return weights[layer.role(role).name]

    if layer.kind == "mlp":
        inner = b.call("aten::tanh", b.call("aten::mm", x, of("up")))
        return b.call("aten::mm", inner, of("down"))
    if layer.kind == "norm":
        x = b.call("aten::mul.Tensor", _normed(b, x), of("norm"))
    y = b.call("aten::mm", x, of("w"))
    if layer.kind == "bias":
        y = b.call("aten::add.Tensor", y, of("bias"))
    return b.call("aten::tanh", y)


def _normed(b: GraphBuilder, x: fx.Node) -> fx.Node:
    mean = b.call("aten::mean.dim", b.call("aten::mul.Tensor", x, x), [-1], True)
    return b.call("aten::mul.Tensor", x, b.call("aten::rsqrt", b.call("aten::add.Tensor", mean, 0.01)))


def backward(
    b: GraphBuilder, layer: LayerParams, weights: dict[str, fx.Node], x: fx.Node, gradient: fx.Node
) -> tuple[fx.Node, dict[str, fx.Node]]:
    """The backward of a layer: from the gradient of its result, those of its input and of its parameters.

    They have the shapes and operands of gradients; derivatives of norms and of activations are omitted.
    """

    def of(role: str) -> fx.Node:
        return weights[layer.role(role).name]

    found: dict[str, fx.Node] = {}

    def linear(role: str, x: fx.Node, gradient: fx.Node) -> fx.Node:
        found[layer.role(role).name] = b.call("aten::mm", b.call("aten::t", x), gradient)
        return b.call("aten::mm", gradient, b.call("aten::t", of(role)))

    if layer.kind == "mlp":
        inner = b.call("aten::tanh", b.call("aten::mm", x, of("up")))
        return linear("up", x, linear("down", inner, gradient)), found
    if layer.kind == "bias":
        found[layer.role("bias").name] = b.call("aten::sum.dim_IntList", gradient, [0])
    if layer.kind == "norm":
        normed = _normed(b, x)
        passed = linear("w", normed, gradient)
        found[layer.role("norm").name] = b.call(
            "aten::sum.dim_IntList", b.call("aten::mul.Tensor", passed, normed), [0]
        )
        return b.call("aten::mul.Tensor", passed, of("norm")), found
    return linear("w", x, gradient), found


__all__ = ["BF16", "F32", "LayerParams", "Param", "backward", "compute_dtype", "forward", "gathered_dtype", "inputs_of"]
