"""Sites where a program under construction can be changed, and the small parts of which changes consist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tcverify.ops import TensorSpec
from tcverify.program import PARTIAL, VARYING, Placement, Recipe, shard
from tcverify.strategies.draft import RANK, UNIFORM, DraftGroup, DraftStep, DraftValue, NoSite, PerRank
from tcverify.strategies.transformer.programs import result
from tcverify.strategies.transformer.writing import TransformerWriter

T = TypeVar("T")

ALL_REDUCE = "tensor_cast::all_reduce"
ALL_GATHER = "tensor_cast::all_gather"
REDUCE_SCATTER = "tensor_cast::reduce_scatter"
RMS_NORM = "tensor_cast::rms_norm"
ADD_RMS_NORM = "tensor_cast::add_rms_norm"
ADD_RMS_NORM2 = "tensor_cast::add_rms_norm2"
ADD = "aten::add.Tensor"
VIEW = "aten::view"
NORMS = (RMS_NORM, ADD_RMS_NORM, ADD_RMS_NORM2)
FUSED = tuple(
    f"tensor_cast::{name}_all_reduce"
    for name in ("matmul", "static_quant_linear", "static_quant_linear_int4", "fp8_linear", "mxfp4_linear")
)
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, *FUSED)
MARKERS = tuple(f"tensor_cast::_internal_{name}" for name in ("mark_region_begin", "mark_region_end", "copy_region"))
#: Ops between two matrix products, above all the all_reduce.
CHAIN = (ALL_REDUCE, *MARKERS, VIEW, ADD, RMS_NORM, ADD_RMS_NORM, "getitem", "tensor_cast::layer_norm")


def pick(found: Sequence[T], choice: int) -> T:
    """The entry that a byte selects; raises NoSite if there is none."""
    if not found:
        raise NoSite
    return found[choice % len(found)]


def pick_recent(found: Sequence[T], choice: int) -> T:
    """The entry that a byte selects: 0 is the newest, and newer ones are more likely; raises NoSite if there is none."""
    if not found:
        raise NoSite
    return found[-1 - (choice**3 * len(found) >> 24)]


def calls(w: TransformerWriter, *ops: str) -> list[tuple[DraftValue, DraftStep]]:
    """The calls of these ops that the program needs."""
    return [(value, step) for value, step in w.draft.steps(result(w)) if step.op in ops]


def activations(w: TransformerWriter) -> list[DraftValue]:
    """Results of the chains between matrix products; those of all_reduces stand twice, once in front."""
    found = calls(w, *CHAIN)
    return [v for v, s in found if s.op == ALL_REDUCE] + [v for v, _ in found]


def spec_of(w: TransformerWriter, value: DraftValue) -> TensorSpec:
    """The spec of a tensor on the first rank, whose shape is that of all ranks; else NoSite."""
    w.draft.shape(value)
    return w.draft.spec(value)


def readers(w: TransformerWriter, value: DraftValue) -> list[tuple[DraftValue, DraftStep]]:
    """The steps that read `value`."""
    return [(v, s) for v, s in w.draft.steps(result(w)) if value.number in s.reads]


def call(w: TransformerWriter, op: str, *args: Any, **kwargs: Any) -> DraftValue:
    """Add a call, or raise NoSite when some rank could not run it."""
    return w.draft.typed_call(op, *args, **kwargs)


def swap_in(w: TransformerWriter, old: DraftValue, new: DraftValue) -> None:
    """Make all readers of `old`, including outputs, read `new`, except those that `new` depends on."""
    w.draft.redirect(old, new)
    if w.hidden.number == old.number:
        w.hidden = new
    w.extras = [new if isinstance(v, DraftValue) and v.number == old.number else v for v in w.extras]


def new_input(
    w: TransformerWriter,
    role: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    kind: str = "replicated",
    axis: int = 0,
    recipe: Recipe = UNIFORM,
    dim: str = "",
) -> DraftValue:
    """Add an input of which every rank has this shape: of kind "shard", a part of a larger one.

    Args:
        kind: how it is placed: "replicated", "varying", "partial" or "shard".
        axis: the dim of the tensor that is sharded.
        dim: the mesh dim over which it is placed; by default the main one.
    """
    dim = dim or w.roles.main
    whole = list(shape)
    if kind == "shard":
        if len(w.roles.sizes(dim)) > 1 or not whole:
            raise NoSite
        whole[axis] *= w.roles.size(dim)
    known: dict[str, Placement] = {"varying": VARYING, "partial": PARTIAL, "shard": shard(axis)}
    declared = w.roles.declared([(dim, known[kind])] if kind in known else [])
    return w.draft.input(role, tuple(whole), dtype, declared, recipe, rms=0.6 * recipe.scale)


def gain(w: TransformerWriter, value: DraftValue) -> DraftValue:
    """Add a norm weight for the rows of `value`."""
    spec = spec_of(w, value)
    return new_input(w, "gain", spec.shape[-1:], spec.dtype, recipe=Recipe("norm_weight"))


def norm(w: TransformerWriter, value: DraftValue) -> DraftValue:
    """Norm the rows of a value."""
    return call(w, RMS_NORM, value, gain(w, value), w.setting.eps)


def group(w: TransformerWriter, dim: str, part: str = "whole") -> DraftGroup | PerRank:
    """A group of each rank: that of a mesh dim, the same in reverse, half of it, or the rank alone."""
    found = w.draft.mesh.dim(dim)
    if part == "reversed":
        return PerRank(f"{dim}_reversed", lambda rank: list(found.group(rank))[::-1])
    if part == "half":

        def half(rank: int) -> list[int]:
            members = list(found.group(rank))
            middle = len(members) // 2 if len(members) % 2 == 0 else 0  # members of a class need groups of one size
            return members[:middle] if found.position(rank) < middle else members[middle:]

        return PerRank(f"{dim}_half", half)
    return PerRank("alone", lambda rank: [rank]) if part == "alone" else DraftGroup(dim)


def other_groups(w: TransformerWriter, known: Any) -> list[DraftGroup | PerRank]:
    """Groups other than `known`: first of all the mesh's other dim."""
    dims = [DraftGroup(dim.name) for dim in w.draft.mesh.dims]
    parts = [group(w, w.roles.main, part) for part in ("reversed", "alone", "half")]
    return [g for g in (*dims, *parts) if g != known and getattr(g, "name", "") != getattr(known, "name", "-")]


