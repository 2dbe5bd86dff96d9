"""Programs whose metadata is missing or wrong run as ever, and only where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tcverify import Contract, verify
from tcverify.campaign.drawing import draw
from tcverify.execution import Lockstep
from tcverify.passes import Identity
from tcverify.program import Program
from tcverify.registry.choices import HostileName
from tcverify.strategies.hostile import spoil
from tcverify.workers import DrawPlan
from tests.support.programs import reduce_then_norm


def differing(program: Program) -> list[str]:
    """Nodes whose metadata is not what it is without hostility."""
    pairs = zip(reduce_then_norm().graphs[0].nodes, program.graphs[0].nodes, strict=True)
    return [b.name for a, b in pairs if b.op == "call_function" and a.meta.get("val") != b.meta.get("val")]


@pytest.mark.parametrize(
    ("how", "names", "label"),
    [
        (0, [], None),
        (1, ["rms_norm"], "missing-metadata"),
        (2, ["all_reduce", "rms_norm"], "missing-metadata"),
        (3, ["rms_norm"], "stale-metadata"),
        (4, ["rms_norm"], "stale-metadata"),
        (5, ["rms_norm"], "stale-metadata"),
    ],
)
def test_metadata_is_missing_or_wrong_and_all_else_is_as_it_was(how: int, names: list[str], label: str | None) -> None:
    program = spoil(reduce_then_norm(), how, 1)
    assert differing(program) == names
    assert set(program.labels) - set(reduce_then_norm().labels) == ({label} if label is not None else set())
    shapes = [
        node.meta["val"].shape
        for one in (reduce_then_norm(), program)
        for node in one.graphs[0].nodes
        if node.name == "rms_norm" and "val" in node.meta
    ]
    assert how < 3 or (shapes[0] == shapes[1]) == (how == 3)
    plain, spoiled = (Lockstep().run(one).ranks[0].outputs for one in (reduce_then_norm(), program))
    assert all(a.equal(b) for a, b in zip(plain, spoiled, strict=True))
    assert verify(Identity(), program, contract=Contract(strict=True)).status == "passed"


def test_campaigns_draw_them_where_they_are_asked_for() -> None:
    spoiled = {"missing-metadata", "stale-metadata"}

    def labels(hostile: Sequence[HostileName]) -> set[str]:
        found: set[str] = set()

        def note(program: Program) -> bool:
            found.update(program.labels)
            return True

        draw(DrawPlan("near-miss", 2, hostile=hostile).programs(), 1, 60, note)
        return found & spoiled

    assert (labels(()), labels(("metadata",))) == (set(), spoiled)
