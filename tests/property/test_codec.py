"""Damaged program files: a valid program or one ProgramError, nothing else."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tcverify.errors import ProgramError
from tcverify.program import Program, dumps, loads
from tcverify.strategies import WORLD_SIZES, all_meshes, decode
from tcverify.strategies.choices import WIDTH
from tests.sizes import by_night

EXAMPLES = settings(
    max_examples=by_night(400, 100), database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

#: What a value is replaced by: other types, edges of ranges, the file's own vocabulary in the wrong place.
_STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 1 << 31, 1 << 63, -(1 << 63), 10**30, 0.5, -0.0, 1e308, "", "x", "rank", "tp",
    "all_reduce", "float32", "python::getitem", "aten::add.Tensor", "os::system", "placeholder", "output", "call_function",
    [], {}, [[]], [0],
    [None], {"node": "x"}, {"node": None}, {"rank_constant": "tp"}, {"tuple": []}, {"dict": [["a", 1]]}, {"slice": [1, 2, 3]},
    {"scalar": {"float": "nan"}}, {"shape": [1], "stride": [1], "dtype": "int8"}, {"tuple": [{"node": "x"}]}, "\x00",
    "é", "a" * 1001,
)  # fmt: skip


@cache
def texts() -> tuple[str, ...]:
    generator = random.Random(0)
    meshes = [mesh for size in WORLD_SIZES for mesh in all_meshes(size)]
    programs = [decode(generator.choice(meshes), generator.randbytes(WIDTH)) for _ in range(12)]
    return tuple(sorted((dumps(program) for program in programs), key=len))


def read(text: str | bytes) -> Program | None:
    """Return the program, which must then be whole, or None where it is refused by name."""
    try:
        program = loads(text, "damaged.json")
    except ProgramError as error:
        return None if "damaged.json" in error.message else pytest.fail(f"names no file: {error}")
    assert dumps(loads(dumps(program))) == dumps(program)
    return program


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of JSON data, in order, without recursion."""
    found: list[tuple[Any, Any]] = []
    queue = [data]
    while queue:
        container = queue.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], (dict, list)):
                queue.append(container[key])
    return found


@EXAMPLES
@given(
    number=st.integers(0, 11),
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_bytes_replaced(number: int, edits: list[tuple[int, int]]) -> None:
    damaged = bytearray(texts()[number].encode())
    for position, byte in edits:
        damaged[position % len(damaged)] = byte
    read(bytes(damaged))


@EXAMPLES
@given(number=st.integers(0, 11), start=st.integers(0, 1 << 20), length=st.integers(1, 200))
def test_bytes_cut_out(number: int, start: int, length: int) -> None:
    text = texts()[number].encode()
    start %= len(text)
    read(text[:start] + text[start + length :])


@EXAMPLES
@given(
    number=st.integers(0, 11),
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, len(_STRANGE) - 1)), min_size=1, max_size=3),
)
def test_values_replaced(number: int, edits: list[tuple[int, int]]) -> None:
    data = json.loads(texts()[number])
    for place, choice in edits:
        found = places(data)
        container, key = found[place % len(found)]
        container[key] = json.loads(json.dumps(_STRANGE[choice]))
    read(json.dumps(data))


@EXAMPLES
@given(number=st.integers(0, 11), first=st.integers(0, 1 << 20), second=st.integers(0, 1 << 20), drop=st.booleans())
def test_values_exchanged_or_dropped(number: int, first: int, second: int, drop: bool) -> None:
    data = json.loads(texts()[number])
    found = places(data)
    container, key = found[first % len(found)]
    if drop:
        del container[key]
    else:
        container[key] = json.loads(json.dumps(found[second % len(found)][0]))
    read(json.dumps(data))


@EXAMPLES
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=10))
def test_other_json(data: Any) -> None:
    assert read(json.dumps(data)) is None
