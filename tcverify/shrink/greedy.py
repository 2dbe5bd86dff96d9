"""The greedy driver of both reducers: an edit is kept where the program still shows what is looked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tcverify.program import NotSerialisable, Program, program_id


class OutOfTime(Exception):
    """The deadline has passed."""


class Greedy:
    """The smallest program so far, and the programs tried.

    Args:
        shows: the predicate; see `reduce`.
        deadline: on the monotonic clock; nothing is tried after it.

    Attributes:
        program: the smallest program so far; set by the code that accepts an
        edit. trials: number of programs tried.
    """

    program: Program

    def __init__(self, shows: Callable[[Program], bool], deadline: float | None) -> None:
        self.trials = 0
        self._shows = shows
        self._deadline = deadline
        self._refused: set[str] = set()

    def check_time(self) -> None:
        """Raise `OutOfTime` when the deadline has passed: where an edit of a large program takes time, before it is made."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise OutOfTime

    def ask(self, program: Program) -> bool:
        """Whether a program shows what is looked for. What did not is not asked about again. Raises `OutOfTime`."""
        try:
            identity = program_id(program)
        except NotSerialisable:  # it has no identity: tried as often as it occurs
            identity = ""
        if identity in self._refused:
            return False
        self.check_time()
        self.trials += 1
        if self._shows(program):
            return True
        if identity:
            self._refused.add(identity)
        return False


S = TypeVar("S", bound=Greedy)


def descend(search: S, moves: Sequence[Callable[[S], None]]) -> None:
    """Apply moves, again and again until none makes the program smaller. Raises `OutOfTime`."""
    before = None
    while before is not search.program:
        before = search.program
        for move in moves:
            move(search)


__all__ = ["Greedy", "OutOfTime", "descend"]
