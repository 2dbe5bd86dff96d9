"""What a condition depends on, determined from the source: its own terms, assignments to its variables, and its callees."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tcverify.application.coverage.reachable import returns_condition

#: Number of steps from a condition to its dependencies that are followed.
DEPTH = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef


def conditions_of(tree: ast.Module) -> Iterator[tuple[int, list[ast.AST], list[ast.AST]]]:
    """The conditions of `if` and `while`, in functions and outside, and those that functions return.

    Yields:
        The line; the expressions that it depends on, nearest first; and the functions of the module that these call.
    """
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    yield from _inside(tree, {}, functions)


def _inside(
    owner: ast.AST, assigned: dict[str, list[ast.expr]], functions: dict[str, Function]
) -> Iterator[tuple[int, list[ast.AST], list[ast.AST]]]:
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, (ast.If, ast.While)):
            expressions, called = _slice(node.test, assigned, functions)
            yield node.lineno, expressions, called
        elif returns_condition(node) and node.value is not None:
            expressions, called = _slice(node.value, assigned, functions)
            yield node.lineno, expressions, called
        own = _assigned(node) if isinstance(node, Function) else assigned
        yield from _inside(node, own, functions)


def _slice(
    test: ast.expr, assigned: dict[str, list[ast.expr]], functions: dict[str, Function]
) -> tuple[list[ast.AST], list[ast.AST]]:
    expressions: dict[ast.AST, None] = {test: None}
    called: dict[ast.AST, None] = {}
    edge: list[ast.expr] = [test]
    for _ in range(DEPTH):
        further: list[ast.expr] = []
        for part in (part for one in edge for part in ast.walk(one)):
            if isinstance(part, ast.Name):
                further += [one for one in assigned.get(part.id, ()) if one not in expressions]
            elif isinstance(part, ast.Call):
                name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
                if name in functions:
                    called[functions[name]] = None
        expressions.update(dict.fromkeys(further))
        edge = further
    return list(expressions), list(called)


def _assigned(function: Function) -> dict[str, list[ast.expr]]:
    """By name of a variable, the expressions that a function assigns to it."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.comprehension)):
            pairs = [(node.target, node.iter)]
        else:
            continue
        for target, value in pairs:
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found[part.id].append(value)
    return found


__all__ = ["conditions_of"]
