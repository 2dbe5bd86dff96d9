"""What has been verified is forgotten: in a campaign of a night, what keeps one graph keeps them all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given, seed, settings
from torch import fx

from tcverify import verify
from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.checks.ordering import collective_calls
from tcverify.ops import Op
from tcverify.passes import BUILTIN, SUITED
from tcverify.program import Program
from tcverify.strategies import DEFAULT_STRATEGY, programs_of
from tests.mutants.sequence_parallel import ResidualNotSliced
from tests.sizes import by_night


def kept_after(subject: object, strategy: str, examples: int) -> tuple[int, int]:
    """Verify programs, and return how many graphs were drawn, and how many of them and of what was made of them live on."""
    gc.collect()
    gc.freeze()  # what was there before is none of it, and takes long to look through
    drawn: list[weakref.ref[fx.Graph]] = []
    made: list[weakref.ref[fx.Graph]] = []

    @seed(1)
    @settings(SETTINGS, max_examples=examples)
    @given(programs_of(strategy, world_size=2))
    def look(program: Program) -> None:
        verdict = verify(subject, program, domain="exact", deep=True)
        drawn.extend(map(weakref.ref, program.graphs))
        if verdict.pair.rewritten is not None:
            made.extend(map(weakref.ref, verdict.pair.rewritten.graphs))

    look()
    gc.collect()
    gc.unfreeze()
    return len(drawn), sum(one() is not None for one in (*drawn, *made))


@pytest.mark.parametrize("name", BUILTIN)
def test_no_graph_outlives_its_verification(name: str) -> None:
    drawn, kept = kept_after(BUILTIN[name](), SUITED.get(name, DEFAULT_STRATEGY), by_night(4, 2))
    assert drawn >= 2
    assert kept == 0


def test_no_graph_outlives_its_refutation() -> None:
    assert kept_after(ResidualNotSliced(), "structured", 12)[1] == 0


def test_a_memo_whose_values_hold_its_keys_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    memo: weakref.WeakKeyDictionary[fx.Graph, list[fx.Node]] = weakref.WeakKeyDictionary()
    real = collective_calls._calling

    def remembers(graph: fx.Graph) -> Iterator[tuple[fx.Node, Op]]:
        memo[graph] = list(graph.nodes)
        return real(graph)

    monkeypatch.setattr(collective_calls, "_calling", remembers)
    drawn, alive = kept_after(BUILTIN["sequence_parallel"](), "structured", 6)
    assert alive > drawn >= 6
