"""Asynchronous programs: collectives that start and are waited for later, opaque communication, and writes around them.

For any bytes: no start without a wait, no access that conflicts with a collective in flight, no cyclic waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch import fx

from tcverify.ops import lookup
from tcverify.program import Mesh, Program
from tcverify.strategies.draft import attempt
from tcverify.strategies.functional import layers as layers
from tcverify.strategies.functional import motifs as motifs
from tcverify.strategies.functional import opaque as opaque
from tcverify.strategies.functional import repeated as repeated
from tcverify.strategies.functional.choices import (
    HEADER_WIDTH,
    RECORD_WIDTH,
    RECORDS,
    WIDTH,
    FunctionalRecord,
    FunctionalSetting,
    decode_record,
    decode_setting,
)
from tcverify.strategies.functional.collectives import LAST, wait_for_due
from tcverify.strategies.functional.draft import AsyncDraft
from tcverify.strategies.functional.writing import FunctionalWriter, new_input, unary
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.timing import Timing, decode_timing, with_timing
from tcverify.strategies.transformer.roles import roles_of

Motif = Callable[[FunctionalWriter, FunctionalRecord], None]

#: The writer of a record, by its kind.
MOTIFS: dict[str, Motif] = {
    "collective": motifs.collective,
    "compute": motifs.compute,
    "matmul": motifs.product,
    "norm": motifs.norm,
    "write": motifs.write,
    "view": motifs.view,
    "pair": motifs.pair,
    "unshard": motifs.unshard,
    "gradient": layers.gradient,
    "column-row": layers.column_row,
    "pipelined": layers.chunked_product,
    "exchange": opaque.exchange,
    "pipeline": opaque.pipeline,
    "barrier": opaque.barrier,
    "swapped": opaque.swapped_starts,
    "shares": opaque.shared_operands,
    "partly-read": opaque.partly_read,
    "after": motifs.declared_order,
    "ragged": motifs.uneven_collectives,
    "integers": motifs.integers,
    "blocking": opaque.blocking,
    "buffer": motifs.buffer,
    "inputs": motifs.inputs,
    "like-ops": repeated.like_ops,
    "pieces": repeated.pieces,
}

#: The writer of the first records of a theme, whatever their kind: as many as there are layers.
_LAYERS: dict[str, tuple[Motif, ...]] = {
    "any": (),
    "data-parallel": (layers.forward, layers.gradient),
    "tensor-parallel": (layers.column_row,),
    "async-tp": (layers.chunked_product,),
    "opaque": (opaque.exchange,),
    "joint": (layers.forward, opaque.exchange, layers.result, layers.gradient, opaque.exchange),
}

#: Number of calls after which no further record is written.
MOST_CALLS = 48


def decode_functional(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into an asynchronous program, with costs. Parts that do not fit, or are unused, are left out."""
    return _decoded(mesh, choices, None)


