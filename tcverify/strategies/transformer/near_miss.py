"""Near misses: structured programs with up to three mutations, each of which may or may not prevent a pattern from matching."""

from __future__ import annotations

from dataclasses import replace

from tcverify.ops import ShapeError
from tcverify.program import Mesh, Program
from tcverify.strategies.choices import WIDTH as STRUCTURED_WIDTH
from tcverify.strategies.choices import BlockChoices, TransformerSetting, decode_choices, weighted_table
from tcverify.strategies.draft import NoSite, fork
from tcverify.strategies.transformer.mutations import MUTATIONS
from tcverify.strategies.transformer.programs import finish_program, result, write_program
from tcverify.strategies.transformer.writing import TransformerWriter

#: Numbers of tokens for a mutation, in terms of `TransformerSetting.sequence`.
SIZES: dict[str, tuple[int, int] | None] = {
    "tokens-as-ranks": (1, 0),
    "indivisible": (1, 1),
    "few-tokens": (0, 1),
    "square": None,
}

#: Choices of the first byte of a record; see `MUTATIONS` and `SIZES`.
KINDS = weighted_table(
    ("none", 18),
    ("extra-user", 5),
    ("inner-output", 2),
    ("swapped", 3),
    ("tuple-whole", 2),
    ("one-result", 2),
    ("negative-getitem", 2),
    ("alpha", 1),
    ("broadcast-addend", 3),
    ("foreign-residual", 4),
    ("odd-weight", 3),
    ("view-read-twice", 2),
    ("other-view", 4),
    ("sliced-norm", 2),
    ("cast-between", 2),
    ("user-gather", 3),
    ("user-scatter", 3),
    ("reduced-twice", 3),
    ("other-group", 3),
    ("rewritten", 5),
    ("uneven-rows", 1),
    ("in-place", 6),
    ("tokens-as-ranks", 1),
    ("indivisible", 1),
    ("few-tokens", 1),
    ("square", 1),
)

RECORDS = 3
RECORD_WIDTH = 3
#: Bytes of a whole program: the records stand in front.
WIDTH = RECORDS * RECORD_WIDTH + STRUCTURED_WIDTH

Record = tuple[str, int, int]


def decode_records(choices: bytes) -> list[Record]:
    """Decode the records: which mutation, where, and how. Bytes that are missing count as 0."""
    choices = choices.ljust(RECORDS * RECORD_WIDTH, b"\0")
    rows = [choices[i * RECORD_WIDTH : (i + 1) * RECORD_WIDTH] for i in range(RECORDS)]
    return [(KINDS[kind % len(KINDS)], where, how) for kind, where, how in rows]


def decode_near_miss(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a structured program with mutations."""
    setting, blocks = decode_choices(choices[RECORDS * RECORD_WIDTH :])
    return write_mutated(mesh, setting, blocks, decode_records(choices))


def write_mutated(
    mesh: Mesh, setting: TransformerSetting, blocks: tuple[BlockChoices, ...], records: list[Record]
) -> Program:
    """Write a structured program and mutate it. Mutations that do not fit are left out."""
    labels = ["near-miss"]
    for kind, _, _ in records:
        if kind in SIZES:
            setting = replace(setting, sequence=SIZES[kind])
            labels.append(kind)
    w = write_program(mesh, setting, blocks)
    for kind, where, how in records:
        if kind in MUTATIONS:
            w = mutate(w, kind, where, how)
    return finish_program(w, *dict.fromkeys(labels))


def mutate(w: TransformerWriter, kind: str, where: int, how: int) -> TransformerWriter:
    """Return the program with one mutation, or unchanged if the mutation does not fit."""
    trial = fork(w)
    trial.draft.scope = (kind,)
    try:
        MUTATIONS[kind](trial, where, how)
        trial.draft.check(result(trial))
    except (NoSite, ShapeError):
        return w
    trial.draft.scope, trial.draft.behind = (), None
    return trial
