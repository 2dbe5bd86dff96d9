"""Happens-before against a comparison of all pairs of accesses, on random graphs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tcverify import Contract
from tcverify.checks.streams.anchors import is_lowered, reading_of
from tcverify.checks.streams.races import Race, clocks_of, races_of
from tcverify.checks.streams.reading import BEGINNING, StreamReading
from tcverify.program.finding import Finding
from tests.support.lowered import judge, program
from tests.support.stream_oracle import opinion, random_graph


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_it_agrees_with_a_comparison_of_all_pairs(seed: int) -> None:
    """600 random graphs per seed: sound ones, and ones with a race, a mismatch or a conflict."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(600):
        made = program(lambda b: random_graph(b, rng))
        contract = Contract(boundary=rng.choice(["strict", "lenient"]), inputs=rng.choice(["ready", "stream0"]))
        graph = made.graphs[0]
        if not is_lowered(graph):
            continue
        expected = opinion(graph, stream0=contract.inputs == "stream0", lenient=contract.boundary == "lenient")
        reading = reading_of(made, 0)
        found = {
            (reading.ops[r.first].name if r.first != BEGINNING else "<inputs>", _second(reading, r))
            for r in races_of(reading, clocks_of(reading), contract)
        }
        assert found <= expected.races, graph
        assert bool(found) == bool(expected.races), graph
        reported = judge("happens-before", made, boundary=contract.boundary, inputs=contract.inputs)
        says = {f.kind for f in reported if isinstance(f, Finding)}
        wrong = {"race": expected.races, "stream-conflict": expected.conflicts, "anchor-mismatch": expected.mismatch}
        assert says == {
            kind for kind, shown in {**wrong, "unordered-collectives": expected.unordered}.items() if shown
        }, graph
        seen.update(says or {"sound"})
    every = ("sound", "race", "stream-conflict", "anchor-mismatch", "unordered-collectives")
    assert min(seen[kind] for kind in every) > 10


def _second(reading: StreamReading, race: Race) -> str:
    return reading.ops[race.second].name if race.second is not None else "output"
