"""Writes tensor-parallel transformer programs: a pure, total function from a mesh, a setting and blocks to a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tcverify.program import PARTIAL, VARYING, Mesh, Program, Recipe, shard
from tcverify.strategies.choices import BlockChoices, TransformerSetting
from tcverify.strategies.draft import RANK, DraftGroup, DraftValue, ProgramDraft, TokenLayout
from tcverify.strategies.transformer.mixers import mix
from tcverify.strategies.transformer.quantised import project_quantised
from tcverify.strategies.transformer.roles import roles_of
from tcverify.strategies.transformer.writing import (
    F32,
    TransformerWriter,
    activation,
    add,
    bias,
    cast,
    layout_of,
    matmul,
    projection,
    relayout,
    token_shape,
    weight,
)


def write_program(mesh: Mesh, setting: TransformerSetting, blocks: tuple[BlockChoices, ...]) -> TransformerWriter:
    """Write the program of these choices except its return value. Every combination of choices gives a well-typed program."""
    w = begin_program(mesh, setting)
    enter(w)
    for number, block in enumerate(blocks):
        w.draft.scope = (f"layer {number // 2}",)
        dim = w.roles.other if block.dp and w.roles.other is not None else w.roles.main
        addend, width = mix(w, block, dim, attention=number % 2 == 0)
        finish_block(w, block, dim, addend, width)
    w.draft.scope = ()
    return w


def begin_program(mesh: Mesh, setting: TransformerSetting) -> TransformerWriter:
    """Return an empty program with this setting."""
    roles = roles_of(mesh)
    times, more = setting.sequence if setting.sequence is not None else (0, setting.hidden)
    sequence = max(1, times * roles.largest + more)
    draft = ProgramDraft(mesh)
    partial = Recipe(setting.degenerate or "uniform")
    return TransformerWriter(setting, roles, draft, sequence, partial)


def finish_program(w: TransformerWriter, *labels: str) -> Program:
    """Build the program that returns the last hidden value and the extras."""
    return w.draft.program(result(w), w.setting.seed, [*_labels(w), *labels])


# --------------------------------------------------------------------------------------------------------- the blocks


def enter(w: TransformerWriter) -> None:
    """Add the input x and process it before the first block."""
    s = w.setting
    layout = layout_of(w, "sb" if s.layout == "sbh" else "bs", s.layout == "flat")
    kind = {"reduce": PARTIAL, "varying": VARYING}.get(s.entry)
    recipe = Recipe("zero_rows") if s.degenerate == "zero_rows" else Recipe()
    dtype = F32 if s.dtypes == "bf16-residual32" else w.dtype
    main = w.roles.main
    x = activation(w, "x", layout, (main, kind) if kind else None, dtype, w.partial if kind == PARTIAL else recipe)
    if s.entry == "reduce":
        x = all_reduce(w, x, main)
    w.first = w.residual = w.hidden = x
    if s.entry != "none":
        w.draft.scope = ("entry-norm",)
        w.hidden = _norm(w, "rms_norm", x, tie=False)


def finish_block(w: TransformerWriter, block: BlockChoices, dim: str, addend: DraftValue, width: int | None) -> None:
    """Project the mixer's result back to H, reduce it, and let view, marker, residual and norm follow.

    Args:
        width: global last size of `addend` when it needs the row-parallel projection, else None.
    """
    total = _reduce(w, block, dim, addend, width)
    if block.bias == "after":
        total = bias(w, total, w.setting.hidden, None, block.tie)
    if block.view == "between":
        total = _toggle(w, total)
    elif block.view == "transpose":
        total = relayout(w, total, TokenLayout("sb" if total.layout.order == "bs" else "bs"), w.setting.hidden)
    entered = total
    if "begin" in block.region:
        entered = _marker(w, "_internal_mark_region_begin", entered)
    elif block.region == "copy":
        entered = _marker(w, "_internal_copy_region", entered)
    shared = entered if block.inside else total  # by the norm and other readers
    _let_others_read(w, block, shared)
    hidden = _residual_and_norm(w, block, dim, entered)
    if block.norm != "unfused":
        hidden = _leave_region(w, block, hidden)
    if block.view == "behind":
        hidden = _toggle(w, hidden)
    if block.users == "add":
        hidden = add(w, hidden, relayout(w, shared, hidden.layout, w.setting.hidden), "reduced-read-later")
    w.hidden = hidden
    if block.keep == "hidden":
        w.extras.append(hidden)
    elif block.keep == "residual":
        w.extras.append(w.residual)


def _reduce(w: TransformerWriter, block: BlockChoices, dim: str, addend: DraftValue, width: int | None) -> DraftValue:
    hidden, main = w.setting.hidden, DraftGroup(dim)
    if block.view == "before":
        addend = _toggle(w, addend, -1 if width is not None else hidden)
    early = "before" in block.bias
    fuse = block.reduce == "fused" and w.setting.dtypes != "bf16-reduce32"
    if width is not None and block.linear != "float":
        addend = cast(w, addend, w.dtype)
        vector = weight(w, "bias", (hidden,), None, Recipe(scale=0.5), block.tie) if early else None
        addend, early = project_quantised(w, block.linear, addend, width, dim, vector, fuse), False
        if fuse:
            return addend
    elif width is not None:
        if fuse:
            addend = cast(w, addend, w.dtype)
            matrix = projection(w, addend, "wdown", (width, hidden), (dim, shard(0)), block.tie)
            vector = weight(w, "bias", (hidden,), None, Recipe(scale=0.5), block.tie) if early else None
            args = (addend, matrix, vector, RANK, main)
            fused = w.draft.call("tensor_cast::matmul_all_reduce", *args, labels=("fused-reduce",))
            return replace(fused, rms=0.6 * w.roles.size(dim))
        addend = matmul(w, addend, "wdown", (width, hidden), (dim, shard(0)), block.tie)
    if early:
        addend = bias(w, addend, hidden, None, block.tie)
    if block.reduce == "none":
        return addend
    if w.setting.dtypes == "bf16-reduce32":
        addend = cast(w, addend, F32)
    if block.reduce == "scatter-gather":
        axis = 0 if addend.layout.flat else 1
        extent = token_shape(w, addend.layout, hidden)[axis]
        if all(extent % size == 0 for size in w.roles.sizes(dim)):
            op, labels = "tensor_cast::reduce_scatter", ("scatter-gather",)
            part = w.draft.call(op, addend, axis, RANK, main, labels=labels)
            part = replace(part, rms=addend.rms * w.roles.size(dim), dense=True)
            return w.draft.call("tensor_cast::all_gather", part, axis, RANK, main)
    across = w.roles.other if dim == w.roles.main else w.roles.main
    # Only next to another norm: otherwise a defect that needs one norm would shrink to a twin and two groups.
    if block.twin and block.norm != "none" and across is not None and min(w.roles.sizes(across)) > 1:
        w.extras.append(_norm(w, "rms_norm", all_reduce(w, addend, across), tie=False))
    return all_reduce(w, addend, dim)


def _residual_and_norm(w: TransformerWriter, block: BlockChoices, dim: str, total: DraftValue) -> DraftValue:
    """Return what the next block reads, and carry the residual where the op does."""
    if block.norm in ("none", "rms", "layer"):
        op = {"rms": "rms_norm", "layer": "layer_norm"}.get(block.norm)
        return total if op is None else _norm(w, op, total, block.tie)
    residual = _residual(w, block, dim, total.layout)
    plain = layout_of(w, "bs", True), TokenLayout("bs")
    broadcasts = w.batch == 1 and total.layout in plain and residual.layout in plain
    if not broadcasts or block.align:
        residual = relayout(w, residual, total.layout, w.setting.hidden)
    if block.norm == "unfused":
        both = add(w, total, residual, "unfused-residual")
        w.residual = replace(both, layout=total.layout if residual.layout == total.layout else TokenLayout("bs"))
        return _norm(w, "rms_norm", _leave_region(w, block, w.residual), block.tie)
    a, b = (residual, total) if block.norm.endswith("swapped") else (total, residual)
    gain = weight(w, "gain", (w.setting.hidden,), None, Recipe("norm_weight"), block.tie)
    op = "tensor_cast::add_rms_norm2" if "2" in block.norm else "tensor_cast::add_rms_norm"
    normed = w.draft.call(op, a, b, gain, w.setting.eps, labels=("fused-residual",))
    normed = replace(normed, rms=1.0, dense=a.dense and b.dense)
    if "2" not in block.norm:
        return normed
    if block.keep == "tuple":
        w.extras.append(normed)
    w.residual = replace(w.draft.item(normed, 1, labels=("carried-residual",)), rms=a.rms + b.rms)
    return w.draft.item(normed, 0)


def _residual(w: TransformerWriter, block: BlockChoices, dim: str, layout: TokenLayout) -> DraftValue:
    if block.residual == "stream":
        return w.residual
    if block.residual == "first":
        return w.first
    dtype = F32 if w.setting.dtypes == "bf16-residual32" else w.dtype
    if block.residual == "input":
        return activation(w, "residual", layout, None, dtype, Recipe())
    if block.residual == "varying":
        return activation(w, "residual", layout, (dim, VARYING), dtype, Recipe())
    return all_reduce(w, activation(w, "partial", layout, (dim, PARTIAL), dtype, w.partial), dim)


def _let_others_read(w: TransformerWriter, block: BlockChoices, total: DraftValue) -> None:
    """Add further readers of the collective's result, whose results are returned."""
    if block.users == "output":
        w.extras.append(total)
    elif block.users == "norm":
        w.extras.append(_norm(w, "rms_norm", total, tie=False))
    elif block.users == "gelu":
        w.extras.append(w.draft.call("tensor_cast::gelu", total))
    elif block.users == "fused":
        residual = activation(w, "residual", total.layout, None, total.dtype, Recipe())
        gain = weight(w, "gain", (w.setting.hidden,), None, Recipe("norm_weight"), False)
        args = (total, residual, gain, w.setting.eps)
        w.extras.append(w.draft.call("tensor_cast::add_rms_norm", *args, labels=("fused-residual",)))