def decode_data_parallel(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into the backward pass of a data-parallel program, with other pieces in between."""
    return _decoded(mesh, choices, "data-parallel")


def decode_async_tp(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into tensor-parallel products in chunks, with other pieces in between."""
    return _decoded(mesh, choices, "async-tp")


def decode_effects(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a forward and a backward with opaque communication, which some ranks do in another order, among
    collectives; nothing is written into."""
    return _decoded(mesh, choices, "joint")


def decode_traced(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into an asynchronous program as a compiler has it: without writes, side effects and order in metadata."""
    return _decoded(mesh, choices, None, traced=True)


#: Replaces records whose parts write, if nothing may be written.
_UNWRITTEN = {
    "write": "matmul", "buffer": "collective", "blocking": "unshard", "exchange": "pair", "pipeline": "matmul",
    "barrier": "compute", "swapped": "collective", "after": "inputs", "partly-read": "collective",
}  # fmt: skip


def _unwritten(record: FunctionalRecord) -> FunctionalRecord:
    form = "coalesced" if record.form.startswith("coalesced") else "new"
    use = {"write-operand": "pool", "update": "output"}.get(record.use, record.use)
    return replace(record, kind=_UNWRITTEN.get(record.kind, record.kind), form=form, use=use)


#: Kinds with side effects that write into nothing.
_OPAQUE = frozenset({"exchange", "barrier", "swapped", "shares", "partly-read"})


def _unwritten_but_opaque(record: FunctionalRecord) -> FunctionalRecord:
    """A record as a compiler has it, which keeps its side effects."""
    made = _unwritten(record)
    return replace(made, kind=record.kind) if record.kind in _OPAQUE else made


def _decoded(mesh: Mesh, choices: bytes, theme: str | None, traced: bool = False) -> Program:
    choices = choices.ljust(WIDTH, b"\0")
    setting = decode_setting(choices[:HEADER_WIDTH])
    if theme is not None:
        setting = replace(setting, theme=theme)
    timing = decode_timing(choices[HEADER_WIDTH : HEADER_WIDTH + TIMING_WIDTH])
    start = HEADER_WIDTH + TIMING_WIDTH
    rows = [choices[start + i * RECORD_WIDTH :][:RECORD_WIDTH] for i in range(RECORDS)]
    records = [decode_record(setting.theme, row) for row in rows]
    if traced:
        records = list(map(_unwritten, records))
    if theme == "joint":
        records = list(map(_unwritten_but_opaque, records))
    w = begin_program(mesh, setting, FunctionalWriter, writes=not traced and theme != "joint", effects=not traced)
    forced = [motif for motif in _LAYERS[setting.theme] for _ in range(setting.depth)]
    for number, record in enumerate(records):
        if len(w.draft) >= MOST_CALLS:
            break
        w.number = number
        motif = forced[number] if number < len(forced) else MOTIFS.get(record.kind)
        if motif is not None:
            attempt(w, motif, record)
        wait_for_due(w, number)
    return add_costs(finish_program(w), timing)


W = TypeVar("W", bound=FunctionalWriter)


def begin_program(
    mesh: Mesh,
    setting: FunctionalSetting,
    writer: type[W],
    *,
    writes: bool = True,
    effects: bool = True,
) -> W:
    """A program with one input, and the writer of its strategy."""
    roles = roles_of(mesh)
    tokens = setting.tokens * math.lcm(*(size for dim in mesh.dims for size in roles.sizes(dim.name)))
    w = writer(AsyncDraft(mesh, writes=writes, effects=effects), roles, setting, tokens)
    w.main = new_input(w, "x", (tokens, setting.hidden), setting.data)
    return w


def finish_program(w: FunctionalWriter, most: int | None = None) -> Program:
    """Wait for everything, and return unused values, up to the number in the setting."""
    wait_for_due(w, LAST)
    for value in w.later:
        w.outputs.append(unary(w, value, 0))
    most = most or w.setting.outputs
    found = dict.fromkeys([w.main, *w.outputs[:most], *w.draft.unread()])
    kept = {value.number: value for value in list(found)[: most + 1]}
    kept.update({value.number: value for value in w.draft.sent_by_some()})
    blocking = w.draft.blocking()
    kept.update({value.number: value for value in w.outputs if value.number in blocking})
    labels = ["functional", w.setting.theme, *sorted(set(w.labels))]
    return w.draft.program(tuple(kept.values()), w.setting.seed, labels)


def add_costs(program: Program, timing: Timing) -> Program:
    """Give the program costs; waits and views take no time."""
    program = with_timing(program, timing)
    for graph in program.graphs:
        for node in graph.nodes:
            if "cost_s" in node.meta and _free(node):
                node.meta["cost_s"] = 0.0
    return program


def _free(node: fx.Node) -> bool:
    op = lookup(node.target)
    if op.phase == "wait" or op.name == "python::getitem":
        return True
    schema = getattr(node.target, "_schema", None)
    return op.aliases and op.phase is None and schema is not None and not schema.is_mutable


__all__ = [
    "MOTIFS", "WIDTH", "decode_async_tp", "decode_data_parallel", "decode_effects", "decode_functional",
    "decode_traced",
]  # fmt: skip
