"""The state of an asynchronous program that is being written, and the small pieces of compute that it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tcverify.program import PARTIAL, VARYING, InputSpec, Placement, Recipe, shard
from tcverify.strategies.functional.choices import FunctionalRecord, FunctionalSetting
from tcverify.strategies.functional.script import Script, ScriptValue
from tcverify.strategies.transformer.draft import RANK, PerRank
from tcverify.strategies.transformer.roles import Roles
from tcverify.strategies.transformer.sites import UNIFORM, NoSite

ADD, MUL = "aten::add.Tensor", "aten::mul.Tensor"
F32, BF16 = torch.float32, torch.bfloat16

#: Most elements of one value on one rank, and what values may measure before they are scaled down.
MOST_ELEMENTS = 4096
MOST_RMS = 4.0


@dataclass(frozen=True, slots=True)
class Pending:
    """Collectives that somebody will wait for, or whose results somebody will use.

    Attributes:
        items: what they make.
        due: number of the record behind which it happens.
        record: what is drawn about it.
        operands: what they read.
        waited: whether the waits have run.
    """

    items: tuple[ScriptValue, ...]
    due: int
    record: FunctionalRecord
    operands: tuple[ScriptValue, ...]
    waited: bool = False


@dataclass(slots=True)
class FunctionalFlow:
    """An asynchronous program half written.

    Attributes:
        tokens: rows of activations: a multiple of the size of every group.
        main: the activation that layers are added to, [tokens, hidden] on every rank.
        pool: values that may be read.
        outputs: what is returned at any rate.
        later: what is used at the end.
        pending: what is under way, oldest first.
        saved: activations and weights of layers, for their gradients.
        grads: gradients that wait to be reduced together.
        grad: of the activations.
        number: of the current record.
    """

    script: Script
    roles: Roles
    setting: FunctionalSetting
    tokens: int
    main: ScriptValue = field(init=False)
    pool: list[ScriptValue] = field(default_factory=list)
    outputs: list[ScriptValue] = field(default_factory=list)
    later: list[ScriptValue] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    saved: list[tuple[ScriptValue, ScriptValue]] = field(default_factory=list)
    grads: list[ScriptValue] = field(default_factory=list)
    grad: ScriptValue | None = None
    number: int = 0
    labels: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return F32 if self.setting.dtype == "f32" else BF16

    @property
    def dims(self) -> list[str]:
        return [dim.name for dim in self.script.mesh.dims]

    def dim(self, choice: int) -> str:
        """A mesh dim; the main one most often."""
        other = self.roles.other
        return other if other is not None and choice % 5 > 2 else self.roles.main

    def attempt(self, write: Callable[[FunctionalFlow, FunctionalRecord], None], record: FunctionalRecord) -> bool:
        """Write a piece if it fits, else leave everything as it was."""
        length, flying = len(self.script), self.script.flying
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        main, grad = self.main, self.grad
        self.script.flying = dict(flying)
        try:
            write(self, record)
        except NoSite:
            self.script.rollback(length, flying)
            self.main, self.grad = main, grad
            for name, before in lists.items():
                setattr(self, name, before)
            return False
        return True


_LISTS = ("pool", "outputs", "later", "pending", "saved", "grads", "labels")


# ----------------------------------------------------------------------------------------------------------- operands


def pick_recent(found: Sequence[ScriptValue], choice: int) -> ScriptValue:
    """The value that a byte picks: 0 the newest, and newer ones more often."""
    if not found:
        raise NoSite
    return found[-1 - (choice**3 * len(found) >> 24)]


def new_input(
    flow: FunctionalFlow,
    role: str,
    shape: Sequence[int],
    kind: str = "replicated",
    dim: str = "",
    dtype: torch.dtype | None = None,
    recipe: Recipe = UNIFORM,
) -> ScriptValue:
    """Add an input that has this shape on every rank.

    Args:
        kind: how it is placed over the mesh dim: "replicated", "varying", "partial", or "shard" where groups have one size.
    """
    dim = dim or flow.roles.main
    whole = list(shape)
    if kind == "shard" and (len(set(flow.roles.sizes(dim))) > 1 or not whole):
        kind = "varying"
    if kind == "shard":
        whole[0] *= flow.roles.size(dim)
    known: dict[str, Placement] = {"varying": VARYING, "partial": PARTIAL, "shard": shard(0)}
    placements = flow.roles.declared([(dim, known[kind])] if kind in known else [])
    return flow.script.input(InputSpec(role, tuple(whole), dtype or flow.dtype, placements, recipe), 0.6 * recipe.scale)


def pick_operand(
    flow: FunctionalFlow, choice: int, need: Callable[[ScriptValue], bool] = lambda value: True
) -> ScriptValue:
    """A value that can be read now and meets a need; an input straight from the caller here and there."""
    found = [v for v in (*flow.pool, flow.main) if flow.script.readable(v) and is_floating(flow, v) and need(v)]
    if choice % 8 == 7 or not found:
        made = new_input(flow, "x", (flow.tokens, flow.setting.hidden), flow.setting.data, flow.dim(choice // 8))
        if need(made):
            return made
    return pick_recent(found, choice)


def is_floating(flow: FunctionalFlow, value: ScriptValue) -> bool:
    return flow.script.spec(value).dtype.is_floating_point


def partner(flow: FunctionalFlow, value: ScriptValue, choice: int) -> ScriptValue:
    """Another value of one type with `value`, or a new input."""
    found = [v for v in (*flow.pool, flow.main) if flow.script.readable(v) and flow.script.same_type(v, value)]
    if found and choice % 4 != 3:
        return pick_recent(found, choice)
    spec = flow.script.spec(value)
    return new_input(flow, "y", flow.script.shape(value), "varying", dtype=spec.dtype)


def per_rank(flow: FunctionalFlow, name: str, of: Callable[[int], Any]) -> Any:
    """What `of` says, where it says one thing on all ranks, else a rank constant."""
    said = [of(rank) for rank in range(flow.script.mesh.world_size)]
    return said[0] if all(one == said[0] for one in said) else PerRank(name, of)


def group_of(flow: FunctionalFlow, dim: str) -> PerRank:
    """The ranks of each rank's group, for collectives of tensor_cast."""
    found = flow.script.mesh.dim(dim)
    return PerRank(dim, lambda rank: list(found.group(rank)))