def _norm(w: TransformerWriter, op: str, value: DraftValue, tie: bool) -> DraftValue:
    gain = weight(w, "gain", (w.setting.hidden,), None, Recipe("norm_weight"), tie)
    args = (gain, w.setting.eps) if op == "rms_norm" else (gain, None, w.setting.eps)
    return replace(w.draft.call(f"tensor_cast::{op}", value, *args, labels=(op,)), rms=1.0)


def all_reduce(w: TransformerWriter, value: DraftValue, dim: str) -> DraftValue:
    reduced = w.draft.call("tensor_cast::all_reduce", value, RANK, DraftGroup(dim), labels=(f"over-{dim}",))
    return replace(reduced, rms=value.rms * w.roles.size(dim))


def _toggle(w: TransformerWriter, value: DraftValue, width: int | None = None) -> DraftValue:
    to = TokenLayout(value.layout.order, not value.layout.flat)
    return relayout(w, value, to, w.setting.hidden if width is None else width)


def _marker(w: TransformerWriter, op: str, value: DraftValue) -> DraftValue:
    return w.draft.call(f"tensor_cast::{op}", value, w.region(), labels=("region",))


def _leave_region(w: TransformerWriter, block: BlockChoices, value: DraftValue) -> DraftValue:
    if "end" in block.region:
        value = _marker(w, "_internal_mark_region_end", value)
    if block.region.endswith("-copy"):
        value = _marker(w, "_internal_copy_region", value)
    return value


