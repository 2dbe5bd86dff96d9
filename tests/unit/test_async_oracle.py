"""Races that the check of order sees, against all moments at which collectives may read and write."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tcverify.checks.accesses import accesses_of
from tcverify.checks.asynchrony import asynchrony_of
from tests.unit.async_oracle import Move, moves_of, program_of, races


def seen(moves: list[Move]) -> bool:
    return bool(asynchrony_of(accesses_of(program_of(moves), 0)).hazards)


def test_the_oracle_knows_a_race_from_none() -> None:
    sound = [Move("start", 0, 0), Move("wait", 2, 0), Move("relu", 3, 0)]
    assert not races(sound)
    assert races([Move("start", 0, 0), Move("relu", 2, 0), Move("wait", 2, 0)])
    assert races([Move("start", 0, 0), Move("add_", 0, 1), Move("wait", 2, 0)])
    assert not races([Move("start", 0, 0), Move("wait", 2, 0), Move("add_", 0, 1)])


@given(st.binary(min_size=12, max_size=24))
@settings(max_examples=400, deadline=None)
def test_the_check_sees_a_race_exactly_where_moments_matter(data: bytes) -> None:
    moves = moves_of(data)
    assert seen(moves) == races(moves), moves


def test_both_races_and_sound_graphs_are_among_them() -> None:
    chance = random.Random(0)
    found = [races(moves_of(chance.randbytes(18))) for _ in range(200)]
    assert 40 < sum(found) < 160
