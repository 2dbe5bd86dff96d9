"""Programs whose arguments are written in other ways compute what they did."""

from __future__ import annotations

import random

import pytest
import torch

from tcverify.execution import Lockstep
from tcverify.program import Mesh
from tcverify.strategies import DECODERS
from tcverify.strategies.argument_forms import LABEL, with_argument_forms

MESH = Mesh.grid({"dp": 2, "tp": 2})


@pytest.mark.parametrize("name", DECODERS)
def test_results_are_the_same_bit_by_bit(name: str) -> None:
    decoder, rng = DECODERS[name], random.Random(3)
    rewritten = 0
    for how in range(16):
        choices = rng.randbytes(decoder.width)
        plain = decoder.decode(MESH, choices)
        other = with_argument_forms(decoder.decode(MESH, choices), 4 * how + 3)
        rewritten += LABEL in other.labels
        for a, b in zip(Lockstep().run(plain).ranks, Lockstep().run(other).ranks, strict=True):
            torch.testing.assert_close(b.outputs, a.outputs, rtol=0, atol=0, equal_nan=True)
    assert rewritten


def test_most_programs_are_left_as_they_are() -> None:
    decoder = DECODERS["functional"]
    for how in (0, 1, 2, 4):
        program = decoder.decode(MESH, bytes(range(decoder.width % 256)))
        before = [str(graph) for graph in program.graphs]
        assert with_argument_forms(program, how) is program
        assert [str(graph) for graph in program.graphs] == before
