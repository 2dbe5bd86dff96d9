"""Small asynchronous programs for passes that merge, share, cancel, divide, reinplace or drop.

Two collectives that are alike but for one thing, of which something is made together; a collective of what another one has
made; gathered or reduced rows of which a rank's part is taken; sums that are divided, or to which something is added row by
row; views whose base is read elsewhere; dead code, which no other strategy draws. A pass on such patterns has to ask whether
group, reduction, operand and factor are the same, whether an operand was written into in between, who else reads it or what it
is a view of, which part is this rank's, and what has an effect that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tcverify.program import Mesh, Program
from tcverify.strategies.choices import weighted_table
from tcverify.strategies.functional.choices import FunctionalSetting
from tcverify.strategies.functional.collectives import WAIT, start_collective
from tcverify.strategies.functional.flow import (
    ADD,
    MUL,
    FunctionalFlow,
    bound_value,
    group_size,
    new_input,
    unary,
    write_into_value,
    write_norm,
)
from tcverify.strategies.functional.programs import add_costs, close_flow, open_flow
from tcverify.strategies.functional.script import ScriptValue
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.timing import decode_timing
from tcverify.strategies.transformer.draft import PerRank
from tcverify.strategies.transformer.sites import NoSite

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
        kind: "twins", a "part" of what was gathered or reduced, a "sum" to which rows are added, a "chain"
            of two, a reduction that is "scaled", what is "viewed", or "dead" code.
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
    flow = open_flow(mesh, FunctionalSetting("peephole", 1, hidden, tokens, dtype, False, data, 6, seed))
    rest = choices[len(_HEADER) + TIMING_WIDTH :]
    for number in range(_PIECES):
        piece = _Piece(*_picked(_PIECE, rest[number * len(_PIECE) :]))
        _attempt(flow, piece)
    return add_costs(close_flow(flow), decode_timing(choices[len(_HEADER) : len(_HEADER) + TIMING_WIDTH]))


def _picked(tables: dict[str, tuple[Any, ...]], choices: bytes) -> list[Any]:
    return [table[byte % len(table)] for table, byte in zip(tables.values(), choices, strict=False)]


def _attempt(flow: FunctionalFlow, piece: _Piece) -> None:
    write = _WRITERS[piece.kind]
    # The record that pieces of other strategies are drawn as says nothing here.
    flow.attempt(lambda inner, _: write(inner, piece), None)  # type: ignore[arg-type]


def _input(flow: FunctionalFlow, kind: str, dim: str) -> ScriptValue:
    return new_input(flow, "x", (flow.tokens, flow.setting.hidden), kind, dim)


def _twins(flow: FunctionalFlow, piece: _Piece) -> None:
    """Two collectives, alike but for one thing, and what is made of both."""
    script, call, but = flow.script, flow.script.call, piece.but
    dim = flow.dim(piece.group)
    others = [name for name in flow.dims if name != dim]
    if "group" in but and not others:
        raise NoSite
    operand = _input(flow, flow.setting.data, dim)
    second_operand = _input(flow, flow.setting.data, dim) if "operand" in but else operand
    second_dim = others[piece.how % len(others)] if "group" in but else dim
    op = _OPS[piece.how % len(_OPS)]
    second_op = ("max", "sum", "avg")[piece.how // 8 % 3] if "reduction" in but else op
    (one,) = start_collective(flow, piece.collective, [operand], dim, reduce_op=op)
    alone = piece.order == "one" or but == "write"
    first = call(WAIT, one) if alone else None
    if but == "write":
        write_into_value(flow, operand, piece.how // 8)
    (two,) = start_collective(flow, piece.collective, [second_operand], second_dim, reduce_op=second_op)
    if first is None and piece.order == "second":
        second, first = call(WAIT, two), call(WAIT, one)
    else:
        first = first if first is not None else call(WAIT, one)
        second = call(WAIT, two)
    flow.labels += ["twins", f"twins but {but}"]
    if but == "user":
        flow.outputs.append(first)
    together = piece.together
    if together == "apart" or not script.same_type(first, second):
        flow.outputs += [unary(flow, first, piece.how // 8), second]
    elif together == "cat":
        flow.outputs.append(bound_value(flow, call("aten::cat", [first, second], 0)))
    elif together == "alpha":
        flow.outputs.append(bound_value(flow, call(ADD, first, second, alpha=2, rms=first.rms + 2 * second.rms)))
    else:
        name = {"add": ADD, "sub": "aten::sub.Tensor", "mul": MUL}[together]
        rms = first.rms * second.rms if together == "mul" else first.rms + second.rms
        flow.outputs.append(bound_value(flow, call(name, first, second, rms=rms)))


def _part(flow: FunctionalFlow, piece: _Piece) -> None:
    """Rows or columns of what was gathered or reduced, of which a part is taken: this rank's, or another."""
    dim = flow.dim(piece.group)
    operand = _input(flow, flow.setting.data, dim)
    kind = "all_gather" if piece.collective == "all_gather" else "all_reduce"
    (started,) = start_collective(flow, kind, [operand], dim, reduce_op=_OPS[piece.how % len(_OPS)])
    whole = flow.script.call(WAIT, started)
    mesh, along = flow.script.mesh.dim(dim), int(piece.how // 16 % 4 == 3)
    ranks = range(flow.script.mesh.world_size)
    sizes = [flow.script.spec(whole, rank).shape[along] for rank in ranks]
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
    name = f"{dim}_{piece.part.replace(' ', '_')}_{len(flow.script)}"
    starts, ends = PerRank(f"{name}_start", start), PerRank(f"{name}_end", end)
    taken = flow.script.call("aten::slice.Tensor", whole, along, starts, ends)
    flow.labels += [f"part: {piece.part}", f"part of {kind}"]
    flow.outputs.append(unary(flow, taken, piece.how))
    if piece.how % 3 == 0:
        flow.outputs.append(whole)


def _chain(flow: FunctionalFlow, piece: _Piece) -> None:
    """A collective of what another one has made: often there is one that does what both do, or nothing is left to do."""
    dim, how = flow.dim(piece.group), piece.how
    others = [name for name in flow.dims if name != dim]
    if "group" in piece.but and not others:
        raise NoSite
    second_dim = others[how % len(others)] if "group" in piece.but else dim
    op = _OPS[how % len(_OPS)]
    second_op = ("max", "sum", "avg")[how // 8 % 3] if "reduction" in piece.but else op
    leads, follows = piece.chain
    (one,) = start_collective(flow, leads, [_input(flow, flow.setting.data, dim)], dim, reduce_op=op)
    first = flow.script.call(WAIT, one)
    (two,) = start_collective(flow, follows, [bound_value(flow, first)], second_dim, reduce_op=second_op)
    flow.labels.append(f"{follows} of {leads}")
    flow.outputs.append(bound_value(flow, flow.script.call(WAIT, two)))
    if piece.but == "user":
        flow.outputs.append(first)


def _scaled(flow: FunctionalFlow, piece: _Piece) -> None:
    """What was reduced, or will be, divided by a number: often that is the mean, which a reduction can make by itself."""
    call, dim, how = flow.script.call, flow.dim(piece.group), piece.how
    op = ("sum", "avg", "max")[how // 8 % 3] if "reduction" in piece.but else "sum"
    operand = _input(flow, flow.setting.data, dim)
    by = {"group": group_size(flow, dim), "world": flow.script.mesh.world_size}.get(piece.by, 3)
    form = ("after", "after", "before", "factor")[how % 4]
    kind = "reduce_scatter" if piece.collective == "reduce_scatter" else "all_reduce"
    reads = call(DIV, operand, by) if form == "before" else operand
    (started,) = start_collective(flow, kind, [reads], dim, reduce_op=op)
    made = total = call(WAIT, started)
    if form == "factor" and not isinstance(by, PerRank):  # rank constants are integers
        made = call(MUL, total, 1.0 / by)
    elif form != "before":
        made = call(DIV, total, by)
    flow.labels += [f"scaled {form}", f"divided by {piece.by}"]
    flow.outputs.append(bound_value(flow, made))
    if piece.but == "user":
        flow.outputs.append(bound_value(flow, total))


def _viewed(flow: FunctionalFlow, piece: _Piece) -> None:
    """Something is made of a view, or of what a collective reads; what it is a view of is mostly read later."""
    call, dim, how = flow.script.call, flow.dim(piece.group), piece.how
    base = _input(flow, flow.setting.data, dim)
    base = unary(flow, base, how) if how % 4 else base
    rows, columns = flow.script.shape(base)
    view, *arguments = (
        ("aten::view", [-1]),
        ("aten::view", [columns, rows]),
        ("aten::slice.Tensor", 0, 0, 1),
        ("aten::select.int", 1, 0),
        ("aten::t",),
        ("aten::slice.Tensor", 1, 1, columns),
    )[how // 4 % 6]
    under_way = piece.order == "second"
    started = start_collective(flow, piece.collective, [base], dim, reduce_op="sum") if under_way else ()
    source = call(view, base, *arguments) if piece.but != "nothing" else base
    added = call(ADD, source, _like(flow, source, dim), rms=source.rms + 0.6)
    flow.labels.append("viewed, and under way" if under_way else "viewed")
    flow.outputs += [added, *(call(WAIT, one) for one in started)]
    if piece.but == "user":
        flow.outputs.append(unary(flow, source, how // 8))
    if not under_way and how < 176:
        flow.outputs.append(unary(flow, base, how // 8))


def _like(flow: FunctionalFlow, value: ScriptValue, dim: str) -> ScriptValue:
    spec = flow.script.spec(value)
    return new_input(flow, "y", flow.script.shape(value), "varying", dim, spec.dtype)


def _dead(flow: FunctionalFlow, piece: _Piece) -> None:
    """What nobody reads: compute, a collective, and a collective or a write that changes an input all the same."""
    call, dim = flow.script.call, flow.dim(piece.group)
    operand = _input(flow, flow.setting.data, dim)
    form = ("compute", "collective", "in-place", "write")[piece.how % 4]
    flow.labels.append(f"dead {form}")
    if form == "compute":
        last = unary(flow, unary(flow, operand, piece.how // 4), piece.how // 8)
    elif form == "collective":
        (started,) = start_collective(
            flow, piece.collective, [operand], dim, reduce_op=_OPS[piece.how // 4 % len(_OPS)]
        )
        last = call(WAIT, started)
    elif form == "in-place":
        last = call(WAIT, call("_c10d_functional::all_reduce_", operand, "sum", dim))
    else:
        write_into_value(flow, operand, piece.how // 4)
        last = unary(flow, operand, piece.how // 8)
    flow.script.dead.add(last.number)


def _sum(flow: FunctionalFlow, piece: _Piece) -> None:
    """A sum over the ranks to which rows are added, and often a norm of that."""
    call, dim = flow.script.call, flow.dim(piece.group)
    operand = _input(flow, "partial", dim)
    (started,) = start_collective(flow, "all_reduce", [operand], dim, reduce_op=_OPS[piece.how % len(_OPS)])
    total = call(WAIT, started)
    if piece.other == "reduced":
        (again,) = start_collective(flow, "all_reduce", [_input(flow, "varying", dim)], dim, reduce_op="sum")
        other = call(WAIT, again)
    else:
        other = operand if piece.other == "itself" else _input(flow, piece.other, dim)
    flow.labels.append(f"sum and {piece.other}")
    made = bound_value(flow, call(ADD, total, other, rms=total.rms + other.rms))
    flow.outputs.append(write_norm(flow, made, piece.how // 8) if piece.how // 8 % 2 else made)
    if piece.how // 16 % 4 == 3:
        flow.outputs.append(total)


_WRITERS = {
    "twins": _twins, "part": _part, "sum": _sum, "chain": _chain, "scaled": _scaled, "viewed": _viewed, "dead": _dead,
}  # fmt: skip

__all__ = ["WIDTH", "decode_peephole"]
