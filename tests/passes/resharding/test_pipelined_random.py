"""Pipelined matmuls in programs drawn at random: they hold, and all ranks agree on what is pipelined."""

from __future__ import annotations

import random

import pytest

from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.passes.resharding.pipelined.gather import GATHER_FORMS
from tcverify.passes.resharding.pipelined.scatter import SCATTER_FORMS
from tcverify.program import Mesh
from tcverify.strategies.resharding.programs import RESHARDING_WORLD_SIZES, WIDTH, decode_resharding
from tcverify.verification.verifier import verify


def tried(count: int, seed: int) -> dict[str, int]:
    """Verify the pass, with options at random, on programs that it changes. Returns how often it was what."""
    draw, found = random.Random(seed), {"changed": 0, "declined": 0, "left": 0}
    for number in range(count):
        program = decode_resharding(Mesh.grid({"dp": draw.choice(RESHARDING_WORLD_SIZES)}), draw.randbytes(WIDTH))
        pass_ = PipelinedMatmul(
            form=draw.choice(GATHER_FORMS),
            reduce_form=draw.choice(SCATTER_FORMS),
            number_of_streams=draw.randint(1, 4),
            sync_streams=draw.random() < 0.3,
        )
        if not any("stream_axis" in node.meta for graph in program.graphs for node in graph.nodes):
            continue
        verdict = verify(pass_, program, domain="exact" if number % 2 else "float64")
        reasons = [doubt.reason for doubt in verdict.doubts]
        assert verdict.status == "passed" or reasons == ["declined"], [found.title for found in verdict.findings]
        found["declined" if reasons else "changed" if verdict.changed else "left"] += 1
    return found


def test_programs_at_random() -> None:
    found = tried(160, seed=1)
    assert found["changed"] >= 8
    assert found["declined"] <= found["changed"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_programs_at_random(seed: int) -> None:
    found = tried(1000, seed=100 + seed)
    assert found["changed"] >= 50
