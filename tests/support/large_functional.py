"""Large asynchronous programs."""

from __future__ import annotations

import random
from dataclasses import replace

from tcverify.program import Mesh, Program
from tcverify.strategies.draft import attempt
from tcverify.strategies.functional.choices import RECORD_WIDTH, FunctionalSetting, decode_record
from tcverify.strategies.functional.collectives import wait_for_due
from tcverify.strategies.functional.programs import MOTIFS, add_costs, begin_program, finish_program
from tcverify.strategies.functional.writing import FunctionalWriter
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.timing import decode_timing


def large_functional_program(mesh: Mesh, nodes: int, seed: int) -> Program:
    """An asynchronous program of about `nodes` calls: repeated layers of compute with collectives, with costs.

    Equal arguments give equal programs.
    """
    # What leads nowhere is left out: how much that is, the first part shows.
    part = min(nodes, 600)
    program = _large(mesh, nodes * part // max(_large(mesh, part, seed).size, 1), seed)
    timing = replace(decode_timing(bytes(TIMING_WIDTH)), known="all", spread="wide", balance=1.0, seed=seed % 256)
    return add_costs(program, timing)


#: What large programs consist of.
_REPEATED = ("compute", "matmul", "collective", "norm", "gradient", "column-row", "unshard", "pipelined", "write")


def _large(mesh: Mesh, calls: int, seed: int) -> Program:
    generator = random.Random(seed)
    w = begin_program(mesh, FunctionalSetting("any", 1, 8, 2, "f32", False, "varying", 3, seed % 256), FunctionalWriter)
    while len(w.draft) < calls:
        kind = _REPEATED[generator.randrange(len(_REPEATED))]
        record = replace(decode_record("any", generator.randbytes(RECORD_WIDTH)), kind=kind)
        attempt(w, MOTIFS[kind], record)
        wait_for_due(w, w.number)
        w.pool, w.outputs = w.pool[-16:], w.outputs[-4:]
        w.number += 1
    return finish_program(w)
