"""DTensor, on real processes, as the oracle of what `set` and `reduce` mean and of what they are lowered to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tcverify.application import apply_pass, load_pass
from tcverify.execution import ProcessGroupPool
from tests.support.dtensor_oracle import Outcome, Transition
from tests.support.dtensor_table import (
    ACROSS,
    ALONE,
    ASCENDING,
    PAGE,
    PAIRS,
    PERMUTED,
    SAME_MESH,
    SINGLE,
    SQUARES,
    TURNED,
    VERSION,
    ascending,
    checked_in,
    lowered,
    meant,
    outputs,
    run_all,
    same,
    table,
)  # fmt: skip

Outcomes = dict[Transition, Outcome]


@pytest.fixture(scope="module")
def dtensor() -> Outcomes:
    return run_all()


def ranks(mesh: str) -> list[int]:
    return [int(rank) for rank in torch.tensor(json.loads(mesh)).flatten()]


@pytest.mark.parametrize("mesh", ASCENDING + SQUARES)
def test_set_and_reduce_mean_what_dtensor_computes(dtensor: Outcomes, mesh: str) -> None:
    for source, target in SINGLE if mesh in ASCENDING else PAIRS:
        t = Transition(mesh, source, target)
        assert dtensor[t].error is None, t
        assert same(meant(t), dtensor[t].results), t


@pytest.mark.parametrize("mesh", PERMUTED + SQUARES + TURNED)
def test_positions_count_on_meshes_of_any_order(dtensor: Outcomes, mesh: str) -> None:
    """The rank at a position holds what DTensor gives the rank at this position of the mesh whose ranks ascend."""
    plain = ascending(mesh)
    known = {t.mesh for t in dtensor}
    if plain not in known:
        plain = next(m for m in ASCENDING if len(ranks(m)) == len(ranks(mesh)))
    relabel = dict(zip(ranks(plain), ranks(mesh), strict=True))
    for source, target in PAIRS if mesh.startswith("[[") else SINGLE:
        expected = dtensor[Transition(plain, source, target)].results
        found = meant(Transition(mesh, source, target))
        assert same(found, {relabel[rank]: result for rank, result in expected.items()}), (source, target)


@pytest.mark.parametrize("mesh", ASCENDING + SQUARES)
def test_what_is_lowered_computes_what_dtensor_computes(dtensor: Outcomes, mesh: str) -> None:
    count = 0
    for source, target in SINGLE if mesh in ASCENDING else PAIRS:
        t = Transition(mesh, source, target)
        pair = lowered(t)
        if pair.declined is None:
            count += 1
            assert pair.rewritten is not None
            assert same(outputs(pair.rewritten), dtensor[t].results), t
    assert count >= (12 if mesh in ASCENDING else 43)


def test_what_is_lowered_computes_it_on_processes_too(
    dtensor: Outcomes, pool: Callable[[int], ProcessGroupPool]
) -> None:
    for mesh in ("[0, 2, 3]", "[[0, 2], [1, 3]]"):
        for source, target in SINGLE if mesh in ASCENDING else PAIRS[::3]:
            t = Transition(mesh, source, target)
            for made in (t.program(), lowered(t).rewritten):
                if made is None:
                    continue
                run = pool(4).run(made)
                assert run.finished, run.why
                found = {result.rank: result.outputs[0] for result in run.ranks if result.outputs}
                assert same(found, dtensor[t].results), t


def test_the_oracle_refutes_another_order_of_ranks(dtensor: Outcomes) -> None:
    """Parts that are divided, or gathered, by number where position counts; and a sum that is off by one."""
    t = Transition("[0, 2, 3]", ("R",), ("S0",))
    assert not same(outputs(replace(t, mesh="[0, 3, 2]").program()), dtensor[t].results)

    gathering = Transition("[2, 0, 1, 3]", ("S0",), ("R",))
    by_number = apply_pass(
        load_pass(f"{PAGE.parent}/gather_in_rank_order.py:gather_in_rank_order"), gathering.program()
    )
    assert by_number.rewritten is not None
    expected = dtensor[replace(gathering, mesh="[0, 1, 2, 3]")].results
    assert same(outputs(gathering.program()), expected)
    assert not same(outputs(by_number.rewritten), expected)

    t = Transition("[0, 1]", ("P",), ("R",))
    off = {rank: result - 1 for rank, result in dtensor[t].results.items()}
    assert not same(outputs(t.program()), off)


def test_dtensor_counts_ranks_by_number(dtensor: Outcomes) -> None:
    """Why meshes that do not ascend are no oracle. When this fails, DTensor has changed, and the page with it."""
    t = Transition("[1, 0]", ("S0",), ("R",))
    assert not same(outputs(t.program()), dtensor[t].results)
    halves = [part for result in dtensor[t].results.values() for part in result.chunk(2)]
    [mine, *_] = outputs(t.program()).values()
    assert torch.equal(torch.cat([halves[1], halves[0]]), mine.to(halves[0].dtype))


def test_dtensor_does_not_go_from_mesh_to_mesh(dtensor: Outcomes) -> None:
    for t in ACROSS:
        outcome = dtensor[t]
        if t.source == t.target:
            assert not outcome.collectives
            assert outcome.results.keys() == set(ranks(t.mesh)), "what should have moved is where it was"
        else:
            assert outcome.error is not None
            assert "Cross device mesh" in outcome.error


def test_every_transition_has_been_run(dtensor: Outcomes) -> None:
    assert set(dtensor) == {*SAME_MESH, *ACROSS, *ALONE}
    assert len(SAME_MESH) == 8 * 12 + 3 * 91


@pytest.mark.skipif(
    VERSION not in checked_in(), reason="the table was made with another torch, which may plan differently"
)
def test_the_table_is_what_running_both_yields(dtensor: Outcomes) -> None:
    assert checked_in() == table(dtensor), "run python benchmarks/dtensor.py --write"
