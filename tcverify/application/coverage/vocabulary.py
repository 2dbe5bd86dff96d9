"""The vocabulary of a pass: ops, numbers, dtypes and metadata keys in the source of its modules. The source is parsed;
nothing is called."""

from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tcverify.application.coverage.recorder import Scope
from tcverify.application.coverage.slicing import conditions_of
from tcverify.ops import qualified_name

#: Largest number of modules that are read: those that define the pass, and those of its packages that these refer to.
MOST_MODULES = 20

#: Largest number of names and of numbers of each kind.
MOST_NAMES = 200


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a pass, in source order.

    Attributes:
        ops: qualified names.
        integers, floats, dtypes: constants in functions.
        keys: strings used as keys, of metadata or anything else.
        conditions: by file and line, the ops and numbers that each condition depends on: those in the condition, in assignments
            to its variables, and in functions of the module that it calls (only ops).
    """

    ops: tuple[str, ...] = ()
    integers: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    dtypes: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    conditions: Mapping[tuple[str, int], tuple[str | float, ...]] = field(default_factory=dict)


def vocabulary_of(scope: Scope) -> Vocabulary:
    """Read the vocabulary of a pass's modules. A module without source adds nothing."""
    found = _Reader()
    for module in _modules(scope):
        found.read(module)
    ops, integers, floats, dtypes, keys = (tuple(list(names)[:MOST_NAMES]) for names in found.kinds)
    return Vocabulary(ops, integers, floats, dtypes, keys, found.conditions)


def _modules(scope: Scope) -> list[types.ModuleType]:
    """The modules that define the pass, and those in its scope of which they use something."""
    by_file: dict[str, types.ModuleType] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        real = scope.of(file) if isinstance(file, str) else None
        if real is not None:
            by_file.setdefault(real, module)
    pending = [by_file[file] for file in scope.files if file in by_file]
    found: dict[str, types.ModuleType] = {}
    while pending and len(found) < MOST_MODULES:
        module = pending.pop(0)
        if module.__name__ in found:
            continue
        found[module.__name__] = module
        for value in list(vars(module).values()):
            owner = (
                value
                if isinstance(value, types.ModuleType)
                else sys.modules.get(getattr(value, "__module__", None) or "")
            )
            if owner is not None and owner in by_file.values():
                pending.append(owner)
    return list(found.values())


class _Reader:
    """Collects names, each once, in order."""

    def __init__(self) -> None:
        self.kinds: tuple[dict[Any, None], ...] = ({}, {}, {}, {}, {})
        self.conditions: dict[tuple[str, int], tuple[str | float, ...]] = {}
        self._ops, self._integers, self._floats, self._dtypes, self._keys = self.kinds

    def read(self, module: types.ModuleType) -> None:
        try:
            tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            return
        names = dict(vars(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                value = _value(node.value, names)
                if value is not None:
                    names.setdefault(node.targets[0].id, value)
        file = os.path.realpath(str(module.__file__))
        for line, expressions, called in conditions_of(tree):
            parts = (part for one in expressions for part in ast.walk(one))
            named = dict.fromkeys(one for part in parts for one in _named(part, names))
            inside = (part for one in called for part in ast.walk(one))
            named.update((one, None) for part in inside for one in _named(part, names) if isinstance(one, str))
            if named:
                self.conditions[file, line] = tuple(named)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self._take(_value(node, names))
            elif isinstance(node, ast.Name):
                self._take(names.get(node.id))
            elif isinstance(node, ast.Constant):
                self._constant(node.value)

    def _take(self, value: Any) -> None:
        for op in _ops_in(value):
            self._ops[op] = None
        if isinstance(value, torch.dtype):
            self._dtypes[str(value).removeprefix("torch.")] = None

    def _constant(self, value: Any) -> None:
        if isinstance(value, str):
            if "::" in value and " " not in value:
                self._ops[value] = None
            elif value.isidentifier():
                self._keys[value] = None
        elif type(value) is int:
            self._integers[value] = None
        elif type(value) is float:
            self._floats[value] = None


def _named(node: ast.AST, names: dict[str, Any]) -> Iterator[str | float]:
    """The ops and numbers that a part of a condition refers to."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        yield node.value
    elif isinstance(node, ast.Name):
        yield from _ops_in(names.get(node.id))
    elif isinstance(node, ast.Attribute):
        yield from _ops_in(_value(node, names))


_SPACES = (types.ModuleType, type(torch.ops), type(torch.ops.aten), torch._ops.OpOverloadPacket)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a dotted name, looked up only through modules and namespaces of ops; None for anything else."""
    if isinstance(node, ast.Name):
        found = names.get(node.id)
        return found if isinstance(found, (*_SPACES, torch._ops.OpOverload)) else None
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        if isinstance(owner, types.ModuleType):
            return vars(owner).get(node.attr)
        if isinstance(owner, _SPACES):
            try:
                return getattr(owner, node.attr)
            except (AttributeError, RuntimeError):
                return None
    return None


def _ops_in(value: Any, depth: int = 2) -> Iterator[str]:
    """The names of the ops that a value is, or contains."""
    if isinstance(value, torch._ops.OpOverload):
        yield qualified_name(value)
    elif isinstance(value, torch._ops.OpOverloadPacket):
        yield from (qualified_name(getattr(value, overload)) for overload in value.overloads())
    elif isinstance(value, types.BuiltinFunctionType):
        name = qualified_name(value)
        if name.startswith("python::"):
            yield name
    elif depth and isinstance(value, (list, tuple)):
        for one in value:
            yield from _ops_in(one, depth - 1)
    elif depth and isinstance(value, (set, frozenset)):  # in an order that is the same in every run
        yield from sorted(name for one in value for name in _ops_in(one, depth - 1))
    elif depth and isinstance(value, dict):
        yield from _ops_in([*value, *value.values()], depth)


__all__ = ["Vocabulary", "vocabulary_of"]
