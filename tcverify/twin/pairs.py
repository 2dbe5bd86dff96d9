"""Programs of everyday size, and what passes make of them: the pass is given the real sizes, what it makes runs as twin."""

from __future__ import annotations

from dataclasses import replace

from tcverify.application import Defect, Pair
from tcverify.errors import ProgramError
from tcverify.program import Program
from tcverify.twin.making import twins_of
from tcverify.twin.sizes import SMALL

#: Elements that there may be at once on all ranks of a twin: 2 GiB in float64.
MOST = 1 << 28


def small_pair(pair: Pair) -> Pair:
    """The twins of a program and of what a pass made of it.

    Raises:
        ProgramError: no choice of sizes fits.
    """
    programs = [p for p in (pair.original, pair.rewritten, pair.again) if p is not None]
    distinct = list({id(p): p for p in programs}.values())
    twins = twins_of(distinct)
    if any(program.elements > MOST for program in twins.programs):
        left = sorted({n for n, became in twins.sizes.items() if n in became and n > SMALL}, reverse=True)
        raise ProgramError(f"it does not fit into memory, and no smaller sizes were found for {left[:8]}")
    wrong = {id(program): node for program, node in zip(distinct, twins.wrong, strict=True) if node is not None}
    if id(pair.original) in wrong:
        raise ProgramError(f"the operands of node '{wrong[id(pair.original)]}' do not fit together")
    defects = list(pair.defects)
    if id(pair.rewritten) in wrong:
        node = wrong[id(pair.rewritten)]
        defects.append(Defect("shapes", 0, f"the operands of '{node}' do not fit together at the real sizes", node))
    small = dict(zip(map(id, distinct), twins.programs, strict=True))

    def of(program: Program | None) -> Program | None:
        return None if program is None else small[id(program)]

    return replace(
        pair, original=small[id(pair.original)], rewritten=of(pair.rewritten), again=of(pair.again), real=pair.original,
        sizes=dict(twins.sizes), stages=[], defects=defects,
    )  # fmt: skip


__all__ = ["MOST", "small_pair"]
