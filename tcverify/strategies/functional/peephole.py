"""Small asynchronous programs for passes that merge, share, cancel, divide, reinplace or drop.

Two collectives with one difference, whose results are combined; a collective of another one's result; gathered or
reduced rows of which a rank's part is sliced; sums that are divided, or to which rows are added; views whose base is
read elsewhere; dead code, which no other strategy draws. A pass on such patterns has to check whether group,
reduction, operand and factor are the same, whether an operand was written into in between, its other readers and its base,
which part belongs to this rank, and which unused calls have side effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tcverify.program import Mesh, Program
from tcverify.strategies.choices import weighted_table
from tcverify.strategies.draft import DraftValue, NoSite, PerRank, attempt
from tcverify.strategies.functional.choices import FunctionalSetting
from tcverify.strategies.functional.collectives import WAIT, start_collective
from tcverify.strategies.functional.programs import add_costs, begin_program, finish_program
from tcverify.strategies.functional.writing import (
    ADD,
    MUL,
    FunctionalWriter,
    bound_value,
    combine,
    group_size,
    new_input,
    unary,
    write_into_value,
    write_norm,
)
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.timing import decode_timing

DIV = "aten::div.Tensor"

_BYTE = tuple(range(256))

_HEADER: dict[str, tuple[Any, ...]] = {
    "hidden": weighted_table((2, 3), (4, 3), (3, 1)),
    "tokens": weighted_table((1, 4), (2, 3)),
    "dtype": weighted_table(("f32", 5), ("bf16", 1)),
    "data": weighted_table(("varying", 4), ("partial", 3), ("shard", 1), ("replicated", 2)),
    "seed": _BYTE,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """One pattern; see `_PIECE` for the values.

    Attributes:
        kind: "twins", a "part" of what was gathered or reduced, a "sum" to which rows are added, a "chain" of two, a reduction
            that is "scaled", what is "viewed", or "dead" code.
        collective: of twins; of what a part is taken, if it is all_gather, else all_reduce.
        but: in what the second of twins, or of a chain, differs from the first.
        order: which is waited for first, or "one" if the first is waited for before the second starts.
        together: what twins are put together by.
        part: which part of what was gathered or reduced is taken.
        chain: the two collectives of a chain.
        by: what a reduction is divided by: the size of its group, of the world, or another number.
        other: how what is added to a sum lies on the ranks.
        how: a byte that picks the reduction and what follows.
        group: a byte that picks the mesh dim.
    """

    kind: str
    collective: str
    but: str
    order: str
    together: str
    part: str
    chain: tuple[str, str]
    by: str
    other: str
    how: int
    group: int


_PIECE: dict[str, tuple[Any, ...]] = {
    "kind": weighted_table(("twins", 9), ("part", 3), ("sum", 2), ("chain", 3), ("scaled", 2), ("viewed", 2), ("dead", 2)),
    "collective": weighted_table(("all_reduce", 4), ("all_gather", 3), ("reduce_scatter", 1)),
    "but": weighted_table(
        ("operand", 5), ("nothing", 4), ("write", 3), ("group", 5), ("reduction", 2), ("operand and group", 4),
        ("operand and reduction", 1), ("user", 1),
    ),
    "order": weighted_table(("first", 2), ("second", 1), ("one", 2)),
    "together": weighted_table(("add", 6), ("apart", 3), ("alpha", 1), ("sub", 1), ("mul", 1), ("cat", 1)),
    "part": weighted_table(("own", 6), ("next", 1), ("first", 1), ("by rank", 1), ("more", 1)),
    "chain": weighted_table(
        (("reduce_scatter", "all_gather"), 4), (("all_gather", "reduce_scatter"), 2), (("all_reduce", "all_reduce"), 2),
        (("all_reduce", "reduce_scatter"), 1), (("all_reduce", "all_gather"), 1), (("all_gather", "all_reduce"), 1),
    ),
    "by": weighted_table(("group", 5), ("world", 4), ("other", 1)),
    "other": weighted_table(("replicated", 4), ("varying", 1), ("reduced", 2), ("itself", 1)),
    "how": _BYTE,
    "group": _BYTE,
}  # fmt: skip

#: Most such passes are for sums.
_OPS = ("sum", "sum", "avg", "sum", "sum", "max", "sum", "min")

_PIECES = 3
#: Bytes of a whole program.
WIDTH = len(_HEADER) + TIMING_WIDTH + _PIECES * len(_PIECE)


def decode_peephole(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a program of one to three such patterns, with costs. What does not fit is left out."""
    choices = choices.ljust(WIDTH, b"\0")
    hidden, tokens, dtype, data, seed = _picked(_HEADER, choices)
    setting = FunctionalSetting("peephole", 1, hidden, tokens, dtype, False, data, 6, seed)
    w = begin_program(mesh, setting, FunctionalWriter)
    rest = choices[len(_HEADER) + TIMING_WIDTH :]
    for number in range(_PIECES):
        piece = _Piece(*_picked(_PIECE, rest[number * len(_PIECE) :]))
        attempt(w, _WRITERS[piece.kind], piece)
    return add_costs(finish_program(w), decode_timing(choices[len(_HEADER) : len(_HEADER) + TIMING_WIDTH]))


