"""Overlap programs: branches that depend on each other here and there, so that communication can run beside compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tcverify.ops import ShapeError
from tcverify.program import Mesh, Program
from tcverify.strategies.choices import HEADER_WIDTH, decode_choices, weighted
from tcverify.strategies.draft import Value
from tcverify.strategies.growths import GROWTHS
from tcverify.strategies.sites import NoSite, call, new_input
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.timing import decode_timing, timed
from tcverify.strategies.transformer import begin, finish

#: What a record's first byte picks from; see `GROWTHS`.
OPS = weighted(
    ("none", 2),
    ("matmul", 9),
    ("all-reduce", 8),
    ("unary", 4),
    ("norm", 3),
    ("fused-norm", 4),
    ("fused-reduce", 3),
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
    ("marker", 2),
    ("cat", 2),
    ("filled", 1),
    ("split", 2),
    ("cast", 1),
)

#: How many branches a program has; the fewest are serial.
BRANCHES = weighted((1, 2), (2, 5), (3, 4), (4, 2))
RECORDS = 24
RECORD_WIDTH = 4
#: Bytes of a whole program: a header as of structured programs, the number of branches, the timing, and the records.
WIDTH = HEADER_WIDTH + 1 + TIMING_WIDTH + RECORDS * RECORD_WIDTH

MOST_ELEMENTS = 2048
MOST_RMS = 6.0
MOST_OUTPUTS = 6


def decode_overlap(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into an overlap program, with costs. What does not fit, or leads nowhere, is left out."""
    choices = choices.ljust(WIDTH, b"\0")
    setting, _ = decode_choices(choices[:HEADER_WIDTH])
    w = begin(mesh, replace(setting, degenerate=None))
    rest = choices[HEADER_WIDTH:]
    shape = (w.sequence, setting.hidden)
    branches: list[list[Value]] = [
        [new_input(w, "x", shape, w.dtype, ("partial", "replicated")[number % 2])]
        for number in range(BRANCHES[rest[0] % len(BRANCHES)])
    ]
    start = 1 + TIMING_WIDTH
    for number in range(RECORDS):
        kind, where, b, how = rest[start + number * RECORD_WIDTH :][:RECORD_WIDTH]
        op, branch = OPS[kind % len(OPS)], branches[where % len(branches)]
        if op == "none":
            continue
        before = w.draft.copy()
        w.draft.scope = (op,)
        try:
            # Every fourth record sees the other branches too, and may join them to its own.
            values = (
                branch
                if where % 4
                else [value for other in branches if other is not branch for value in other] + branch
            )
            found = GROWTHS[op](w, values, branch[-1 - (where // 16 % 3) % len(branch)], b, how)
            for i, value in enumerate(found):
                if math.prod(w.draft.shape(value) or (MOST_ELEMENTS + 1,)) > MOST_ELEMENTS:
                    raise NoSite
                if value.rms > MOST_RMS:
                    found[i] = replace(call(w, "aten::mul.Tensor", value, 0.125), rms=value.rms / 8)
        except (NoSite, ShapeError):
            w.draft = before
            continue
        branch += found
    w.draft.scope = ()
    w.hidden, *w.extras = _ends(w.draft.steps([v for b in branches for v in b]), branches)
    return timed(finish(w, "overlap", f"branches={len(branches)}"), decode_timing(rest[1:start]))


def _ends(steps: Sequence[tuple[Value, object]], branches: Sequence[Sequence[Value]]) -> list[Value]:
    """The values that nobody reads, the newest of each branch first."""
    read = {number for _, step in steps for number in getattr(step, "reads", ())}
    ends = [[value for value in reversed(branch) if value.number not in read] for branch in branches]
    newest = [found[0] for found in ends if found]
    others = [value for found in ends for value in found[1:]]
    return [*newest, *others][:MOST_OUTPUTS]
