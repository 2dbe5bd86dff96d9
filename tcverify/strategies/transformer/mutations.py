"""Changes of a program under construction, each of which may break a pass. All of them keep it well-typed.

A mutation is a function of the program, the byte that selects where and the byte that selects how. If the program has nothing
to change, it raises NoSite, or makes a call whose shapes do not fit; then the program is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tcverify.ops import TensorSpec
from tcverify.program import Recipe, shard
from tcverify.strategies.draft import DraftGroup, DraftStep, DraftValue, NoSite
from tcverify.strategies.transformer.sites import (
    ADD,
    ADD_RMS_NORM,
    ADD_RMS_NORM2,
    ALL_REDUCE,
    COLLECTIVES,
    NORMS,
    RMS_NORM,
    VIEW,
    activations,
    call,
    calls,
    chunk,
    gain,
    gather,
    new_input,
    norm,
    other_groups,
    pick,
    readers,
    reduce,
    scatter,
    spec_of,
    swap_in,
    token_axis,
)
from tcverify.strategies.transformer.writing import TransformerWriter

Mutation = Callable[[TransformerWriter, int, int], None]


# --------------------------------------------------------------------------------------------------------------- readers


def extra_user(w: TransformerWriter, where: int, how: int) -> None:
    """Something else reads a value too."""
    value = pick(activations(w), where)
    if how % 8 == 7:  # something later in the program, which continues with the sum
        later = [
            v for v in activations(w) if v.number > value.number and spec_of(w, v).shape == spec_of(w, value).shape
        ]
        target = w.draft.behind = pick(later, how // 8)
        swap_in(w, target, call(w, ADD, target, value))
        return
    w.draft.behind = value
    made: list[Callable[[], DraftValue]] = [
        lambda: call(w, "tensor_cast::gelu", value),
        lambda: norm(w, value),
        lambda: call(w, ADD, value, value),
        lambda: call(w, VIEW, value, [-1, spec_of(w, value).shape[-1]]),
        lambda: call(w, "aten::mean.dim", value, [-1]),
        lambda: call(w, "aten::slice.Tensor", value, 0, 0, 1),
        lambda: call(w, ADD_RMS_NORM, value, value, gain(w, value), w.setting.eps),
    ]
    w.extras.append(pick(made, how)())


def inner_output(w: TransformerWriter, where: int, how: int) -> None:
    """A value from within is returned as well."""
    value = pick(activations(w), where)
    w.draft.change(value)
    w.extras.append(value)


def tuple_whole(w: TransformerWriter, where: int, how: int) -> None:
    """A tuple of results is returned whole."""
    value, _ = pick(calls(w, ADD_RMS_NORM2), where)
    w.draft.change(value)
    w.extras.append(value)


def one_result(w: TransformerWriter, where: int, how: int) -> None:
    """Of the two results, one is unused: its readers read the first addend."""
    value, step = pick(calls(w, ADD_RMS_NORM2), where)
    for item, selection in readers(w, value):
        if selection.args[1] % 2 == how % 2:
            swap_in(w, item, step.args[0])
    w.draft.change(value)


def negative_getitem(w: TransformerWriter, where: int, how: int) -> None:
    """A result is selected from behind; perhaps it is selected twice, and both are returned."""
    pairs = [(v, s) for v, s in calls(w, "getitem") if s.args[1] >= 0]
    value, step = pick(pairs, where)
    w.draft.change(value, args=(step.args[0], step.args[1] - 2))
    if how % 2:
        w.extras += [value, w.draft.item(*step.args)]


# -------------------------------------------------------------------------------------------------------------- operands


def swapped_addends(w: TransformerWriter, where: int, how: int) -> None:
    """The addends of an addition are swapped."""
    value, step = pick(calls(w, ADD, ADD_RMS_NORM, ADD_RMS_NORM2), where)
    first, second, *rest = step.args
    if not isinstance(second, DraftValue):
        raise NoSite
    w.draft.change(value, args=(second, first, *rest))


def scaled_addend(w: TransformerWriter, where: int, how: int) -> None:
    """The second addend counts twice, or half."""
    value, step = pick(calls(w, ADD), where)
    w.draft.change(value, kwargs={**step.kwargs, "alpha": (2, 0.5)[how % 2]})


def _replace_addend(w: TransformerWriter, where: int, make: Callable[[TensorSpec], Any]) -> None:
    """Replace a residual, that is the addend that is not the latest value, by something else."""
    value, step = pick(calls(w, ADD_RMS_NORM2, ADD_RMS_NORM, ADD), where)
    first, second, *rest = step.args
    if not isinstance(second, DraftValue):
        raise NoSite
    older = 0 if first.number < second.number else 1
    made = make(spec_of(w, (first, second)[older]))
    if not isinstance(made, DraftValue) and (step.op != ADD or older == 0):
        raise NoSite  # numbers are second operands of plain sums
    w.draft.change(value, args=(made, second, *rest) if older == 0 else (first, made, *rest))


def broadcast_addend(w: TransformerWriter, where: int, how: int) -> None:
    """An addend is broadcast: [1, H], [H], [1, 1, H], [1] or a number."""

    def make(spec: TensorSpec) -> Any:
        wide = spec.shape[-1]
        shapes: list[tuple[int, ...]] = [
            (1, wide),
            (wide,),
            (1, 1, wide),
            (1,),
            (*spec.shape[:-1], 1),
            (1,) * len(spec.shape),
        ]
        if how % 8 >= len(shapes):
            return (0.5, 1)[how % 2]
        return new_input(w, "residual", shapes[how % 8], spec.dtype)

    _replace_addend(w, where, make)


def foreign_residual(w: TransformerWriter, where: int, how: int) -> None:
    """A residual is placed in another way, though its shape is the same."""

    def make(spec: TensorSpec) -> Any:
        kinds = [
            ("varying", 0),
            ("partial", 0),
            ("shard", token_axis(spec.shape)),
            ("shard", len(spec.shape) - 1),
            ("shard", 0),
        ]
        kind, axis = kinds[how % len(kinds)]
        return new_input(w, "residual", spec.shape, spec.dtype, kind, axis)

    _replace_addend(w, where, make)


def odd_weight(w: TransformerWriter, where: int, how: int) -> None:
    """A norm weight has the activation's shape, or size 1. It stays equal on all members, as norms need it."""
    value, step = pick(calls(w, *NORMS), where)
    slot = 1 if step.op == RMS_NORM else 2
    shape, dtype = spec_of(w, step.args[0]).shape, spec_of(w, step.args[slot]).dtype
    tokens, hidden = shape[token_axis(shape)], shape[-1]
    forms: list[tuple[int, ...]] = [(tokens, hidden), (1,), shape, (tokens, 1), (1, hidden)]
    weight = new_input(w, "gain", forms[how % len(forms)], dtype, "replicated", recipe=Recipe("norm_weight"))
    w.draft.change(value, args=(*step.args[:slot], weight, *step.args[slot + 1 :]))


