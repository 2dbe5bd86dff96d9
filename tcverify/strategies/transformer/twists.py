"""An unusual change at one point of a pattern: a twist changes the value that the pattern has reached, or its surroundings.

A twist is a function of the program and a byte that selects how. It raises NoSite if it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tcverify.program import PARTIAL, Recipe
from tcverify.strategies.draft import DraftGroup, DraftValue
from tcverify.strategies.transformer.sites import (
    ADD,
    ADD_RMS_NORM,
    ADD_RMS_NORM2,
    MARKERS,
    VIEW,
    call,
    chunk,
    gain,
    gather,
    new_input,
    norm,
    other_groups,
    pick,
    reduce,
    scatter,
    spec_of,
    token_axis,
)
from tcverify.strategies.transformer.writing import TransformerWriter, activation

Twist = Callable[[TransformerWriter, int], None]


def _axis(w: TransformerWriter) -> int:
    return token_axis(spec_of(w, w.hidden).shape)


def _both(w: TransformerWriter, change: Callable[[DraftValue], DraftValue]) -> None:
    """Change the value, and the residual alike."""
    w.hidden, w.residual = change(w.hidden), change(w.residual)


def elementwise(w: TransformerWriter, how: int) -> None:
    """An op on every element."""
    h = w.hidden
    ops: list[Callable[[], DraftValue]] = [
        lambda: call(w, "tensor_cast::gelu", h),
        lambda: call(w, "aten::mul.Tensor", h, 0.5),
        lambda: call(w, ADD, h, h),
        lambda: call(w, "aten::mul.Tensor", h, h),
        lambda: call(w, "aten::clone", h),
        lambda: call(w, ADD, h, (0.5, 1)[how // 8 % 2]),
        lambda: call(w, "aten::tanh", h),
        lambda: call(w, "aten::sub.Tensor", h, w.residual),
    ]
    w.hidden = pick(ops, how)()


def along_hidden(w: TransformerWriter, how: int) -> None:
    """Ops that work row by row, as norms do."""
    h, wide = w.hidden, spec_of(w, w.hidden).shape[-1]
    dtype = spec_of(w, h).dtype
    ops: list[Callable[[], DraftValue]] = [
        lambda: call(w, "tensor_cast::layer_norm", h, gain(w, h), None, w.setting.eps),
        lambda: call(w, "aten::softmax.int", h, -1),
        lambda: call(w, "aten::matmul", h, new_input(w, "wq", (wide, wide), dtype, recipe=Recipe(scale=0.5))),
        lambda: norm(w, h),
        lambda: call(w, "aten::sub.Tensor", h, call(w, "aten::mean.dim", h, [-1], True)),
        lambda: call(w, "aten::flip", h, [-1]),
    ]
    w.hidden = pick(ops, how)()


def along_tokens(w: TransformerWriter, how: int) -> None:
    """Ops that mix tokens."""
    h, axis = w.hidden, _axis(w)
    tokens = spec_of(w, h).shape[axis]
    dtype = spec_of(w, h).dtype
    ops: list[Callable[[], DraftValue]] = [
        lambda: call(w, "aten::flip", h, [axis]),
        lambda: call(w, "aten::softmax.int", h, axis),
        lambda: call(w, "aten::sub.Tensor", h, call(w, "aten::mean.dim", h, [axis], True)),
        lambda: call(w, "aten::cumsum", h, axis),
        lambda: call(w, "aten::roll", h, [1], [axis]),
        lambda: call(w, ADD, h, new_input(w, "shift", (tokens, 1), dtype)),
        lambda: call(w, "aten::mul.Tensor", h, new_input(w, "mask", (tokens, 1), dtype, recipe=Recipe("norm_weight"))),
    ]
    w.hidden = pick(ops, how)()


def fewer_tokens(w: TransformerWriter, how: int) -> None:
    """The pattern continues with some of the tokens."""
    axis = _axis(w)
    tokens = spec_of(w, w.hidden).shape[axis]
    first, last = [(0, max(1, tokens // 2)), (tokens // 2, tokens), (0, max(1, tokens - 1))][how % 3]
    _both(w, lambda value: call(w, "aten::slice.Tensor", value, axis, first, last))


def more_tokens(w: TransformerWriter, how: int) -> None:
    """The pattern continues with all tokens twice."""
    axis = _axis(w)
    _both(w, lambda value: call(w, "tensor_cast::cat", [value, value], axis))


def another_view(w: TransformerWriter, how: int) -> None:
    """The value, and perhaps the residual, continues in another shape."""
    *lead, tokens, wide = spec_of(w, w.hidden).shape
    forms = [
        [-1, wide],
        [1, *lead, tokens, wide],
        [*lead, tokens // 2, 2, wide],
        [*lead, 2, tokens // 2, wide],
        [tokens, -1, wide],
    ]
    shape = pick(forms, how)
    if how // 8 % 2:
        w.hidden = call(w, VIEW, w.hidden, shape)
    else:
        _both(w, lambda value: call(w, VIEW, value, shape))


def transpose_pattern(w: TransformerWriter, how: int) -> None:
    """The pattern continues with two dims swapped, perhaps also in memory."""
    _both(w, lambda value: call(w, "aten::transpose.int", value, 0, 1))
    if how % 2:
        _both(w, lambda value: call(w, "aten::clone", value, memory_format=torch.contiguous_format))


def marker(w: TransformerWriter, how: int) -> None:
    """A region begins or ends, or is copied."""
    w.hidden = call(w, pick(MARKERS, how), w.hidden, w.region())


def cast(w: TransformerWriter, how: int) -> None:
    """The value continues in another dtype."""
    dtype = spec_of(w, w.hidden).dtype
    w.hidden = call(w, "aten::_to_copy", w.hidden, dtype=torch.bfloat16 if dtype is torch.float32 else torch.float32)


def collective(w: TransformerWriter, how: int) -> None:
    """A collective, or two of which one undoes the other, on any dim."""
    h, main = w.hidden, DraftGroup(w.roles.main)
    axis = how // 8 % len(spec_of(w, h).shape)
    other = pick(other_groups(w, main), how // 32)
    forms: list[Callable[[], DraftValue]] = [
        lambda: reduce(w, h, main),
        lambda: reduce(w, h, other),
        lambda: gather(w, scatter(w, h, axis, main), axis, main),
        lambda: chunk(w, gather(w, h, axis, main), axis, w.roles.main),
        lambda: scatter(w, gather(w, h, axis, main), axis, main),
        lambda: gather(w, chunk(w, h, axis, w.roles.main), axis, main),
    ]
    w.hidden = pick(forms, how % 8)()


def keep_local_part(w: TransformerWriter, how: int) -> None:
    """The pattern continues with this rank's part of the tokens, or of another dim."""
    main = DraftGroup(w.roles.main)
    axis = _axis(w) if how % 4 < 3 else how // 8 % len(spec_of(w, w.hidden).shape)
    first = scatter(w, w.hidden, axis, main) if how % 2 else chunk(w, w.hidden, axis, w.roles.main)
    w.hidden, w.residual = first, chunk(w, w.residual, axis, w.roles.main)
    if how // 4 % 2:
        w.extras.append(gather(w, w.hidden, axis, main))


