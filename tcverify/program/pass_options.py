"""Options of a pass that belong to a program: data, so that drawn combinations are saved and shrunk with the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from tcverify.errors import ProgramError

#: Types of options.
Value: TypeAlias = "bool | int | float | str | tuple[Value, ...] | None"
#: Options by name.
Options: TypeAlias = "Mapping[str, Value]"

#: Largest number of options of a program, and of values in a tuple: more is a mistake.
MAX_OPTIONS = 64


def check_options(options: Options) -> None:
    """Raise `ProgramError` for options that a file cannot hold."""
    if len(options) > MAX_OPTIONS:
        raise ProgramError(f"a program has {len(options)} options; at most {MAX_OPTIONS} are read")
    for name, value in options.items():
        if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
            raise ProgramError(f"{name!r:.60} cannot name an option", "use Python identifiers, with dots between them")
        _check(name, value)


def _check(name: str, value: Value, depth: int = 0) -> None:
    if isinstance(value, tuple) and depth < 2 and len(value) <= MAX_OPTIONS:
        for one in value:
            _check(name, one, depth + 1)
        return
    plain = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    if not plain or len(str(value)) > 1000:
        raise ProgramError(
            f"option '{name}' is {value!r:.60}", "it can be a text, a number, true, false, none or a tuple of such"
        )


def read_options(data: object) -> Options:
    """Read options from parsed JSON. Raises `ProgramError`."""
    if not isinstance(data, dict):
        raise ProgramError("the options are not an object")
    return {name: _tuples(value) for name, value in data.items()}


def _tuples(value: object) -> Value:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value  # type: ignore[return-value]


__all__ = ["Options", "Value", "check_options", "read_options"]
