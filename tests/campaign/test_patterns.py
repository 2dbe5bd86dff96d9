"""Whether a program contains what another one does."""

from __future__ import annotations

import pytest

from tcverify.campaign.patterns import ProgramPattern
from tcverify.program import PARTIAL, InputSpec, Mesh, spmd_program


def pattern(write) -> ProgramPattern:
    inputs = [InputSpec("x", (2, 4), placements=(("tp", PARTIAL),)), InputSpec("y", (2, 4))]

    def build(b):
        return write(b, b.input("x"), b.input("y"))

    return ProgramPattern(spmd_program(Mesh.grid({"tp": 2}), inputs, build))


def reduced(b, x):
    return b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))


def neg(b, x):
    return b.call("aten::neg", x)


def add(b, x, y):
    return b.call("aten::add.Tensor", x, y)


SMALL = pattern(lambda b, x, y: neg(b, reduced(b, x)))


@pytest.mark.parametrize(
    "larger",
    [
        lambda b, x, y: neg(b, reduced(b, x)),
        lambda b, x, y: add(b, neg(b, reduced(b, neg(b, x))), y),
        lambda b, x, y: (neg(b, y), neg(b, reduced(b, y))),
    ],
)
def test_a_program_contains_it_wherever_it_stands(larger):
    assert SMALL.within(pattern(larger))


@pytest.mark.parametrize(
    "other",
    [
        lambda b, x, y: reduced(b, neg(b, x)),  # the other way round
        lambda b, x, y: (neg(b, x), reduced(b, y)),  # apart
        lambda b, x, y: add(b, reduced(b, x), y),  # another op
        lambda b, x, y: neg(b, add(b, reduced(b, x), y)),  # with something between
    ],
)
def test_a_program_does_not_contain_it(other):
    assert not SMALL.within(pattern(other))


def test_operands_have_their_places():
    first = pattern(lambda b, x, y: add(b, neg(b, x), y))
    assert not first.within(pattern(lambda b, x, y: add(b, y, neg(b, x))))


def test_what_is_read_twice_is_read_twice_there():
    twice = pattern(lambda b, x, y: (lambda r: (r, neg(b, r)))(reduced(b, x)))
    assert not twice.within(SMALL)
    assert SMALL.within(twice)


def test_a_program_without_calls_is_contained_in_all():
    empty = pattern(lambda b, x, y: x)
    assert empty.within(SMALL)
    assert not SMALL.within(empty)


def test_many_like_calls_take_no_time():
    def chain(b, x, y):
        for _ in range(60):
            x = add(b, x, x)
        return x

    def other(b, x, y):
        for _ in range(12):
            x = add(b, x, y)
        return neg(b, x)

    assert not pattern(other).within(pattern(chain))