def gather_wider(w: TransformerWriter, how: int) -> None:
    """The pattern continues with the concatenated parts of the group's members."""
    axis = how % len(spec_of(w, w.hidden).shape)
    _both(w, lambda value: gather(w, value, axis, DraftGroup(w.roles.main)))


def write_into_pattern(w: TransformerWriter, how: int) -> None:
    """The program writes into the value, or into the residual, perhaps through a view."""
    value = w.residual if how % 2 else w.hidden
    spec = spec_of(w, value)
    addend = new_input(w, "bias", spec.shape[-1:], spec.dtype, recipe=Recipe(scale=0.5))
    target = call(w, VIEW, value, [-1, spec.shape[-1]]) if how // 2 % 2 else value
    w.draft.change(call(w, "aten::add_.Tensor", target, addend), on=value)


def return_pattern_value(w: TransformerWriter, how: int) -> None:
    """The value, or the residual, is returned as well."""
    w.extras.append(w.residual if how % 2 else w.hidden)


def read_pattern_value(w: TransformerWriter, how: int) -> None:
    """Something else reads the value, before the pattern continues."""
    h = w.residual if how // 8 % 2 else w.hidden
    forms: list[Callable[[], DraftValue]] = [
        lambda: norm(w, h),
        lambda: call(w, "tensor_cast::gelu", h),
        lambda: call(w, ADD_RMS_NORM, h, w.residual, gain(w, h), w.setting.eps),
        lambda: call(w, ADD_RMS_NORM2, w.residual, h, gain(w, h), w.setting.eps),
        lambda: call(w, VIEW, h, [-1, spec_of(w, h).shape[-1]]),
        lambda: call(w, "aten::sum.dim_IntList", h, [_axis(w)]),
        lambda: reduce(w, h, pick(other_groups(w, DraftGroup(w.roles.main)), how // 16)),
    ]
    w.extras.append(pick(forms, how % 8)())


def independent(w: TransformerWriter, how: int) -> None:
    """Another sum, over the same group or another, stands in between."""
    spec = spec_of(w, w.hidden)
    addend = new_input(w, "partial", spec.shape, spec.dtype, "partial")
    main = DraftGroup(w.roles.main)
    total = reduce(w, addend, main if how % 2 == 0 else pick(other_groups(w, main), how // 2))
    w.extras.append(norm(w, total) if how // 16 % 2 == 0 else total)


def residual(w: TransformerWriter, how: int) -> None:
    """The residual is a different one from here on."""
    shape, dtype = spec_of(w, w.hidden).shape, spec_of(w, w.hidden).dtype
    axis = token_axis(shape)
    main = w.roles.main
    forms: list[Callable[[], DraftValue]] = [
        lambda: w.hidden,
        lambda: new_input(w, "residual", shape, dtype, "varying"),
        lambda: new_input(w, "residual", shape, dtype, "partial"),
        lambda: new_input(w, "residual", shape, dtype, "shard", axis),
        lambda: reduce(
            w, activation(w, "partial", w.hidden.layout, (main, PARTIAL), dtype, w.partial), DraftGroup(main)
        ),
        lambda: reduce(w, w.residual, pick(other_groups(w, DraftGroup(main)), how // 16)),
        lambda: new_input(w, "residual", (1, shape[-1]), dtype),
        lambda: call(w, "aten::mul.Tensor", w.residual, 0.5),
        lambda: new_input(w, "residual", shape[axis:], dtype),
        lambda: gather(w, chunk(w, w.residual, axis, main), axis, DraftGroup(main)),
    ]
    w.residual = pick(forms, how)()


TWISTS: dict[str, Twist] = {
    "elementwise": elementwise,
    "along-hidden": along_hidden,
    "along-tokens": along_tokens,
    "fewer-tokens": fewer_tokens,
    "more-tokens": more_tokens,
    "another-view": another_view,
    "transposed": transpose_pattern,
    "marker": marker,
    "cast": cast,
    "collective": collective,
    "local": keep_local_part,
    "wider": gather_wider,
    "written": write_into_pattern,
    "returned": return_pattern_value,
    "read": read_pattern_value,
    "independent": independent,
    "residual": residual,
}
