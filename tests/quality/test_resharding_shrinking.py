"""Defects of lowerings are reduced to what their cause needs: sizes of counterexamples against known minima."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan
from tcverify.ops import Layout, qualified_name
from tcverify.passes.resharding.host_program import HostProgram
from tcverify.passes.resharding.lowering import ConvertOpToCommunication
from tcverify.program import Contract, PlacedPlan, Program
from tcverify.shrink import reduce
from tcverify.shrink.global_view.reading import plan_of
from tcverify.strategies import RESHARDING_WORLD_SIZES, resharding_programs
from tcverify.strategies.resharding import programs as resharding
from tcverify.verification.verifier import verify

Planted = Callable[[fx.GraphModule], None]


def _named(gm: fx.GraphModule, *names: str) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and qualified_name(n.target) in names]


def _with(node: fx.Node, position: int, value: object) -> None:
    node.args = (*node.args[:position], value, *node.args[position + 1 :])  # type: ignore[assignment]


def ranks_sorted(gm: fx.GraphModule) -> None:
    """Rank numbers, not positions in the mesh, pick shards."""
    for node in _named(gm, "multidevice::set"):
        layout = Layout.parse(str(node.args[2]))
        names = dict(zip(layout.mesh.ranks, sorted(layout.mesh.ranks), strict=True))
        if layout.is_sharded and layout.mesh.ndim == 1:
            relabelled = layout.relabelled([names.get(rank, rank) for rank in range(8)])
            _with(node, 2, str(relabelled))


def sums_become_maxima(gm: fx.GraphModule) -> None:
    for node in _named(gm, "multidevice::reduce"):
        if node.args[2] == "sum":
            _with(node, 2, "max")


def ops_behind_sets_forgotten(gm: fx.GraphModule) -> None:
    """What only computes with the result of a set is taken for a copy."""
    for node in _named(gm, "aten::neg", "aten::abs", "aten::relu"):
        if node.args[0] in _named(gm, "multidevice::set"):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def waits_dropped(gm: fx.GraphModule) -> None:
    """Nobody waits for what is gathered from all."""
    ConvertOpToCommunication()(gm)
    for wait in _named(gm, "host_ir::wait"):
        if wait.args[0] in _named(gm, "host_ir::all_gather"):
            gm.graph.erase_node(wait)


waits_dropped.contract = Contract(inputs="stream0")  # type: ignore[attr-defined]


def teams_turned_round(gm: fx.GraphModule) -> None:
    """What is scattered goes out in the reverse order."""
    ConvertOpToCommunication()(gm)
    for node in _named(gm, "host_ir::scatter"):
        teams = [i for i, value in enumerate(node.args) if isinstance(value, (list, tuple))]
        _with(node, teams[0], list(reversed(node.args[teams[0]])))  # type: ignore[call-overload]


teams_turned_round.contract = Contract(inputs="stream0")  # type: ignore[attr-defined]


def freed_before_the_wait(gm: fx.GraphModule) -> None:
    """An operand is freed as soon as it is posted."""
    HostProgram()(gm)
    for free in _named(gm, "host_ir::deallocate"):
        operand = free.args[0]
        posted = [user for user in operand.users if user.target in _starts(gm)]  # type: ignore[union-attr]
        if posted and posted[-1].args[0] is operand:
            posted[-1].append(free)


freed_before_the_wait.contract = HostProgram().contract  # type: ignore[attr-defined]


def _starts(gm: fx.GraphModule) -> set[object]:
    return {wait.args[0].target for wait in _named(gm, "host_ir::wait")}  # type: ignore[union-attr]


#: Steps of the smallest programs that show the defect, at most, and their ranks. What is freed may be what a step before made,
#: or what the pass itself made of two rows per rank, so that one step is enough.
MINIMA: dict[Planted, tuple[int, int]] = {
    ranks_sorted: (1, 2),
    sums_become_maxima: (1, 2),
    ops_behind_sets_forgotten: (2, 2),
    waits_dropped: (1, 2),
    teams_turned_round: (1, 2),
    freed_before_the_wait: (2, 2),
}


def _refuted(planted: Planted, seed: int) -> Iterator[tuple[Program, str]]:
    """Drawn programs that show the defect, the large ones alone, with what is found."""
    subject, generator = InProcess(prepare_pass(planted, "", {})), random.Random(seed)
    while True:
        size = generator.choice(RESHARDING_WORLD_SIZES)
        program = resharding.plan_of(size, generator.randbytes(resharding.WIDTH)).build()
        if sum(len(graph.nodes) for graph in program.graphs) >= 20:
            verdict = verify(subject, program)
            if verdict.status == "refuted":
                yield program, verdict.findings[0].kind


def _reduced(planted: Planted, program: Program, kind: str) -> tuple[PlacedPlan, float]:
    """What is left of a program, and seconds per trial."""
    subject = InProcess(prepare_pass(planted, "", {}))
    before = time.perf_counter()
    reduction = reduce(program, lambda trial: any(f.kind == kind for f in verify(subject, trial).findings))
    left = plan_of(reduction.program)
    assert left is not None
    return left, (time.perf_counter() - before) / reduction.trials


@pytest.mark.parametrize("planted", MINIMA, ids=lambda p: p.__name__)
def test_a_planted_defect_is_reduced_to_its_cause(planted: Planted) -> None:
    _reaches(planted, 2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("planted", MINIMA, ids=lambda p: p.__name__)
def test_every_planted_defect_is_reduced_to_its_cause_from_many_programs(planted: Planted) -> None:
    """`-s` shows sizes."""
    _reaches(planted, 25, seed=2)


def _reaches(planted: Planted, count: int, seed: int) -> None:
    programs = _refuted(planted, seed)
    for _ in range(count):
        program, kind = next(programs)
        left, seconds = _reduced(planted, program, kind)
        steps = [f"{step.op} {step.layout}" for step in left.steps]
        print(
            f"{planted.__name__:<26} {kind:<16} {1000 * seconds:.0f} ms a trial, left on {left.world_size} ranks: {steps}"
        )
        most, ranks = MINIMA[planted]
        assert 1 <= len(left.steps) <= most
        assert left.world_size == ranks
        assert len(left.outputs) <= 1
        assert max(max(spec.shape, default=1) for spec in left.inputs) <= (4 if planted is freed_before_the_wait else 2)
        assert seconds < 1


def test_a_campaign_ends_at_the_cause(tmp_path: Path) -> None:
    plan = CampaignPlan(
        resharding_programs(), "2 to 6 ranks", tmp_path / "reports", tmp_path / "state", max_examples=300, seed=4,
        shrink_time=600.0, fail_fast=True,
    )  # fmt: skip
    (case,) = Campaign(InProcess(prepare_pass(ranks_sorted, "", {})), plan, None).run().counterexamples
    assert not case.shrink_cut
    assert (case.program.size, case.program.world_size) == (1, 2)
