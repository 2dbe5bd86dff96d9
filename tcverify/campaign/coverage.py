"""What the programs of a pass have reached of its code: lines, and outcomes of conditions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tcverify.application import CodePoint, Function, source_of
from tcverify.system.files import source_name

#: How often a condition was seen: before Python 3.12 some programs are traced, from then on all are.
EACH_TIME = "each time" if hasattr(sys, "monitoring") else "each time it was traced"


@dataclass(frozen=True, slots=True)
class FileReach:
    """What was reached of one file.

    Attributes:
        lines, lines_reached: of functions. A function counts once it is called, and in files that define the pass also where
            a function that counts names it; constructors, which run before anything is recorded, count once they are called.
        outcomes, outcomes_reached: the two of each condition.
        unreached: first and last line of runs of code that never ran, in functions that did.
        always_true: lines of conditions that were never false.
        uncalled: functions that were never called.
    """

    file: str
    lines: int
    lines_reached: int
    outcomes: int
    outcomes_reached: int
    unreached: tuple[tuple[int, int], ...] = ()
    always_true: tuple[int, ...] = ()
    uncalled: tuple[str, ...] = ()


class Coverage:
    """Gathers what the programs of a pass reach of its code, on all meshes and by all workers.

    Args:
        files: that define the pass.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self.files = tuple(files)
        self.points: set[CodePoint] = set()

    def add(self, points: Iterable[CodePoint]) -> None:
        """Take note of places that were reached."""
        self.points.update(points)

    def report(self) -> tuple[FileReach, ...]:
        """What was reached so far, file by file, those that define the pass first."""
        by_file: dict[str, set[CodePoint]] = {file: set() for file in self.files}
        for point in sorted(self.points):
            by_file.setdefault(point.file, set()).add(point)
        ran = {file: {point.line for point in points if point.outcome < 0} for file, points in by_file.items()}
        called = {file: [one for one in source_of(file).functions if one.lines & ran[file]] for file in by_file}
        named = self._named([one for functions in called.values() for one in functions])
        found = (
            _reach(file, points, ran[file], called[file], named if file in self.files else frozenset())
            for file, points in by_file.items()
        )
        return tuple(one for one in found if one.lines)

    def decided(self) -> str:
        """The condition that kept the pass from going on in every program; "" where none did.

        Of the functions that nothing else called: the first condition that was always true and returned, else the first one
        that was never true.
        """
        reached = [point for point in self.points if point.file in self.files]
        went = {(point.file, point.line, point.outcome) for point in reached if point.outcome >= 0}
        ran = {(point.file, point.line) for point in reached}
        called = [
            (f, one) for f in self.files for one in source_of(f).functions if any((f, n) in ran for n in one.lines)
        ]
        entries = [
            (file, one)
            for file, one in called
            if not any(one.name.rpartition(".")[2] in other.names for _, other in called if other is not one)
        ]
        never = ""
        for file, one in entries:
            for line in sorted(one.conditions):
                condition = source_of(file).conditions.get(line)
                outcomes = {outcome for outcome in (0, 1) if (file, line, outcome) in went}
                if condition is None or condition.line != line or len(outcomes) != 1:
                    continue
                said = f"`{condition.text}` was {'true' if 1 in outcomes else 'false'} {EACH_TIME}"
                if 1 in outcomes and condition.returns:
                    return f"it returned at {source_name(file)}:{condition.body[1]}, because {said}"
                if 0 in outcomes and not never:
                    never = f"{said} at {source_name(file)}:{line}"
        return never

    def _named(self, called: Sequence[Function]) -> frozenset[str]:
        """Names of what the functions that were called, and those that they name in the files of the pass, can call."""
        names = {name for one in called for name in one.names}
        own = [one for file in self.files for one in source_of(file).functions]
        while True:
            more = {name for one in own if one.name.rpartition(".")[2] in names for name in one.names} - names
            if not more:
                return frozenset(names)
            names |= more


def _reach(
    file: str, points: set[CodePoint], ran: set[int], called: Sequence[Function], named: frozenset[str]
) -> FileReach:
    """What was reached of a file.

    Args:
        ran: the lines that ran.
        called: the functions that were called.
        named: names of further functions that count.
    """
    went = {(point.line, point.outcome) for point in points if point.outcome >= 0}
    counted = [
        one
        for one in source_of(file).functions
        if one in called or (one.lines and one.name.rpartition(".")[2] in named and not one.name.endswith("__init__"))
    ]
    conditions = {line for one in counted for line in one.conditions}
    lines = {line for one in counted for line in one.lines}
    return FileReach(
        file,
        len(lines),
        len(lines & ran),
        2 * len(conditions),
        len([one for one in went if one[0] in conditions]),
        tuple(run for one in called for run in _runs(sorted(one.lines), ran)),
        tuple(sorted(line for line in conditions if (line, 1) in went and (line, 0) not in went)),
        tuple(one.name for one in counted if not one.lines & ran),
    )


def _runs(lines: list[int], ran: set[int]) -> list[tuple[int, int]]:
    """Lines that did not run as first and last of those that follow one another, whatever blank lines are between them."""
    runs: list[tuple[int, int]] = []
    before = False
    for line in lines:
        if line in ran:
            before = False
        elif before:
            runs[-1] = (runs[-1][0], line)
        else:
            runs.append((line, line))
            before = True
    return runs


__all__ = ["Coverage", "FileReach"]