def chunk(w: TransformerWriter, value: DraftValue, axis: int, dim: str) -> DraftValue:
    """Slice this rank's part of a value, by its position in its group of `dim`."""
    extent = spec_of(w, value).shape[axis]
    found = w.draft.mesh.dim(dim)
    if any(extent % size for size in w.roles.sizes(dim)):
        raise NoSite

    def start(rank: int) -> int:
        return found.position(rank) * (extent // len(found.group(rank)))

    def end(rank: int) -> int:
        return (found.position(rank) + 1) * (extent // len(found.group(rank)))

    first, last = PerRank(f"{dim}_start{extent}", start), PerRank(f"{dim}_end{extent}", end)
    return call(w, "aten::slice.Tensor", value, axis, first, last)


def scatter(w: TransformerWriter, value: DraftValue, axis: int, over: DraftGroup | PerRank) -> DraftValue:
    """Sum over a group and keep this rank's part."""
    return call(w, REDUCE_SCATTER, value, axis, RANK, over)


def gather(w: TransformerWriter, value: DraftValue, axis: int, over: DraftGroup | PerRank) -> DraftValue:
    """Concatenate the parts of a group's members."""
    return call(w, ALL_GATHER, value, axis, RANK, over)


def reduce(w: TransformerWriter, value: DraftValue, over: DraftGroup | PerRank) -> DraftValue:
    """Sum over a group."""
    return call(w, ALL_REDUCE, value, RANK, over)


def token_axis(shape: Sequence[int]) -> int:
    """The dim of the tokens: the second from the right."""
    if len(shape) < 2:
        raise NoSite
    return len(shape) - 2
