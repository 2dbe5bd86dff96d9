"""Like ops beside each other, and values in pieces that are joined again.

A pass that fuses like ops into one of a batch has to keep their keywords, their dtypes and their order, and may fuse none that
needs another's result. One that drops a split and the join behind it has to check which piece of which value each one is, along
which dims both go, whether all pieces are there, and who else reads them.
"""

from __future__ import annotations

import torch

from tcverify.strategies.draft import DraftValue, NoSite
from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.writing import (
    FunctionalWriter,
    bound_value,
    combine,
    multiply_by_weight,
    new_input,
    partner,
    pick_operand,
    unary,
    weight,
)

_OPS = ("add", "unary", "sub", "mul", "linear", "div", "add", "product")
#: In what the last of like ops differs from the others; "all" stands for a keyword, or another number, that all have.
_BUT = ("nothing", "keyword", "all", "dtype", "operand", "shape", "nothing", "all")
#: The ops that some differences are for: for other ops nothing differs.
_DIFFER = {
    "keyword": ("add", "sub", "linear", "div"),
    "all": ("add", "sub", "linear", "div"),
    "shape": ("add", "sub", "mul", "linear"),
}
_CUTS = ("split", "select", "sizes", "slice")
_ORDERS = ("straight", "interleaved", "swapped", "straight", "one more", "reversed", "one less", "rotated")
_JOINS = ("same", "same", "other", "stack")


def like_ops(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Like ops on values that there are, and on new ones."""
    w.pool += made_alike(w, pick_operand(w, r.a), r)


def pieces(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Pieces of a value, or of two, joined again."""
    w.pool.append(joined_pieces(w, pick_operand(w, r.a), r))


def made_alike(w: FunctionalWriter, first: DraftValue, r: FunctionalRecord) -> list[DraftValue]:
    """Two to four ops that are alike, or alike but for one thing in the last of them; their results."""
    op, but, count = _OPS[r.how % 8], _BUT[r.how // 8 % 8], 2 + r.b % 3
    if op not in _DIFFER.get(but, _OPS):
        but = "nothing"
    made: list[DraftValue] = []
    for number in range(count):
        last = number == count - 1
        value = first if number == 0 else partner(w, first, r.b // 4 + 5 * number)
        if last and but == "operand":
            value = made[0] if w.draft.same_type(made[0], first) else first
        if last and but == "dtype":
            dtype = torch.bfloat16 if w.draft.spec(first).dtype is not torch.bfloat16 else torch.float32
            value = new_input(w, "y", w.draft.shape(first), "varying", dtype=dtype)
        keyword = but == "all" or (last and but == "keyword")
        made.append(_one(w, op, value, r, keyword=keyword, broadcast=last and but == "shape"))
    w.labels += ["like ops", f"like ops but {but}"]
    return made


def _one(
    w: FunctionalWriter, op: str, value: DraftValue, r: FunctionalRecord, *, keyword: bool, broadcast: bool
) -> DraftValue:
    call = w.draft.call
    if op == "unary":
        return unary(w, value, r.group)
    if op in ("product", "linear"):
        if len(w.draft.spec(value).shape) != 2 or not w.draft.shape(value)[1]:
            raise NoSite
        inner, width = w.draft.shape(value)[1], w.setting.hidden
        by = weight(w, value, (inner, width))
        if op == "product":
            return multiply_by_weight(w, value, by)[0]
        shape = [width] if broadcast else [w.draft.shape(value)[0], width]
        bias = new_input(w, "bias", shape, dtype=w.draft.spec(value).dtype)
        return bound_value(w, call("aten::addmm", bias, value, by, **({"alpha": 2} if keyword else {}), rms=1.8))
    if op == "div":
        return bound_value(w, call("aten::div.Tensor", value, 4 if keyword else 2))
    if broadcast:
        other = new_input(w, "y", w.draft.shape(value)[1:], "varying", dtype=w.draft.spec(value).dtype)
    else:
        other = partner(w, value, r.group // 4)
    by_keyword = {"add": "alpha", "sub": "sub alpha"}
    return combine(w, by_keyword.get(op, op) if keyword else op, value, other)


def joined_pieces(w: FunctionalWriter, first: DraftValue, r: FunctionalRecord) -> DraftValue:
    """A value, or two, cut into pieces along a dim, and pieces of them joined in some order."""
    rank = len(w.draft.shape(first))
    if not rank or not w.draft.elements(first):
        raise NoSite
    along = r.how % rank
    order, join = _ORDERS[r.how // 4 % 8], _JOINS[r.how // 32 % 4]
    cut = _CUTS[r.b % 4]
    found = _cut(w, first, along, cut, r.b // 4)
    if order == "interleaved":
        second = _cut(w, partner(w, first, r.group), along, cut, r.b // 4)
        found = [piece for pair in zip(found, second, strict=True) for piece in pair]
        if r.group // 4 % 4 == 3:
            found = found[::-1]
    found = {
        "swapped": [*found[:-2], *found[:-3:-1]],
        "one more": [*found, found[r.group % len(found)]],
        "reversed": found[::-1],
        "one less": found[:-1],
        "rotated": [*found[1:], found[0]],
    }.get(order, found)
    between, how = r.group // 16 % 4, r.group // 64
    if between == 1:
        found = [unary(w, piece, how) for piece in found]
    elif between == 2 and found:
        w.outputs.append(unary(w, found[0], how))
    elif between == 3:
        found = [w.draft.call("aten::reshape", piece, _reshaped(w.draft.shape(piece), how)) for piece in found]
    w.labels += ["pieces", f"pieces: {order}", f"pieces of {cut}"]
    return bound_value(w, _joined(w, found, along, join, r.b // 64))


def _cut(w: FunctionalWriter, value: DraftValue, along: int, cut: str, how: int) -> list[DraftValue]:
    call, extent = w.draft.call, w.draft.shape(value)[along]
    if extent < 2 or extent > 16:
        raise NoSite
    dim = along - len(w.draft.shape(value)) if how % 4 == 3 else along
    if cut == "select":
        return [call("aten::select.int", value, dim, number) for number in range(extent)]
    size = max(1, extent // (2 + how // 4 % 3))
    if cut == "slice":
        return [call("aten::slice.Tensor", value, dim, at, min(at + size, extent)) for at in range(0, extent, size)]
    if cut == "sizes":
        sizes = [size, extent - size]
        made = call("aten::split_with_sizes", value, sizes, dim)
        return [w.draft.item(made, number) for number in range(len(sizes))]
    made = call("aten::split.Tensor", value, size, dim)
    return [w.draft.item(made, number) for number in range(-(-extent // size))]


def _reshaped(shape: tuple[int, ...], how: int) -> list[int]:
    """Another shape of as many elements: flat, with the dims the other way round, or with one more."""
    return ([-1], [*shape[::-1]], [1, *shape], [*shape, 1])[how % 4]


def _joined(w: FunctionalWriter, found: list[DraftValue], along: int, join: str, how: int) -> DraftValue:
    """The pieces, joined along the dim of the cut, along another one, or along a new one."""
    rank = len(w.draft.shape(found[0])) if found else 0
    if not rank:
        raise NoSite
    call, dim = w.draft.call, (along + (join == "other")) % rank
    if join == "stack":
        dims = [call("aten::unsqueeze", piece, dim) for piece in found]
        return call("aten::cat", dims, dim)
    return call("aten::cat", found, dim - rank if how % 4 == 3 else dim)


__all__ = ["joined_pieces", "like_ops", "made_alike", "pieces"]