def _picked(tables: dict[str, tuple[Any, ...]], choices: bytes) -> list[Any]:
    return [table[byte % len(table)] for table, byte in zip(tables.values(), choices, strict=False)]


def _input(w: FunctionalWriter, kind: str, dim: str) -> DraftValue:
    return new_input(w, "x", (w.tokens, w.setting.hidden), kind, dim)


def _twins(w: FunctionalWriter, piece: _Piece) -> None:
    """Two collectives with one difference, and a value computed from both."""
    draft, call, but = w.draft, w.draft.call, piece.but
    dim = w.dim(piece.group)
    others = [name for name in w.dims if name != dim]
    if "group" in but and not others:
        raise NoSite
    operand = _input(w, w.setting.data, dim)
    second_operand = _input(w, w.setting.data, dim) if "operand" in but else operand
    second_dim = others[piece.how % len(others)] if "group" in but else dim
    op = _OPS[piece.how % len(_OPS)]
    second_op = ("max", "sum", "avg")[piece.how // 8 % 3] if "reduction" in but else op
    (one,) = start_collective(w, piece.collective, [operand], dim, reduce_op=op)
    alone = piece.order == "one" or but == "write"
    first = call(WAIT, one) if alone else None
    if but == "write":
        write_into_value(w, operand, piece.how // 8)
    (two,) = start_collective(w, piece.collective, [second_operand], second_dim, reduce_op=second_op)
    if first is None and piece.order == "second":
        second, first = call(WAIT, two), call(WAIT, one)
    else:
        first = first if first is not None else call(WAIT, one)
        second = call(WAIT, two)
    w.labels += ["twins", f"twins but {but}"]
    if but == "user":
        w.outputs.append(first)
    together = piece.together
    if together == "apart" or not draft.same_type(first, second):
        w.outputs += [unary(w, first, piece.how // 8), second]
    elif together == "cat":
        w.outputs.append(bound_value(w, call("aten::cat", [first, second], 0)))
    else:
        w.outputs.append(combine(w, together, first, second))


def _part(w: FunctionalWriter, piece: _Piece) -> None:
    """Rows or columns of a gathered or reduced value, of which a part is sliced: this rank's, or another."""
    dim = w.dim(piece.group)
    operand = _input(w, w.setting.data, dim)
    kind = "all_gather" if piece.collective == "all_gather" else "all_reduce"
    (started,) = start_collective(w, kind, [operand], dim, reduce_op=_OPS[piece.how % len(_OPS)])
    whole = w.draft.call(WAIT, started)
    mesh, along = w.draft.mesh.dim(dim), int(piece.how // 16 % 4 == 3)
    ranks = range(w.draft.mesh.world_size)
    sizes = [w.draft.spec(whole, rank).shape[along] for rank in ranks]
    if any(size % len(mesh.group(rank)) for rank, size in zip(ranks, sizes, strict=True)):
        raise NoSite

    def start(rank: int) -> int:
        parts, position = len(mesh.group(rank)), mesh.position(rank)
        place = {"next": (position + 1) % parts, "first": 0, "by rank": rank % parts}.get(piece.part, position)
        return place * (sizes[rank] // parts)

    def end(rank: int) -> int:
        size = sizes[rank] // len(mesh.group(rank))
        more = piece.part == "more" and start(rank) + size < sizes[rank]
        return start(rank) + size + int(more)

    if piece.part == "more" and len(set(map(end, ranks))) == 1:
        raise NoSite
    name = f"{dim}_{piece.part.replace(' ', '_')}_{len(w.draft)}"
    starts, ends = PerRank(f"{name}_start", start), PerRank(f"{name}_end", end)
    taken = w.draft.call("aten::slice.Tensor", whole, along, starts, ends)
    w.labels += [f"part: {piece.part}", f"part of {kind}"]
    w.outputs.append(unary(w, taken, piece.how))
    if piece.how % 3 == 0:
        w.outputs.append(whole)


def _chain(w: FunctionalWriter, piece: _Piece) -> None:
    """A collective of another one's result: often a single one does the work of both, or no work remains."""
    dim, how = w.dim(piece.group), piece.how
    others = [name for name in w.dims if name != dim]
    if "group" in piece.but and not others:
        raise NoSite
    second_dim = others[how % len(others)] if "group" in piece.but else dim
    op = _OPS[how % len(_OPS)]
    second_op = ("max", "sum", "avg")[how // 8 % 3] if "reduction" in piece.but else op
    leads, follows = piece.chain
    (one,) = start_collective(w, leads, [_input(w, w.setting.data, dim)], dim, reduce_op=op)
    first = w.draft.call(WAIT, one)
    (two,) = start_collective(w, follows, [bound_value(w, first)], second_dim, reduce_op=second_op)
    w.labels.append(f"{follows} of {leads}")
    w.outputs.append(bound_value(w, w.draft.call(WAIT, two)))
    if piece.but == "user":
        w.outputs.append(first)


def _scaled(w: FunctionalWriter, piece: _Piece) -> None:
    """A reduction divided by a number, before or after: often the mean, which a reduction can compute directly."""
    call, dim, how = w.draft.call, w.dim(piece.group), piece.how
    op = ("sum", "avg", "max")[how // 8 % 3] if "reduction" in piece.but else "sum"
    operand = _input(w, w.setting.data, dim)
    by = {"group": group_size(w, dim), "world": w.draft.mesh.world_size}.get(piece.by, 3)
    form = ("after", "after", "before", "factor")[how % 4]
    kind = "reduce_scatter" if piece.collective == "reduce_scatter" else "all_reduce"
    reads = call(DIV, operand, by) if form == "before" else operand
    (started,) = start_collective(w, kind, [reads], dim, reduce_op=op)
    made = total = call(WAIT, started)
    if form == "factor" and not isinstance(by, PerRank):  # rank constants are integers
        made = call(MUL, total, 1.0 / by)
    elif form != "before":
        made = call(DIV, total, by)
    w.labels += [f"scaled {form}", f"divided by {piece.by}"]
    w.outputs.append(bound_value(w, made))
    if piece.but == "user":
        w.outputs.append(bound_value(w, total))


def _viewed(w: FunctionalWriter, piece: _Piece) -> None:
    """A value is computed from a view, or from the operand of a collective; the base of the view is often read later."""
    call, dim, how = w.draft.call, w.dim(piece.group), piece.how
    base = _input(w, w.setting.data, dim)
    base = unary(w, base, how) if how % 4 else base
    rows, columns = w.draft.shape(base)
    view, *arguments = (
        ("aten::view", [-1]),
        ("aten::view", [columns, rows]),
        ("aten::slice.Tensor", 0, 0, 1),
        ("aten::select.int", 1, 0),
        ("aten::t",),
        ("aten::slice.Tensor", 1, 1, columns),
    )[how // 4 % 6]
    under_way = piece.order == "second"
    started = start_collective(w, piece.collective, [base], dim, reduce_op="sum") if under_way else ()
    source = call(view, base, *arguments) if piece.but != "nothing" else base
    added = call(ADD, source, _like(w, source, dim), rms=source.rms + 0.6)
    w.labels.append("viewed, and under way" if under_way else "viewed")
    w.outputs += [added, *(call(WAIT, one) for one in started)]
    if piece.but == "user":
        w.outputs.append(unary(w, source, how // 8))
    if not under_way and how < 176:
        w.outputs.append(unary(w, base, how // 8))


def _like(w: FunctionalWriter, value: DraftValue, dim: str) -> DraftValue:
    spec = w.draft.spec(value)
    return new_input(w, "y", w.draft.shape(value), "varying", dim, spec.dtype)


def _dead(w: FunctionalWriter, piece: _Piece) -> None:
    """Unused code: compute, a collective, and a collective or a write that still changes an input."""
    call, dim = w.draft.call, w.dim(piece.group)
    operand = _input(w, w.setting.data, dim)
    form = ("compute", "collective", "in-place", "write")[piece.how % 4]
    w.labels.append(f"dead {form}")
    if form == "compute":
        last = unary(w, unary(w, operand, piece.how // 4), piece.how // 8)
    elif form == "collective":
        (started,) = start_collective(w, piece.collective, [operand], dim, reduce_op=_OPS[piece.how // 4 % len(_OPS)])
        last = call(WAIT, started)
    elif form == "in-place":
        last = call(WAIT, call("_c10d_functional::all_reduce_", operand, "sum", dim))
    else:
        write_into_value(w, operand, piece.how // 4)
        last = unary(w, operand, piece.how // 8)
    w.draft.dead.add(last.number)


def _sum(w: FunctionalWriter, piece: _Piece) -> None:
    """A sum over the ranks to which rows are added, and often a norm of that."""
    call, dim = w.draft.call, w.dim(piece.group)
    operand = _input(w, "partial", dim)
    (started,) = start_collective(w, "all_reduce", [operand], dim, reduce_op=_OPS[piece.how % len(_OPS)])
    total = call(WAIT, started)
    if piece.other == "reduced":
        (again,) = start_collective(w, "all_reduce", [_input(w, "varying", dim)], dim, reduce_op="sum")
        other = call(WAIT, again)
    else:
        other = operand if piece.other == "itself" else _input(w, piece.other, dim)
    w.labels.append(f"sum and {piece.other}")
    made = bound_value(w, call(ADD, total, other, rms=total.rms + other.rms))
    w.outputs.append(write_norm(w, made, piece.how // 8) if piece.how // 8 % 2 else made)
    if piece.how // 16 % 4 == 3:
        w.outputs.append(total)


_WRITERS = {
    "twins": _twins, "part": _part, "sum": _sum, "chain": _chain, "scaled": _scaled, "viewed": _viewed, "dead": _dead,
}  # fmt: skip

__all__ = ["WIDTH", "decode_peephole"]