def group_size(flow: FunctionalFlow, dim: str) -> Any:
    found = flow.script.mesh.dim(dim)
    return per_rank(flow, f"{dim}_size", lambda rank: len(found.group(rank)))


# ------------------------------------------------------------------------------------------------------------ compute


def bound_value(flow: FunctionalFlow, value: ScriptValue) -> ScriptValue:
    """The value, scaled down where it has become large."""
    if flow.script.elements(value) > MOST_ELEMENTS:
        raise NoSite
    if value.rms <= MOST_RMS:
        return value
    return flow.script.call(MUL, value, 0.125, rms=value.rms / 8)


def add(flow: FunctionalFlow, a: ScriptValue, b: ScriptValue) -> ScriptValue:
    return bound_value(flow, flow.script.call(ADD, a, b, rms=a.rms + b.rms))


def matmul(
    flow: FunctionalFlow, value: ScriptValue, width: int, role: str = "w", kind: str = "varying", dim: str = ""
) -> ScriptValue:
    """Multiply rows by a new weight."""
    inner = flow.script.spec(value).shape[-1]
    made, _ = multiply_by_weight(flow, value, weight(flow, value, (inner, width), role, kind, dim))
    return made


def weight(
    flow: FunctionalFlow,
    value: ScriptValue,
    shape: tuple[int, int],
    role: str = "w",
    kind: str = "varying",
    dim: str = "",
) -> ScriptValue:
    """A weight for what `value` is, scaled by a power of two so that products are about 0.6."""
    scale = 2.0 ** round(-math.log2(math.sqrt(max(shape[0], 1)) * max(value.rms, 1e-2)))
    return new_input(flow, role, shape, kind, dim, flow.script.spec(value).dtype, Recipe(scale=scale))


def multiply_by_weight(flow: FunctionalFlow, value: ScriptValue, by: ScriptValue) -> tuple[ScriptValue, ScriptValue]:
    """The product, bounded, and the weight."""
    return bound_value(flow, flow.script.call("aten::mm", value, by, rms=0.6)), by


UNARY = (
    "aten::relu", "tensor_cast::gelu", "aten::tanh", "tensor_cast::silu", "aten::neg", "aten::sin", "aten::abs",
    "aten::clone",
)  # fmt: skip


def unary(flow: FunctionalFlow, value: ScriptValue, choice: int) -> ScriptValue:
    return bound_value(flow, flow.script.call(UNARY[choice % len(UNARY)], value))


def write_norm(flow: FunctionalFlow, value: ScriptValue, choice: int) -> ScriptValue:
    """A norm of the rows: one op, one with a residual, or the ops that it is made of."""
    spec = flow.script.spec(value)
    gain = new_input(flow, "gain", spec.shape[-1:], dtype=spec.dtype, recipe=Recipe("norm_weight"))
    call = flow.script.call
    if choice % 3 == 0:
        return call("tensor_cast::rms_norm", value, gain, 1e-5, rms=1.0)
    if choice % 3 == 1:
        square = call("aten::pow.Tensor_Scalar", value, 2)
        mean = call("aten::mean.dim", square, [-1], True)
        inverse = call("aten::rsqrt", call(ADD, mean, 1e-3))
        return call(MUL, call(MUL, value, inverse), gain, rms=1.0)
    return call("tensor_cast::add_rms_norm", value, partner(flow, value, choice // 3), gain, 1e-5, rms=1.0)


def write_into_value(flow: FunctionalFlow, target: ScriptValue, choice: int, source: ScriptValue | None = None) -> None:
    """Write into a value that nobody is reading: add, scale or copy."""
    if not flow.script.writable(target) or not is_floating(flow, target):
        raise NoSite
    how = choice % 4
    if how == 1 and source is None:
        flow.script.call("aten::mul_.Tensor", target, 0.5)
        return
    other = source if source is not None else partner(flow, target, choice // 4)
    ours, theirs = flow.script.spec(target), flow.script.spec(other)
    if ours.alias == theirs.alias and ours != theirs:  # torch refuses operands that overlap in part
        other = flow.script.call("aten::clone", other)
    if how == 2:
        flow.script.call("aten::copy_", target, other)
    else:
        flow.script.call("aten::add_.Tensor", target, other, alpha=0.25 if source is None else -0.125)


__all__ = [
    "ADD",
    "BF16",
    "F32",
    "MUL",
    "RANK",
    "FunctionalFlow",
    "Pending",
    "add",
    "bound_value",
    "group_of",
    "group_size",
    "is_floating",
    "matmul",
    "multiply_by_weight",
    "new_input",
    "partner",
    "per_rank",
    "pick_operand",
    "pick_recent",
    "replace",
    "unary",
    "weight",
    "write_into_value",
    "write_norm",
]  # fmt: skip