# ----------------------------------------------------------------------------------------------------------- the whole


def result(w: TransformerWriter) -> Any:
    """What the program returns, as it nests."""
    if not w.extras:
        return w.hidden
    if w.setting.nest == "list":
        return [w.hidden, *w.extras]
    if w.setting.nest == "dict":
        return {f"out{i}": value for i, value in enumerate((w.hidden, *w.extras))}
    return (w.hidden, tuple(w.extras)) if w.setting.nest == "nested" else (w.hidden, *w.extras)


def _labels(w: TransformerWriter) -> list[str]:
    s = w.setting
    labels = ["rank-reduced" if s.layout == "flat" and s.batch == 1 else s.layout]
    if s.dtypes != "f32":
        labels += ["bf16"] if s.dtypes == "bf16" else ["bf16", "mixed-dtypes"]
    if w.roles.other is not None:
        labels.append("two-groups")
    if any(len({len(group) for group in dim.groups}) > 1 for dim in w.draft.mesh.dims):
        labels.append("uneven")
    if any(list(group) != sorted(group) for dim in w.draft.mesh.dims for group in dim.groups):
        labels.append("reordered")
    if w.sequence < w.roles.largest:
        labels.append("few-tokens")
    if len(w.extras) > 0:
        labels.append("extra-outputs")
    return labels
