"""Aimed programs: every pattern fires as it stands, and every twist is reached and leaves a program that runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tcverify.execution import Lockstep
from tcverify.passes import SequenceParallel
from tcverify.program import Mesh, Program
from tcverify.strategies import DECODERS
from tcverify.strategies.choices import decode_choices, encode_choices
from tcverify.strategies.transformer.aimed import FIELDS, PATTERNS, Aim, aim_at
from tcverify.strategies.transformer.twists import TWISTS

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})
SIMPLEST = {name: table[0] for name, table in FIELDS.items()}


def aimed(mesh: Mesh = TP2, batch: int = 2, **fields: Any) -> Program:
    setting, _ = decode_choices(encode_choices({"sequence": (2, 0), "layout": "bsh", "batch": batch}, []))
    return aim_at(mesh, setting, Aim(**{**SIMPLEST, **fields}))


def fired(program: Program) -> set[str]:
    pass_ = SequenceParallel()
    pass_(program.graph_module(0))
    return {pattern for pattern, count in pass_.rewrites.items() if count}


def test_the_table_is_in_the_order_of_the_record() -> None:
    assert [f.name for f in fields(Aim)] == list(FIELDS)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_fires(pattern: str, swapped: bool) -> None:
    program = aimed(batch=1, pattern=pattern, swapped=swapped)
    assert pattern in program.labels
    assert set(pattern.split("-")) & {"P1", "P2", "P3"} <= fired(program)


@pytest.mark.parametrize("residual", ["input", "gathered", "reduced"])
def test_residuals_that_can_be_had_as_a_shard(residual: str) -> None:
    assert fired(aimed(pattern="P2", residual=residual)) == {"P2"}


def test_a_residual_that_differs_between_the_ranks() -> None:
    assert fired(aimed(pattern="P2", residual="varying")) == set()


@pytest.mark.parametrize("twist", TWISTS)
def test_every_way_of_a_twist_runs(twist: str) -> None:
    patterns = list(PATTERNS)
    reached = 0
    for how in range(16):
        after = ("rest", "skip", "nothing")[how % 3]
        pattern = patterns[how % len(patterns)]
        program = aimed(GRID, pattern=pattern, twist=twist, how=how, stop=how, after=after)
        reached += twist in program.labels
        run = Lockstep().run(program)
        assert run.finished, run.hang or run.mismatch or run.error
    assert reached >= 8


def test_what_stands_behind_a_twist() -> None:
    sizes = {
        after: aimed(pattern="P3", twist="elementwise", stop=1, after=after).size
        for after in ("rest", "skip", "nothing")
    }
    assert sizes == {"rest": 4, "skip": 3, "nothing": 2}


def test_a_twist_takes_the_pattern_out_of_reach() -> None:
    assert fired(aimed(pattern="P3", twist="elementwise", stop=1)) == set()
    assert fired(aimed(pattern="P3", twist="elementwise", stop=3)) == {"P3"}


def test_no_choices_give_a_norm_behind_an_all_reduce() -> None:
    program = DECODERS["aimed"].decode(TP2, b"")
    assert [n.name for n in program.graphs[0].nodes if n.op == "call_function"] == ["all_reduce", "rms_norm"]