# ----------------------------------------------------------------------------------------------------------------- views


def view_read_twice(w: TransformerWriter, where: int, how: int) -> None:
    """A view of a chain is read by something else as well."""
    value, _ = pick(calls(w, VIEW), where)
    w.draft.behind = value
    w.extras.append(norm(w, value) if how % 2 else call(w, "tensor_cast::gelu", value))


def other_view(w: TransformerWriter, where: int, how: int) -> None:
    """A value is viewed with another split, by its norm or by no reader, and viewed back."""
    value = w.draft.behind = pick(activations(w), where)
    shape = spec_of(w, value).shape
    *lead, tokens, wide = (*shape[: token_axis(shape)], *shape[token_axis(shape) :])
    forms: list[list[int]] = [
        [-1, wide],
        [*lead, tokens, 2, wide // 2],
        [*lead, tokens // 2, 2, wide],
        [-1],
        [*lead, tokens * wide],
        [1, *shape],
        [tokens, *lead, wide],
        [*lead, 2, tokens // 2, wide],
    ]
    viewed = call(w, VIEW, value, pick(forms, how))
    found = [(v, s) for v, s in readers(w, value) if s.op == RMS_NORM and s.args[0].number == value.number]
    if how // 8 % 2 and found:
        normed, step = found[0]
        w.draft.change(normed, args=(viewed, *step.args[1:]))
        w.draft.behind = normed
        swap_in(w, normed, call(w, VIEW, normed, list(shape)))
        return
    swap_in(w, value, call(w, VIEW, viewed, list(shape)))


def sliced_norm(w: TransformerWriter, where: int, how: int) -> None:
    """A norm reads some of the tokens, or its result is put together from two parts."""
    value = w.draft.behind = pick(activations(w), where)
    shape = spec_of(w, value).shape
    axis = (token_axis(shape), 0)[how % 2]
    middle = max(1, shape[axis] // 2)
    first = norm(w, call(w, "aten::slice.Tensor", value, axis, 0, middle))
    if how // 2 % 2 == 0 or middle == shape[axis]:
        w.extras.append(first)
        return
    second = norm(w, call(w, "aten::slice.Tensor", value, axis, middle, shape[axis]))
    swap_in(w, value, call(w, "tensor_cast::cat", [first, second], axis))


def cast_between(w: TransformerWriter, where: int, how: int) -> None:
    """A chain continues in another dtype for a while."""
    value = w.draft.behind = pick(activations(w), where)
    dtype = spec_of(w, value).dtype
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    there = call(w, "aten::_to_copy", value, dtype=other)
    found = [
        (v, s) for v, s in readers(w, value) if s.op in (RMS_NORM, ADD_RMS_NORM) and s.args[0].number == value.number
    ]
    if how % 2 == 0 and found:
        normed, step = found[0]
        w.draft.change(normed, args=(there, *step.args[1:]))
        w.draft.behind = normed
        swap_in(w, normed, call(w, "aten::_to_copy", normed, dtype=dtype))
        return
    swap_in(w, value, call(w, "aten::_to_copy", there, dtype=dtype))


# ----------------------------------------------------------------------------------------------------------- collectives


def user_gather(w: TransformerWriter, where: int, how: int) -> None:
    """The program gathers a value on some dim, and returns it or takes its own part again."""
    value = w.draft.behind = pick(activations(w), where)
    axis = how % len(spec_of(w, value).shape)
    whole = gather(w, value, axis, DraftGroup(w.roles.main))
    if how // 4 % 2:
        swap_in(w, value, chunk(w, whole, axis, w.roles.main))
    else:
        w.extras.append(whole)


def user_scatter(w: TransformerWriter, where: int, how: int) -> None:
    """The program scatters a value on some dim, and returns the part or gathers it again, perhaps on another dim."""
    value = w.draft.behind = pick(activations(w), where)
    shape = spec_of(w, value).shape
    axis, other = how % len(shape), how // 8 % len(shape)
    main = DraftGroup(w.roles.main)
    part = scatter(w, value, axis, main)
    if how // 4 % 2 == 0:
        w.extras.append(part)
    elif axis == other:
        swap_in(w, value, gather(w, part, axis, main))
    else:
        again = gather(w, part, other, main)
        swap_in(w, value, call(w, VIEW, again, list(shape)))


def reduced_twice(w: TransformerWriter, where: int, how: int) -> None:
    """A sum is summed again, over the same group or another."""
    value, step = pick(calls(w, ALL_REDUCE), where)
    w.draft.behind = value
    groups = [step.args[-1], *other_groups(w, step.args[-1])]
    swap_in(w, value, reduce(w, value, pick(groups, how)))


def other_group(w: TransformerWriter, where: int, how: int) -> None:
    """One collective runs over another group."""
    value, step = pick(calls(w, *COLLECTIVES), where)
    found = pick(other_groups(w, step.args[-1]), how)
    w.draft.change(value, args=(*step.args[:-1], found))


# ------------------------------------------------------------------------------------------------------ other programs


def already_rewritten(w: TransformerWriter, where: int, how: int) -> None:
    """A norm after an all_reduce is rewritten already: it works on this rank's tokens, and its result is gathered."""
    found = [(v, s) for v, s in calls(w, *NORMS) if _reduced(w, s) is not None]
    value, step = pick(found, where)
    source = _reduced(w, step)
    assert source is not None
    reduced = w.draft.step(source)
    assert reduced is not None
    addend, over = reduced.args[0], reduced.args[-1]
    if not isinstance(over, DraftGroup):
        raise NoSite
    w.draft.behind = value
    axis = token_axis(spec_of(w, source).shape)
    local = scatter(w, addend, axis, over)
    if step.op == RMS_NORM:
        part = call(w, RMS_NORM, local, *step.args[1:])
        if how % 2:
            part = norm(w, part)  # before it is gathered
        swap_in(w, value, gather(w, part, axis, over))
        return
    other = step.args[1] if step.args[0].number == source.number else step.args[0]
    residual = chunk(w, other, axis, over.dim)
    if step.op == ADD_RMS_NORM:
        swap_in(w, value, gather(w, call(w, ADD_RMS_NORM, local, residual, *step.args[2:]), axis, over))
        return
    both = call(w, ADD_RMS_NORM2, local, residual, *step.args[2:])
    parts = [w.draft.item(both, index) for index in (0, 1)]
    if how % 2:
        w.extras.append(gather(w, norm(w, parts[1]), axis, over))
    for item, selection in readers(w, value):
        if selection.op == "getitem":
            w.draft.behind = item
            swap_in(w, item, gather(w, parts[selection.args[1] % 2], axis, over))


def _reduced(w: TransformerWriter, step: DraftStep) -> DraftValue | None:
    """The operand of a norm that is an all_reduce."""
    for operand in step.args[: 1 if step.op == RMS_NORM else 2]:
        made = w.draft.step(operand)
        if made is not None and made.op == ALL_REDUCE:
            return operand  # type: ignore[no-any-return]
    return None


def uneven_rows(w: TransformerWriter, where: int, how: int) -> None:
    """Beside the rest, rows that the ranks have different numbers of are normed and returned."""
    dim = w.roles.main
    rows = w.roles.largest + 1 + how % 2
    wide = w.setting.hidden
    x = w.draft.input("rows", (rows, wide), w.dtype, w.roles.declared([(dim, shard(0))]), Recipe())
    weight = new_input(w, "gain", (wide,), w.dtype, recipe=Recipe("norm_weight"))
    value = x
    if how // 2 % 2:  # the ranks agree on the size of what they sum
        square = new_input(w, "wq", (wide, wide), w.dtype)
        value = call(w, "aten::mm", x, square)
        total = reduce(w, call(w, "aten::mm", call(w, "aten::t", value), value), DraftGroup(dim))
        w.extras.append(norm(w, total))
    w.extras.append(call(w, RMS_NORM, value, weight, w.setting.eps))


def in_place(w: TransformerWriter, where: int, how: int) -> None:
    """The program writes into a value, or through a view of it, before others read it."""
    value = w.draft.behind = pick(activations(w), where)
    spec = spec_of(w, value)
    addend = new_input(w, "bias", spec.shape[-1:], spec.dtype, recipe=Recipe(scale=0.5))
    target = value
    if how % 2:
        target = w.draft.behind = call(w, VIEW, value, [-1, spec.shape[-1]])
    if how // 2 % 2:  # the readers read the result of the op
        written = call(w, "aten::add_.Tensor", target, addend)
        swap_in(w, value, call(w, VIEW, written, list(spec.shape)) if how % 2 else written)
        return
    later = how // 4 % 2  # behind the first reader
    if later:
        w.draft.behind = pick(readers(w, value), 0)[0]
    written = call(w, "aten::add_.Tensor", target, addend)
    w.draft.change(written, on=value)


MUTATIONS: dict[str, Mutation] = {
    "extra-user": extra_user,
    "inner-output": inner_output,
    "swapped": swapped_addends,
    "tuple-whole": tuple_whole,
    "one-result": one_result,
    "negative-getitem": negative_getitem,
    "alpha": scaled_addend,
    "broadcast-addend": broadcast_addend,
    "foreign-residual": foreign_residual,
    "odd-weight": odd_weight,
    "view-read-twice": view_read_twice,
    "other-view": other_view,
    "sliced-norm": sliced_norm,
    "cast-between": cast_between,
    "user-gather": user_gather,
    "user-scatter": user_scatter,
    "reduced-twice": reduced_twice,
    "other-group": other_group,
    "rewritten": already_rewritten,
    "uneven-rows": uneven_rows,
    "in-place": in_place,
}
