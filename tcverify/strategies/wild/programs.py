"""Wild programs: typed random graphs without the structure of a model; also the baseline of comparisons."""

from __future__ import annotations

from dataclasses import replace

from tcverify.program import Mesh, Program
from tcverify.strategies.choices import HEADER_WIDTH, decode_choices, weighted_table
from tcverify.strategies.draft import DraftValue, NoSite
from tcverify.strategies.transformer.programs import begin_program, finish_program
from tcverify.strategies.transformer.sites import new_input, pick, pick_recent
from tcverify.strategies.transformer.writing import TransformerWriter
from tcverify.strategies.wild.growths import KINDS, ends_of, grow

#: Choices of the first byte of a record; see `GROWTHS`.
OPS = weighted_table(
    ("none", 3),
    ("all-reduce", 6),
    ("norm", 5),
    ("fused-norm", 5),
    ("binary", 5),
    ("unary", 4),
    ("matmul", 3),
    ("constant", 2),
    ("view", 4),
    ("marker", 2),
    ("reduce-scatter", 2),
    ("all-gather", 2),
    ("all-to-all", 1),
    ("transpose", 2),
    ("slice", 2),
    ("cat", 1),
    ("softmax", 1),
    ("reduction", 1),
    ("cast", 1),
    ("attention", 1),
    ("in-place", 1),
    ("write", 1),
    ("fused-reduce", 2),
    ("quantised", 1),
    ("operator", 1),
    ("index", 1),
    ("filled", 1),
    ("split", 1),
)

INPUTS = 3
INPUT_WIDTH = 2
RECORDS = 28
RECORD_WIDTH = 4
#: Bytes of a whole program: a header as of structured programs, the number of outputs, inputs, records.
WIDTH = HEADER_WIDTH + 1 + INPUTS * INPUT_WIDTH + RECORDS * RECORD_WIDTH


def decode_wild(mesh: Mesh, choices: bytes, times: int = 1) -> Program:
    """Decode any bytes into a wild program. Parts that do not fit, or are unused, are left out.

    Args:
        times: factor of the sizes of activations; see `decode_choices`.
    """
    choices = choices.ljust(WIDTH, b"\0")
    setting, _ = decode_choices(choices[:HEADER_WIDTH], times)
    w = begin_program(mesh, replace(setting, degenerate=None))
    rest = choices[HEADER_WIDTH:]
    values: list[DraftValue] = []
    for number in range(INPUTS):
        values.append(_input(w, *rest[1 + number * INPUT_WIDTH :][:INPUT_WIDTH]))
    values.reverse()  # the first is the newest
    start = 1 + INPUTS * INPUT_WIDTH
    for number in range(RECORDS):
        kind, a, b, how = rest[start + number * RECORD_WIDTH :][:RECORD_WIDTH]
        op = OPS[kind % len(OPS)]
        if op != "none":
            values += grow(w, op, values, pick_recent(values, a), b, how)
    ends = ends_of(w, values)
    w.hidden, *w.extras = ends[-1 : -2 - rest[0] % 6 : -1]
    return finish_program(w, "wild")


def _input(w: TransformerWriter, kind: int, shape: int) -> DraftValue:
    """Add an input: tokens in some layout, on all ranks of one shape."""
    wide, tokens = w.setting.hidden, w.sequence
    shapes = [(tokens, wide), (w.batch, tokens, wide), (tokens, w.batch, wide), (wide, tokens), (2, tokens, 2, wide)]
    dims = [dim.name for dim in w.draft.mesh.dims]
    form = pick(shapes, shape)
    placed = pick(("partial", *KINDS, "partial"), kind)
    try:
        return new_input(w, "x", form, w.dtype, placed, shape // 8 % len(form), dim=pick(dims, kind // 8))
    except NoSite:  # groups of several sizes: no shards of one shape
        return new_input(w, "x", form, w.dtype)
