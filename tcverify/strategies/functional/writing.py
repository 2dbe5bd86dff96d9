"""The state of an asynchronous program under construction, and the small parts of compute that it consists of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tcverify.program import PARTIAL, VARYING, Placement, Recipe, shard
from tcverify.strategies.draft import RANK, UNIFORM, DraftValue, NoSite, PerRank
from tcverify.strategies.functional.choices import FunctionalRecord, FunctionalSetting
from tcverify.strategies.functional.draft import AsyncDraft
from tcverify.strategies.transformer.roles import Roles
from tcverify.strategies.transformer.sites import pick_recent

ADD, MUL = "aten::add.Tensor", "aten::mul.Tensor"
F32, BF16 = torch.float32, torch.bfloat16

#: Most elements of one value on one rank, and what values may measure before they are scaled down.
MOST_ELEMENTS = 4096
MOST_RMS = 4.0


@dataclass(frozen=True, slots=True)
class Pending:
    """Collectives that will be waited for, or whose results will be used.

    Attributes:
        items: their results.
        due: number of the record after which this happens.
        record: the drawn choices.
        operands: their operands.
        waited: whether the waits have run.
    """

    items: tuple[DraftValue, ...]
    due: int
    record: FunctionalRecord
    operands: tuple[DraftValue, ...]
    waited: bool = False


@dataclass(slots=True)
class FunctionalWriter:
    """An asynchronous program under construction.

    Attributes:
        tokens: rows of activations: a multiple of the size of every group.
        main: the activation that layers are added to, [tokens, hidden] on every rank.
        pool: values that may be read.
        outputs: values that are returned in any case.
        later: values that are used at the end.
        pending: collectives in flight, oldest first.
        saved: activations and weights of layers, for their gradients.
        grads: gradients that wait to be reduced together.
        grad: of the activations.
        number: of the current record.
    """

    draft: AsyncDraft
    roles: Roles
    setting: FunctionalSetting
    tokens: int
    main: DraftValue = field(init=False)
    pool: list[DraftValue] = field(default_factory=list)
    outputs: list[DraftValue] = field(default_factory=list)
    later: list[DraftValue] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    saved: list[tuple[DraftValue, DraftValue]] = field(default_factory=list)
    grads: list[DraftValue] = field(default_factory=list)
    grad: DraftValue | None = None
    number: int = 0
    labels: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return F32 if self.setting.dtype == "f32" else BF16

    @property
    def dims(self) -> list[str]:
        return [dim.name for dim in self.draft.mesh.dims]

    def dim(self, choice: int) -> str:
        """A mesh dim; the main one most often."""
        other = self.roles.other
        return other if other is not None and choice % 5 > 2 else self.roles.main


# ----------------------------------------------------------------------------------------------------------- operands


def new_input(
    w: FunctionalWriter,
    role: str,
    shape: Sequence[int],
    kind: str = "replicated",
    dim: str = "",
    dtype: torch.dtype | None = None,
    recipe: Recipe = UNIFORM,
) -> DraftValue:
    """Add an input that has this shape on every rank.

    Args:
        kind: how it is placed over the mesh dim: "replicated", "varying", "partial", or "shard" where groups have one size.
    """
    dim = dim or w.roles.main
    whole = list(shape)
    if kind == "shard" and (len(set(w.roles.sizes(dim))) > 1 or not whole):
        kind = "varying"
    if kind == "shard":
        whole[0] *= w.roles.size(dim)
    known: dict[str, Placement] = {"varying": VARYING, "partial": PARTIAL, "shard": shard(0)}
    placements = w.roles.declared([(dim, known[kind])] if kind in known else [])
    return w.draft.input(role, tuple(whole), dtype or w.dtype, placements, recipe, rms=0.6 * recipe.scale)


def pick_operand(
    w: FunctionalWriter, choice: int, need: Callable[[DraftValue], bool] = lambda value: True
) -> DraftValue:
    """A value that can be read now and meets a condition; sometimes a new input."""
    found = [v for v in (*w.pool, w.main) if w.draft.readable(v) and is_floating(w, v) and need(v)]
    if choice % 8 == 7 or not found:
        made = new_input(w, "x", (w.tokens, w.setting.hidden), w.setting.data, w.dim(choice // 8))
        if need(made):
            return made
    return pick_recent(found, choice)


def is_floating(w: FunctionalWriter, value: DraftValue) -> bool:
    return w.draft.spec(value).dtype.is_floating_point


def partner(w: FunctionalWriter, value: DraftValue, choice: int) -> DraftValue:
    """Another value of the same type as `value`, or a new input."""
    found = [v for v in (*w.pool, w.main) if w.draft.readable(v) and w.draft.same_type(v, value)]
    if found and choice % 4 != 3:
        return pick_recent(found, choice)
    spec = w.draft.spec(value)
    return new_input(w, "y", w.draft.shape(value), "varying", dtype=spec.dtype)


def per_rank(w: FunctionalWriter, name: str, of: Callable[[int], Any]) -> Any:
    """The result of `of`, if it is the same on all ranks, else a rank constant."""
    said = [of(rank) for rank in range(w.draft.mesh.world_size)]
    return said[0] if all(one == said[0] for one in said) else PerRank(name, of)


def group_of(w: FunctionalWriter, dim: str) -> PerRank:
    """The ranks of each rank's group, for collectives of tensor_cast."""
    found = w.draft.mesh.dim(dim)
    return PerRank(dim, lambda rank: list(found.group(rank)))


