"""Planted defects in the lowering of resharding are refuted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tcverify.ops import Resharding
from tcverify.passes.resharding.decisions import PostedCommunication, ReshardingPlan, plan_resharding
from tcverify.passes.resharding.lowering import ConvertOpToCommunication
from tcverify.program import Program
from tcverify.program.global_view.builder import PlacedBuilder
from tcverify.verification.verifier import verify


def one(
    source: str, target: str, shape: Sequence[int] = (12, 12), *, dim: int | None = None, op: str = "sum"
) -> Program:
    """A program of one set or reduce."""
    b = PlacedBuilder(4)
    x = b.input("x", shape, source)
    y = b.set(x, target) if dim is None else b.reduce(x, dim, target, op)
    return b.build(b.call("aten::add.Tensor", y, y))


def lowered_soundly(program: Program) -> bool:
    return verify(ConvertOpToCommunication(), program).status == "passed"


Change = Callable[[ReshardingPlan, Resharding, int], ReshardingPlan]


def _each(change: Callable[[PostedCommunication], PostedCommunication]) -> Change:
    return lambda found, made, rank: replace(found, communications=tuple(change(c) for c in found.communications))


DEFECTS: dict[str, tuple[Program, Change]] = {
    "shards counted by rank": (
        one("[1, 0, 2] shard(0)", "[1, 0, 2] replicated"),
        _each(lambda c: replace(c, team=tuple(sorted(c.team)))),
    ),
    "the axis counted in the result": (
        one("[0, 1] shard(0)", "[0, 1] shard(1)", (4, 1, 4), dim=0),
        _each(lambda c: replace(c, axis=c.axis and c.axis - 1)),
    ),
    "a receiver forgotten": (
        one("[1, 2] shard(0)", "[0, 2] replicated"),
        lambda found, made, rank: replace(found, communications=found.communications[:1]),
    ),
    "a sender that does not send": (
        one("[1, 2] shard(0)", "[0, 1] shard(0)"),
        lambda found, made, rank: replace(found, communications=() if rank == 2 else found.communications),
    ),
    "another sender scatters": (
        one("[2, 0] replicated", "[1, 3] shard(0)"),
        lambda found, made, rank: plan_resharding(made, 0 if rank == 2 else rank, torch.float32),
    ),
    "an average over a joined root": (
        one("[0, 1] shard(0)", "[2] replicated", (2, 4), dim=0, op="avg"),
        lambda found, made, rank: replace(found, divisor=3 if found.divisor == 2 else 1),
    ),
    "a chunk of another position": (
        one("[1, 0] replicated", "[1, 0] shard(0)"),
        lambda found, made, rank: plan_resharding(made, 1 - rank, torch.float32),
    ),
    "dims of an all_to_all exchanged": (
        one("[0, 1] shard(0)", "[0, 1] shard(1)", (4, 4)),
        _each(lambda c: replace(c, axis=c.split, split=c.axis)),
    ),
}


@pytest.mark.parametrize("name", list(DEFECTS))
def test_planted_defects_are_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, change = DEFECTS[name]
    assert lowered_soundly(program)

    def defective(made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
        return change(plan_resharding(made, rank, dtype), made, rank)

    monkeypatch.setattr("tcverify.passes.resharding.lowering.plan_resharding", defective)
    assert verify(ConvertOpToCommunication(), program).status == "refuted"


@pytest.mark.parametrize(("op", "wrong"), [("max", torch.finfo(torch.float32).tiny), ("min", 0.0), ("product", 0)])
def test_a_wrong_identity_is_refuted(op: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    b = PlacedBuilder(3)
    x = b.input("x", (2, 4), "[0, 1] shard(0)")
    signed = b.call("aten::exp", x)
    program = b.build(b.reduce(b.call("aten::neg", signed) if op == "max" else signed, 0, "[2] replicated", op))
    assert lowered_soundly(program)
    monkeypatch.setattr("tcverify.passes.resharding.lowering.identity", lambda op, dtype: wrong)
    assert verify(ConvertOpToCommunication(), program).status == "refuted"
