"""Which lines of a pass's own code run, and the outcomes of its conditions: recorded while the pass runs, in its process.

From Python 3.12 on this uses `sys.monitoring`: every location reports once and is then disabled, so that a pass whose code was
reached completely runs at full speed. Older versions use `sys.settrace`, which slows down all frames: so only some programs are
watched, with decreasing frequency; see `Recorder.taken`.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import fx

from tcverify.application.coverage.reachable import source_of

#: `sys.monitoring`, if this Python has it.
_MONITORING: Any = getattr(sys, "monitoring", None)


class CodePoint(NamedTuple):
    """A location in the pass's code that was reached.

    Attributes:
        outcome: of the condition on this line, or the one returned there: 1 if it was true, 0 if it was false; -1: the line
            ran.
    """

    file: str
    line: int
    outcome: int = -1


class Scope:
    """The files that belong to a pass: those that define it, and other files of their packages.

    Attributes:
        files: those that define it.
    """

    def __init__(self, files: Iterable[str], packages: Iterable[str] = ()) -> None:
        self.files = tuple(dict.fromkeys(map(os.path.realpath, files)))
        self._packages = tuple(f"{os.path.realpath(package)}{os.sep}" for package in packages)
        self._known: dict[str, str | None] = {}

    def of(self, file: str) -> str | None:
        """The real path of a file that belongs to the pass, None for any other file."""
        if file not in self._known:
            real = os.path.realpath(file)
            ours = real in self.files or real.startswith(self._packages)
            self._known[file] = real if ours and source_of(real).functions else None
        return self._known[file]


def scope_of(subjects: Iterable[Any], covered: Iterable[str]) -> Scope:
    """Return the scope of passes, as they are loaded.

    Args:
        covered: names of modules that count instead of those that define the passes.
    """
    named = [_file(sys.modules.get(name)) or _path_of(name) for name in covered]
    if named:
        return Scope(file for file in named if file)
    files: list[str] = []
    packages: list[str] = []
    for subject in subjects:
        plain = getattr(subject, "func", subject)
        owner = plain if inspect.isroutine(plain) else type(plain)
        kinds = [owner] if inspect.isroutine(owner) else [k for k in owner.__mro__ if k.__module__ != "builtins"]
        for number, kind in enumerate(kinds):
            module = sys.modules.get(kind.__module__)
            file = _file(module)
            if module is None or file is None:
                continue
            if number == 0:
                files.append(file)
            package = module.__package__ or ""
            if package and package.split(".")[0] not in (*sys.stdlib_module_names, "torch"):
                packages.append(str(Path(file).parent))
    return Scope(files, packages)


def _file(module: ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


def _path_of(name: str) -> str | None:
    """The file of a module of an imported package, without importing the module."""
    top, *rest = name.split(".")
    root = _file(sys.modules.get(top))
    if root is None:
        return None
    path = Path(root).parent.joinpath(*rest)
    found = (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())
    return next(map(str, found), None)


class Recorder:
    """Records what is reached for the first time during the recorder's lifetime.

    Args:
        monitored: whether to use `sys.monitoring`; by default if it exists.
    """

    def __init__(self, scope: Scope, *, monitored: bool | None = None) -> None:
        self.scope = scope
        self._seen: set[CodePoint] = set()
        self._new: list[CodePoint] = []
        self._programs = 1
        self._traced = True
        self._outcomes: set[Hashable] = set()  # of programs that were watched
        self._codes: dict[int, CodeType] = {}  # that are watched: their ids are those of no others
        self._digested: set[tuple[int, int, int]] = set()
        self._foreign: set[str] = set()  # names of files that do not belong to the pass
        self._steps: dict[str, set[tuple[int, int]]] = {}
        self._missing: dict[int, tuple[set[CodePoint], int]] = {}
        self._looked: dict[tuple[str, int], dict[str, None]] | None = None
        self._tool: int | None = None
        if monitored if monitored is not None else _MONITORING is not None:
            self._tool = self._monitor()

    def taken(self) -> list[CodePoint]:
        """What a program has reached for the first time; called after each program.

        If watching costs time, these programs are watched: the 1st, 2nd, 4th, 8th, …; the successor of each watched one that
        reached something new; and those that `misses` names. So the cost is bounded by the amount of code, and equal seeds give
        equal results.
        """
        new, self._new = self._new, []
        self._programs += 1
        self._traced = (self._traced and bool(new)) or self._programs & (self._programs - 1) == 0
        return new

    def misses(self, outcome: Hashable) -> bool:
        """Whether the pass has done something to a program that it did to no watched program: then it is applied again
        and watched.

        Otherwise lines would be reported as never reached although results show that they ran.
        """
        missed = self._tool is None and not self._traced and outcome not in self._outcomes
        self._traced = self._traced or missed
        if self._traced:
            self._outcomes.add(outcome)
        return missed

    def ask(self, points: Iterable[CodePoint], *, look: bool = False) -> None:
        """Report these locations again if the next program reaches them, and watch it in any case.

        Args:
            look: record which nodes each condition is about; see `looked`.
        """
        self._looked = {} if look else None
        self._traced = True
        self.forget(points)

    def forget(self, points: Iterable[CodePoint] | None) -> None:
        """Report these locations (None: all) again, as if no program had reached them."""
        again = self._seen.intersection(self._seen if points is None else points)
        if again:
            self._seen -= again
            self._steps.clear()
            self._missing.clear()
            self._digested.clear()
            if self._tool is not None:
                _MONITORING.restart_events()

    def looked(self) -> dict[tuple[str, int], tuple[str, ...]]:
        """The nodes in the variables of a function when a condition was evaluated, by file and line."""
        return {where: tuple(names) for where, names in (self._looked or {}).items()}

    def _look(self, file: str, line: int, frame: FrameType) -> None:
        """Record the nodes in the variables of a function that is about to evaluate a condition."""
        source = source_of(file)
        condition = source.conditions.get(line)
        asked = line in source.returned if condition is None else condition.line == line
        if self._looked is None or not asked:
            return
        names = self._looked.setdefault((file, line), {})
        names.update((value.name, None) for value in frame.f_locals.values() if isinstance(value, fx.Node))

    @property
    def traces(self) -> bool:
        """Whether `watching` has to be entered for it to record."""
        return self._tool is None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block, unless monitoring does so anyway."""
        if self._tool is not None or not self._traced or sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def close(self) -> None:
        """Stop watching."""
        if self._tool is not None:
            _MONITORING.set_events(self._tool, 0)
            _MONITORING.free_tool_id(self._tool)
            self._tool = None

    def _reach(self, point: CodePoint) -> None:
        if point not in self._seen:
            self._seen.add(point)
            self._new.append(point)

    def _ran(self, file: str, line: int) -> None:
        """Record that a line runs, and so that the conditions whose bodies contain it were true."""
        self._reach(CodePoint(file, line))
        for condition in source_of(file).true.get(line, ()):
            self._reach(CodePoint(file, condition, 1))

    def _returned(self, file: str, line: int, value: Any) -> None:
        """Record what a function returned, if it is a condition. Other objects are not converted to a boolean."""
        if line in source_of(file).returned and (value is None or isinstance(value, (bool, int, list, tuple, fx.Node))):
            self._reach(CodePoint(file, line, int(bool(value))))

    # ------------------------------------------------------------------------------------------------ sys.monitoring

    def _monitor(self) -> int | None:
        """Watch every function of the scope from its first call on; None if other tools use all tool ids."""
        monitoring: Any = _MONITORING
        tool = next((number for number in (4, 3, 2) if monitoring.get_tool(number) is None), None)
        if tool is None:
            return None
        events = monitoring.events
        branches = [getattr(events, name) for name in ("BRANCH_LEFT", "BRANCH_RIGHT") if hasattr(events, name)]
        directed = bool(branches)  # reports each direction of a jump separately
        branches = branches or [events.BRANCH]
        watched = events.LINE | events.PY_RETURN
        for one in branches:
            watched |= one

        def start(code: CodeType, _: int) -> Any:
            if self.scope.of(code.co_filename) is not None and code.co_flags & inspect.CO_OPTIMIZED:
                self._codes[id(code)] = code
                monitoring.set_local_events(tool, code, watched)
            return monitoring.DISABLE

        def line(code: CodeType, number: int) -> Any:
            file = self.scope.of(code.co_filename) or ""
            self._ran(file, number)
            if self._looked is None:
                return monitoring.DISABLE
            self._look(file, number, sys._getframe(1))
            return None

        def branch(code: CodeType, offset: int, target: int) -> Any:
            if (id(code), offset, target) in self._digested:
                return None
            return monitoring.DISABLE if self._went(code, offset, target) or directed else None

        def returned(code: CodeType, offset: int, value: Any) -> Any:
            file = self.scope.of(code.co_filename) or ""
            line = _layout(code).line(offset)
            self._returned(file, line, value)
            wanted = line in source_of(file).returned and not all(
                CodePoint(file, line, one) in self._seen for one in (0, 1)
            )
            return None if wanted else monitoring.DISABLE

        monitoring.use_tool_id(tool, "tcverify")
        monitoring.register_callback(tool, events.PY_START, start)
        monitoring.register_callback(tool, events.LINE, line)
        monitoring.register_callback(tool, events.PY_RETURN, returned)
        for event in branches:
            monitoring.register_callback(tool, event, branch)
        monitoring.set_events(tool, events.PY_START)
        monitoring.restart_events()  # locations that an earlier recorder of this process has disabled
        return tool

    def _went(self, code: CodeType, offset: int, target: int) -> bool:
        """Record the direction of a jump; returns whether the other direction is irrelevant: the body shows that a
        condition is true."""
        file = self.scope.of(code.co_filename) or ""
        layout = _layout(code)
        condition = source_of(file).conditions.get(layout.line(offset))
        if condition is None:
            return True
        line = layout.line(target)
        outcome = condition.outcome(line) if line else False
        if outcome is None and layout.leaves(target):
            outcome = False  # a jump back or a return is filed under the line of the condition
        if outcome is not None:
            self._reach(CodePoint(file, condition.line, int(outcome)))
        if CodePoint(file, condition.line, 0) in self._seen:
            return True
        self._digested.add((id(code), offset, target))
        return False

    # -------------------------------------------------------------------------------------------------- sys.settrace

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        """Trace the frames of those functions of the pass of which something is not reached yet."""
        code = frame.f_code
        if code.co_filename in self._foreign:  # nearly all frames: this is called for every call that FX makes
            return None
        file = self.scope.of(code.co_filename)
        if file is None:
            self._foreign.add(code.co_filename)
        if file is None or not code.co_flags & inspect.CO_OPTIMIZED or not self._left(code, file):
            return None
        steps = self._steps.setdefault(file, set())
        last = 0

        def trace(frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "exception":  # does not show the outcome of a condition that was being evaluated
                last = 0
                return trace
            line = frame.f_lineno if event == "line" else 0
            if event == "return" and last:
                self._returned(file, frame.f_lineno, value)
            if self._looked is not None and line:
                self._look(file, line, frame)
            if (last, line) not in steps:
                steps.add((last, line))
                self._went_on(file, last, line)
            last = line
            return trace

        return trace

    def _left(self, code: CodeType, file: str) -> set[CodePoint]:
        """What is not reached yet of a function."""
        missing, known = self._missing.get(id(code), (None, 0))
        if missing is None:
            self._codes[id(code)] = code
            source = source_of(file)
            counted = {line for one in source.functions for line in one.lines}
            lines = {line for _, _, line in code.co_lines() if line} & counted
            conditions = {source.conditions[line].line for line in lines if line in source.conditions}
            conditions |= lines & source.returned
            missing = {CodePoint(file, line) for line in lines}
            missing |= {CodePoint(file, line, outcome) for line in conditions for outcome in (0, 1)}
        if known != len(self._seen):
            missing = {point for point in missing if point not in self._seen}
            self._missing[id(code)] = missing, len(self._seen)
        return missing

    def _went_on(self, file: str, last: int, line: int) -> None:
        """Record that a function continued from one line to another, or returned if there is none."""
        if line:
            self._ran(file, line)
        condition = source_of(file).conditions.get(last)
        outcome = None if condition is None else bool(line) and condition.outcome(line)
        if condition is not None and outcome is not None:
            self._reach(CodePoint(file, condition.line, int(outcome)))


class _Layout:
    """The lines of the instructions of a code object."""

    def __init__(self, code: CodeType) -> None:
        spans = [(start, line or 0) for start, _, line in code.co_lines()]
        self._starts, self._lines = [start for start, _ in spans], [line for _, line in spans]
        self._ops = {one.offset: one.opname for one in dis.get_instructions(code)}

    def line(self, offset: int) -> int:
        """The line of an instruction, 0 if it has none."""
        place = bisect_right(self._starts, offset) - 1
        return self._lines[place] if place >= 0 else 0

    def leaves(self, offset: int) -> bool:
        """Whether an instruction leaves its line."""
        return self._ops.get(offset, "").startswith(("RETURN", "JUMP"))


@lru_cache(maxsize=4096)
def _layout(code: CodeType) -> _Layout:
    return _Layout(code)


__all__ = ["CodePoint", "Recorder", "Scope", "scope_of"]
