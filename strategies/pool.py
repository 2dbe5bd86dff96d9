"""A pool of programs that reached something new, and programs that are drawn as variations of them.

Programs are decoded from bytes, and any bytes are a program: so the choices of a program can be changed, or crossed with those
of another one, as fuzzers do with the inputs that they keep (M. Zalewski, "Technical details of american fuzzy lop", 2013).
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from hypothesis import strategies as st

from tcverify.program import Program

#: Of 256 programs so many are variations, once drawing anew reaches nothing new any more.
VARIED = 128

#: So many programs without anything new, in a row, are what counts as that.
PATIENCE = 32

#: Bytes that say how a program varies.
_CONTROL = 20

#: How bytes become programs, for strategies that decode.
_DECODED: WeakKeyDictionary[st.SearchStrategy[Program], tuple[int, Callable[[bytes], Program]]] = WeakKeyDictionary()


def decoded(width: int, decode: Callable[[bytes], Program]) -> st.SearchStrategy[Program]:
    """Draw `width` bytes and decode them.

    One draw of bytes, all of a program included. Among integers Hypothesis would mix constants that it finds in source files, and
    a seed would draw other programs whenever some module changes.
    """
    strategy = st.binary(min_size=width, max_size=width).map(decode)
    _DECODED[strategy] = width, decode
    return strategy


class Pool:
    """Choices of programs that were worth keeping, in the order in which they came."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._fruitless = 0
        self._choices: WeakKeyDictionary[Program, bytes] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, program: Program) -> None:
        """Keep a program that was drawn here: later ones may be variations of it."""
        choices = self._choices.get(program)
        if choices is not None:
            self._kept.append(choices)
            self._fruitless = 0

    def steered(self, programs: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
        """Draw as `programs` does, or variations of what was kept. Strategies that do not decode bytes stay as they are."""
        known = _DECODED.get(programs)
        if known is None:
            return programs
        width, decode = known

        def made(drawn: tuple[bytes, bytes]) -> Program:
            control, fresh = drawn
            self._fruitless += 1
            vary = bool(self._kept) and self._fruitless > PATIENCE and control[0] < VARIED
            choices = self.varied(control, fresh) if vary else fresh
            program = decode(choices)
            self._choices[program] = choices
            return program

        control = st.binary(min_size=_CONTROL, max_size=_CONTROL)
        return st.tuples(control, st.binary(min_size=width, max_size=width)).map(made)

    def varied(self, control: bytes, fresh: bytes) -> bytes:
        """Vary one of those kept, mostly a late one: single bytes, or a stretch of new bytes or of another one's."""
        last = len(self._kept) - 1
        parent = self._kept[last - int(last * (control[1] / 255) ** 2)]
        choices = bytearray(parent)
        size = len(choices)
        if control[2] % 4 == 0:  # a stretch of another
            other = self._kept[int.from_bytes(control[3:5], "big") % len(self._kept)]
            start = int.from_bytes(control[5:7], "big") % size
            end = start + 1 + int.from_bytes(control[7:9], "big") % (size - start)
            choices[start:end] = other[start:end]
        elif control[2] % 4 == 1:  # a stretch of new bytes
            start = int.from_bytes(control[5:7], "big") % size
            end = min(size, start + 1 + control[7] % 16)
            choices[start:end] = fresh[start:end]
        for step in range(1 + control[9] % 4):  # and single bytes
            place = int.from_bytes(control[10 + 2 * step : 12 + 2 * step], "big") % size
            choices[place] = fresh[place]
        return bytes(choices)


__all__ = ["VARIED", "Pool", "decoded"]
