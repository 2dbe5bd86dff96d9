"""Races that the check of order sees, against all moments at which collectives may read and write."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from tcverify.checks.ordering.accesses import accesses_of
from tcverify.checks.ordering.asynchrony import asynchrony_of
from tcverify.program import Contract
from tcverify.strategies.functional.programs import WIDTH, decode_functional
from tcverify.verification.verifier import verify
from tests.sizes import by_night
from tests.support.async_oracle import Move, moves_of, program_of, races
from tests.support.async_programs import DP2, DP2_TP2


def seen(moves: list[Move]) -> bool:
    return bool(asynchrony_of(accesses_of(program_of(moves), 0)).hazards)


def test_the_oracle_knows_a_race_from_none() -> None:
    sound = [Move("start", 0, 0), Move("wait", 2, 0), Move("relu", 3, 0)]
    assert not races(sound)
    assert races([Move("start", 0, 0), Move("relu", 2, 0), Move("wait", 2, 0)])
    assert races([Move("start", 0, 0), Move("add_", 0, 1), Move("wait", 2, 0)])
    assert not races([Move("start", 0, 0), Move("wait", 2, 0), Move("add_", 0, 1)])


@given(st.binary(min_size=12, max_size=24))
@settings(max_examples=by_night(400, 100), deadline=None)
def test_the_check_sees_a_race_exactly_where_moments_matter(data: bytes) -> None:
    moves = moves_of(data)
    assert seen(moves) == races(moves), moves


def test_both_races_and_sound_graphs_are_among_them() -> None:
    chance = random.Random(0)
    found = [races(moves_of(chance.randbytes(18))) for _ in range(200)]
    assert 40 < sum(found) < 160


class Shuffles:
    """Moves a few calls as far as data allows, whatever else they depend on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        chance = random.Random(self.seed)
        for _ in range(chance.randint(1, 3)):
            nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
            place = chance.randrange(len(nodes))
            node = nodes[place]
            first = max((i for i, other in enumerate(nodes) if other in node.all_input_nodes), default=-1) + 1
            last = min((i for i, other in enumerate(nodes) if node in other.all_input_nodes), default=len(nodes)) - 1
            target = min(max(place + chance.randint(-6, 6), first), last)
            if target < place:
                nodes[target].prepend(node)
            elif target > place:
                nodes[target].append(node)
        gm.recompile()
        return gm


def test_what_lockstep_shows_of_a_shuffled_program_the_check_has_found() -> None:
    promised = Contract(order=True, collective_order=True)
    shown = found = 0
    for seed in range(32):
        mesh = DP2 if seed % 2 else DP2_TP2
        made = decode_functional(mesh, random.Random(seed).randbytes(WIDTH))
        verdict = verify(Shuffles(seed), made, contract=promised)
        checks = {finding.check for finding in verdict.findings}
        found += "order" in checks
        if checks - {"order", "memory"}:
            shown += 1
            assert "order" in checks, (seed, verdict.findings)
    assert 0 < shown < found < 20
