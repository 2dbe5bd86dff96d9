"""Findings in asynchronous programs are reduced to what their cause needs: sizes of counterexamples against known minima."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan
from tcverify.cases.counterexample import Counterexample
from tcverify.ops import lookup, qualified_name, resolve
from tcverify.program import Contract
from tcverify.strategies import WORLD_SIZES, functional_programs

Planted = Callable[[fx.GraphModule], None]


def _named(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and qualified_name(n.target).split("::")[1] == name]


def waits_sunk_past_writes(gm: fx.GraphModule) -> None:
    """Each wait right in front of what reads it first; that something writes into what the collective reads is forgotten."""
    places = {node: i for i, node in enumerate(gm.graph.nodes)}
    for wait in reversed(_named(gm, "wait_tensor")):
        first = min(wait.users, key=places.__getitem__, default=None)
        if first is not None:
            first.prepend(wait)


def waits_dropped(gm: fx.GraphModule) -> None:
    for wait in _named(gm, "wait_tensor"):
        wait.replace_all_uses_with(wait.args[0])
        gm.graph.erase_node(wait)


def reduced_in_place(gm: fx.GraphModule) -> None:
    """No new tensor for the sum, whoever else reads the operand."""
    for node in _named(gm, "all_reduce"):
        if "_c10d_functional" in str(node.target):
            node.target = resolve("_c10d_functional::all_reduce_")


def items_turned_round(gm: fx.GraphModule) -> None:
    """The results of a coalesced call in reverse."""
    for node in _named(gm, "all_reduce_coalesced"):
        if len({value.shape for value in node.meta["val"]}) == 1:
            for item in list(node.users):
                item.args = (node, len(node.args[0]) - 1 - item.args[1])


items_turned_round.contract = Contract(metadata=False)  # type: ignore[attr-defined]


def received_before_sent(gm: fx.GraphModule) -> None:
    """Every receive as early as it can be, in front of sends."""
    for node in _named(gm, "recv"):
        sends = [n for n in _named(gm, "send") if n.args[0] is node.args[0]]
        if sends:
            sends[0].prepend(node)


def smallest_first(gm: fx.GraphModule) -> None:
    """Of two starts side by side the one of fewer elements on this rank first."""
    for node in list(gm.graph.nodes):
        later = node.next
        if not all(n.op == "call_function" and lookup(n.target).phase == "start" for n in (node, later)):
            continue
        mine, theirs = (n.args[0].meta["val"] if isinstance(n.args[0], fx.Node) else None for n in (node, later))
        if mine is not None and theirs is not None and theirs.numel() < mine.numel() and later.args[0] is not node:
            later.append(node)


#: Compute nodes of the smallest program that shows the defect, by kind of finding.
MINIMA: dict[Planted, dict[str, int]] = {
    # a collective, its wait, and a write into what it reads; or two waits, one of which is declared to come behind the other
    waits_sunk_past_writes: {"async-race": 3, "broken-order": 2},
    # a collective and its wait; besides, somebody who touches what is under way
    waits_dropped: {"missing-wait": 2, "async-race": 2},
    # a collective and its wait; besides, another call that reads the operand in between
    reduced_in_place: {"wrong-value": 2, "async-race": 3},
    # a coalesced call of two, and the waits for both
    items_turned_round: {"wrong-value": 3},
    # a send and a receive
    received_before_sent: {"deadlock": 2},
    # two collectives and their waits; for ranks to disagree, besides, a collective between the two on some ranks
    smallest_first: {"broken-order": 4, "collective-mismatch": 6},
}


def _found(planted: Planted, seed: int, directory: Path) -> tuple[Counterexample, int]:
    world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
    plan = CampaignPlan(
        functional_programs(world_size=world_size), f"{world_size} ranks", directory / f"reports-{seed}",
        directory / f"state-{seed}", max_examples=1000, seed=seed, shrink_time=600.0, fail_fast=True,
    )  # fmt: skip
    finished = Campaign(InProcess(prepare_pass(planted, "", {})), plan, None).run()
    (case,) = finished.counterexamples
    assert not case.shrink_cut
    return case, finished.statistics.shrinking


@pytest.mark.parametrize("planted", [waits_sunk_past_writes, reduced_in_place], ids=lambda p: p.__name__)
def test_a_planted_defect_is_reduced_to_its_cause(planted: Planted, tmp_path: Path) -> None:
    _reaches(planted, range(2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("planted", MINIMA, ids=lambda p: p.__name__)
def test_every_planted_defect_is_reduced_to_its_cause(planted: Planted, tmp_path: Path) -> None:
    """`-s` shows sizes."""
    _reaches(planted, range(6), tmp_path)


def _reaches(planted: Planted, seeds: range, directory: Path) -> None:
    above = []
    for seed in seeds:
        case, trials = _found(planted, seed, directory)
        minimum = MINIMA[planted][case.finding.kind]
        above.append(case.program.size - minimum)
        print(f"{planted.__name__:<24} minimum {minimum}, reduced to {case.program.size} in {trials} trials")
    assert min(above) == statistics.median_low(above) == 0
    assert max(above) <= 2
