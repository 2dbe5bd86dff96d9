"""What can be reached in a source file: the lines of its functions, and both outcomes of each condition.

Read from the source and its compiled form; nothing is executed. Code at module and class level runs at import and does not
count, and neither do docstrings. Conditions are those of `if`, `elif` and `while`, if condition and body are on
different lines, and returned expressions that are syntactically boolean, such as `return a is b and c`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import TypeGuard

#: Flag of code objects of functions, `inspect.CO_OPTIMIZED`: not of modules and class bodies.
_OPTIMIZED = 1


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of an `if`, `elif` or `while`.

    Attributes:
        line: first line of the statement.
        test: first and last line of the condition.
        body: first and last line of the code that runs if it is true.
        text: its source.
        returns: whether the body ends the function.
    """

    line: int
    test: tuple[int, int]
    body: tuple[int, int]
    text: str = ""
    returns: bool = False

    def outcome(self, line: int) -> bool | None:
        """The outcome of the condition if execution continues at a line; None while it is still being evaluated."""
        if self.test[0] <= line <= self.test[1]:
            return None
        return self.body[0] <= line <= self.body[1]


@dataclass(frozen=True, slots=True)
class Function:
    """A function, without those defined in it; lambdas and comprehensions belong to it.

    Attributes:
        name: qualified within the file.
        lines: those with code.
        conditions: the lines of its conditions, including returned ones.
        names: globals and attributes that it refers to, including everything that it can call.
    """

    name: str
    lines: frozenset[int]
    conditions: frozenset[int]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class ReachableCode:
    """What can be reached in a file; empty if it cannot be read.

    Attributes:
        conditions: by each line of a condition, the one that begins last.
        true: by each line, the lines of the conditions whose bodies contain it: they were true if it runs.
        returned: the lines of `return` statements that return a condition.
    """

    functions: tuple[Function, ...]
    conditions: dict[int, Condition]
    true: dict[int, tuple[int, ...]]
    returned: frozenset[int] = frozenset()


@cache
def source_of(file: str) -> ReachableCode:
    """Read a file. A file that this Python cannot parse has nothing to reach."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        tree = ast.parse(text)
        code = compile(text, file, "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError):
        return ReachableCode((), {}, {})
    conditions: dict[int, Condition] = {}
    true: dict[int, tuple[int, ...]] = {}
    for node in sorted(filter(None, map(_condition, ast.walk(tree))), key=lambda one: one.line):
        conditions.update(dict.fromkeys(range(node.test[0], node.test[1] + 1), node))
        for line in range(node.body[0], node.body[1] + 1):
            true[line] = (*true.get(line, ()), node.line)
    bodies = {
        line: (node.name, _first_line(node), node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in (node.lineno, *(one.lineno for one in node.decorator_list))
    }
    returned = frozenset(node.lineno for node in ast.walk(tree) if returns_condition(node))
    own = {condition.line for condition in conditions.values()} | returned
    functions = []
    for name, inner, first, last in _functions(code, "", bodies):
        lines = frozenset(line for line in _lines(inner) if first <= line <= last)
        functions.append(Function(name, lines, lines & own, frozenset(_names(inner))))
    return ReachableCode(tuple(functions), conditions, true, returned)


#: Functions that return a boolean.
_ANSWERS = frozenset({"all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"})


def returns_condition(node: ast.AST) -> TypeGuard[ast.Return]:
    """Whether it is a `return` of a syntactically boolean expression."""
    return isinstance(node, ast.Return) and node.value is not None and _is_condition(node.value)


def _is_condition(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in _ANSWERS
    return (
        isinstance(value, ast.Compare)
        or (isinstance(value, ast.BoolOp) and any(map(_is_condition, value.values)))
        or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not))
    )


def _condition(node: ast.AST) -> Condition | None:
    if not isinstance(node, (ast.If, ast.While)) or isinstance(node.test, ast.Constant):
        return None
    test = node.test.lineno, node.test.end_lineno or node.test.lineno
    first, last = node.body[0], node.body[-1]
    decorators = getattr(first, "decorator_list", [])  # are above the line that a definition is filed under
    body = min(one.lineno for one in (first, *decorators)), last.end_lineno or last.lineno
    returns = isinstance(last, ast.Return)
    return Condition(node.lineno, test, body, ast.unparse(node.test), returns) if body[0] > test[1] else None


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The line of a function's first statement, without the docstring."""
    documented = ast.get_docstring(node, clean=False) is not None
    return node.body[1].lineno if documented and len(node.body) > 1 else node.body[0].lineno


def _functions(
    code: CodeType, inside: str, bodies: dict[int, tuple[str, int, int]]
) -> Iterator[tuple[str, CodeType, int, int]]:
    """Qualified name, code, first and last line of every function in a code object."""
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            continue
        name, first, last = bodies.get(inner.co_firstlineno, ("", 0, 0))
        if inner.co_flags & _OPTIMIZED and name == inner.co_name:
            yield f"{inside}{name}", inner, first, last
            yield from _functions(inner, f"{inside}{name}.", bodies)
        else:
            scope = "" if inner.co_name.startswith("<") else f"{inner.co_name}."
            yield from _functions(inner, f"{inside}{scope}", bodies)


def _lines(code: CodeType) -> set[int]:
    """The lines of a function, with those of its lambdas and comprehensions."""
    found = {line for _, _, line in code.co_lines() if line}
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name.startswith("<"):
            found |= _lines(inner)
    return found


def _names(code: CodeType) -> set[str]:
    """The names that a function refers to, including its lambdas, comprehensions, classes and inner functions."""
    found = {*code.co_names, *code.co_cellvars, *code.co_freevars}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names(inner) | {inner.co_name}
    return found


__all__ = ["Condition", "Function", "ReachableCode", "returns_condition", "source_of"]