def group_size(w: FunctionalWriter, dim: str) -> Any:
    found = w.draft.mesh.dim(dim)
    return per_rank(w, f"{dim}_size", lambda rank: len(found.group(rank)))


# ------------------------------------------------------------------------------------------------------------ compute


def bound_value(w: FunctionalWriter, value: DraftValue) -> DraftValue:
    """The value, scaled down if it has become large."""
    if w.draft.elements(value) > MOST_ELEMENTS:
        raise NoSite
    if value.rms <= MOST_RMS:
        return value
    return w.draft.call(MUL, value, 0.125, rms=value.rms / 8)


#: How two values of one type become one: the op, and its arguments beside them.
COMBINATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "add": (ADD, {}),
    "alpha": (ADD, {"alpha": 2}),
    "sub": ("aten::sub.Tensor", {}),
    "sub alpha": ("aten::sub.Tensor", {"alpha": 2}),
    "mul": (MUL, {}),
}


def combine(w: FunctionalWriter, by: str, a: DraftValue, b: DraftValue) -> DraftValue:
    """Compute one value of two; see `COMBINATIONS`."""
    op, more = COMBINATIONS[by]
    rms = a.rms * b.rms if by == "mul" else a.rms + more.get("alpha", 1) * b.rms
    return bound_value(w, w.draft.call(op, a, b, **more, rms=rms))


def add(w: FunctionalWriter, a: DraftValue, b: DraftValue) -> DraftValue:
    return combine(w, "add", a, b)


def matmul(
    w: FunctionalWriter, value: DraftValue, width: int, role: str = "w", kind: str = "varying", dim: str = ""
) -> DraftValue:
    """Multiply rows by a new weight."""
    inner = w.draft.spec(value).shape[-1]
    made, _ = multiply_by_weight(w, value, weight(w, value, (inner, width), role, kind, dim))
    return made


def weight(
    w: FunctionalWriter,
    value: DraftValue,
    shape: tuple[int, int],
    role: str = "w",
    kind: str = "varying",
    dim: str = "",
) -> DraftValue:
    """A weight for what `value` is, scaled by a power of two so that products are about 0.6."""
    scale = 2.0 ** round(-math.log2(math.sqrt(max(shape[0], 1)) * max(value.rms, 1e-2)))
    return new_input(w, role, shape, kind, dim, w.draft.spec(value).dtype, Recipe(scale=scale))


def multiply_by_weight(w: FunctionalWriter, value: DraftValue, by: DraftValue) -> tuple[DraftValue, DraftValue]:
    """The product, bounded, and the weight."""
    return bound_value(w, w.draft.call("aten::mm", value, by, rms=0.6)), by


UNARY = (
    "aten::relu", "tensor_cast::gelu", "aten::tanh", "tensor_cast::silu", "aten::neg", "aten::sin", "aten::abs",
    "aten::clone",
)  # fmt: skip


def unary(w: FunctionalWriter, value: DraftValue, choice: int) -> DraftValue:
    return bound_value(w, w.draft.call(UNARY[choice % len(UNARY)], value))


def write_norm(w: FunctionalWriter, value: DraftValue, choice: int) -> DraftValue:
    """A norm of the rows: one op, one with a residual, or the ops that it is made of."""
    spec = w.draft.spec(value)
    gain = new_input(w, "gain", spec.shape[-1:], dtype=spec.dtype, recipe=Recipe("norm_weight"))
    call = w.draft.call
    if choice % 3 == 0:
        return call("tensor_cast::rms_norm", value, gain, 1e-5, rms=1.0)
    if choice % 3 == 1:
        square = call("aten::pow.Tensor_Scalar", value, 2)
        mean = call("aten::mean.dim", square, [-1], True)
        inverse = call("aten::rsqrt", call(ADD, mean, 1e-3))
        return call(MUL, call(MUL, value, inverse), gain, rms=1.0)
    return call("tensor_cast::add_rms_norm", value, partner(w, value, choice // 3), gain, 1e-5, rms=1.0)


def write_into_value(w: FunctionalWriter, target: DraftValue, choice: int, source: DraftValue | None = None) -> None:
    """Write into a value that is not being read: add, scale or copy."""
    if not w.draft.writable(target) or not is_floating(w, target):
        raise NoSite
    how = choice % 4
    if how == 1 and source is None:
        w.draft.call("aten::mul_.Tensor", target, 0.5)
        return
    other = source if source is not None else partner(w, target, choice // 4)
    ours, theirs = w.draft.spec(target), w.draft.spec(other)
    if ours.alias == theirs.alias and ours != theirs:  # torch refuses operands that overlap in part
        other = w.draft.call("aten::clone", other)
    if how == 2:
        w.draft.call("aten::copy_", target, other)
    else:
        w.draft.call("aten::add_.Tensor", target, other, alpha=0.25 if source is None else -0.125)


__all__ = [
    "ADD",
    "BF16",
    "F32",
    "MUL",
    "RANK",
    "FunctionalWriter",
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
    "unary",
    "weight",
    "write_into_value",
    "write_norm",
]  # fmt: skip
