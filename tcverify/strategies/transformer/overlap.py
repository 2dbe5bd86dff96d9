"""Overlap programs: branches with few dependencies between them, so that communication can overlap with compute."""

from __future__ import annotations

from dataclasses import replace

from tcverify.program import Mesh, Program
from tcverify.strategies.choices import HEADER_WIDTH, decode_choices, weighted_table
from tcverify.strategies.draft import DraftValue
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.timing import decode_timing, with_timing
from tcverify.strategies.transformer.programs import begin_program, finish_program
from tcverify.strategies.transformer.sites import new_input
from tcverify.strategies.wild.growths import ends_of, grow

#: Choices of a record's first byte; see `GROWTHS`.
OPS = weighted_table(
    ("none", 2),
    ("matmul", 9),
    ("all-reduce", 8),
    ("unary", 4),
    ("norm", 3),
    ("fused-norm", 4),
    ("fused-reduce", 3),
    ("quantised", 1),
    ("binary", 3),
    ("operator", 2),
    ("reduce-scatter", 2),
    ("all-gather", 2),
    ("all-to-all", 1),
    ("view", 2),
    ("transpose", 1),
    ("slice", 1),
    ("index", 2),
    ("in-place", 2),
    ("write", 2),
    ("marker", 2),
    ("cat", 2),
    ("filled", 1),
    ("split", 2),
    ("cast", 1),
)

#: How many branches a program has; the fewest are serial.
BRANCHES = weighted_table((1, 2), (2, 5), (3, 4), (4, 2))
RECORDS = 24
RECORD_WIDTH = 4
#: Bytes of a whole program: a header as of structured programs, the number of branches, the timing, and the records.
WIDTH = HEADER_WIDTH + 1 + TIMING_WIDTH + RECORDS * RECORD_WIDTH

#: Most values that a program returns.
MOST_OUTPUTS = 6


def decode_overlap(mesh: Mesh, choices: bytes, times: int = 1) -> Program:
    """Decode any bytes into an overlap program, with costs. Parts that do not fit, or are unused, are left out.

    Args:
        times: factor of the sizes of activations; see `decode_choices`.
    """
    choices = choices.ljust(WIDTH, b"\0")
    setting, _ = decode_choices(choices[:HEADER_WIDTH], times)
    w = begin_program(mesh, replace(setting, degenerate=None))
    rest = choices[HEADER_WIDTH:]
    shape = (w.sequence, setting.hidden)
    branches: list[list[DraftValue]] = [
        [new_input(w, "x", shape, w.dtype, ("partial", "replicated")[number % 2])]
        for number in range(BRANCHES[rest[0] % len(BRANCHES)])
    ]
    start = 1 + TIMING_WIDTH
    for number in range(RECORDS):
        kind, where, b, how = rest[start + number * RECORD_WIDTH :][:RECORD_WIDTH]
        op, branch = OPS[kind % len(OPS)], branches[where % len(branches)]
        if op == "none":
            continue
        # Every fourth record sees the other branches too, and may join them to its own.
        others = [value for other in branches if other is not branch for value in other] if where % 4 == 0 else []
        branch += grow(w, op, [*others, *branch], branch[-1 - (where // 16 % 3) % len(branch)], b, how)
    unread = {value.number for value in ends_of(w, [value for branch in branches for value in branch])}
    ends = [[value for value in reversed(branch) if value.number in unread] for branch in branches]
    newest, older = [found[0] for found in ends if found], [value for found in ends for value in found[1:]]
    w.hidden, *w.extras = [*newest, *older][:MOST_OUTPUTS]
    return with_timing(finish_program(w, "overlap", f"branches={len(branches)}"), decode_timing(rest[1:start]))
