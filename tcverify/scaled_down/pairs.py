"""Scaled-down pairs: the pass gets the program at its real sizes; the original and its result run scaled down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tcverify.application import Defect, Pair, ScaledDown
from tcverify.errors import ProgramError
from tcverify.program import Program
from tcverify.scaled_down.scaling import ScaledPrograms, scale_down
from tcverify.scaled_down.sizes import LEAST, SMALL
from tcverify.system import machine_memory

#: Largest number of simultaneous elements on all ranks of a scaled-down program, if each had its own storage: 8 GiB in float64.
MOST = 1 << 30

#: Bytes of the machine's memory per element in the worst case: both versions of the program are in memory at once.
_BYTES = 16

#: Limits on elements up to which small numbers, of heads, experts and ranks, are kept.
_EASY = 1 << 27


def small_pair(pair: Pair) -> Pair:
    """Scale down a program and the result of a pass on it.

    Raises:
        ProgramError: no choice of sizes fits.
    """
    programs = [p for p in (pair.original, pair.rewritten, pair.again) if p is not None]
    distinct = list({id(p): p for p in programs}.values())
    scaled = _fitting(distinct)
    wrong = {id(program): node for program, node in zip(distinct, scaled.wrong, strict=True) if node is not None}
    if id(pair.original) in wrong:
        raise ProgramError(f"the operands of node '{wrong[id(pair.original)]}' do not fit together")
    defects = list(pair.defects)
    if id(pair.rewritten) in wrong:
        node = wrong[id(pair.rewritten)]
        defects.append(Defect("shapes", 0, f"the operands of '{node}' do not fit together at the real sizes", node))
    small = dict(zip(map(id, distinct), scaled.programs, strict=True))

    def of(program: Program | None) -> Program | None:
        return None if program is None else small[id(program)]

    return replace(
        pair, original=small[id(pair.original)], rewritten=of(pair.rewritten), again=of(pair.again),
        scaled=ScaledDown(pair.original, dict(scaled.sizes)), stages=[], defects=defects,
    )  # fmt: skip


def _fitting(programs: Sequence[Program]) -> ScaledPrograms:
    """Scaled-down versions that fit into memory. Raises `ProgramError`."""
    scaled = scale_down(programs)
    if _elements(scaled) > _EASY:
        with suppress(ProgramError):  # nothing smaller fits
            scaled = min(scaled, scale_down(programs, LEAST), key=_elements)
    elements, most = _elements(scaled), min(MOST, machine_memory() // _BYTES)
    if elements > most:
        left = sorted({n for n, became in scaled.sizes.items() if n in became and n > SMALL}, reverse=True)
        raise ProgramError(
            f"its ranks' values take {elements / 2**27:.1f} GiB, of {most / 2**27:.1f} that they may take; no smaller sizes were"
            f" found for {left[:8]}"
        )
    return scaled


def _elements(scaled: ScaledPrograms) -> int:
    return max(program.elements for program in scaled.programs)


__all__ = ["MOST", "small_pair"]
