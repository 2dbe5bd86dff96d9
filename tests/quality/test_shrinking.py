"""Findings are reduced to what their cause needs: sizes of counterexamples against known minima.

Sizes count compute nodes; `-s` shows them. By default a few mutants run; `pytest -m slow tests/quality` runs all of them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan
from tcverify.ops import qualified_name
from tcverify.program import Program
from tcverify.shrink import reduce
from tcverify.strategies import (
    WORLD_SIZES,
    all_meshes,
    decode,
    mixed_programs,
    moe_programs,
    overlap_programs,
    transformer_programs,
)
from tests.mutants.catalogue import MUTANTS, Drawn

#: Compute nodes of the smallest program that shows a mutant's defect. Left out are mutants that show it in patterns of different
#: sizes, or as kinds of finding with different minima: a program that shows the one is not made into one that shows the other.
MINIMA = {
    # all_reduce, norm
    "BatchScattered": 2,
    "OutputNotGathered": 2,
    "GatherOrderLost": 2,
    "GatherSkippedOnFirstRank": 2,
    "AllReduceErasedOnFirstRank": 2,
    "IndivisibleTokensAccepted": 2,
    # all_reduce, add_rms_norm2
    "TupleLeftLocal": 2,
    # all_reduce, add, norm: the norm adds the residual once more
    "ResidualAddedTwice": 3,
    # all_reduce, view, norm
    "ViewKeepsAllTokens": 3,
    "ViewMergesTokens": 3,
    # one value summed over two groups, and a norm of each sum
    "OneScatterForAllGroups": 4,
}

#: The same for multistream scheduling. A graph is lowered when two ops at least can run side by side, unless the guard is lost.
STREAM_MINIMA = {
    # any op
    "GuardInverted": 1,
    "NoGuard": 1,
    # a collective beside compute
    "OutputsNotJoined": 2,
    "JoinErasedAsDead": 2,
    "WaitNamesMainStream": 2,
    "RecordNamesMainStream": 2,
    "RecordedWhereNeeded": 2,
    "CommunicationIsFree": 2,
    "CheapOpsAreFree": 2,
    "OverheadForgotten": 2,
    "WaitsShareStorage": 2,
    "TokensLookLikeValues": 2,
    # the same, one of them writing into an input
    "WritesIntoInputsNotJoined": 2,
    "WrittenOperandGated": 2,
    # a collective beside compute, both reading one input
    "WaitSharedByReaders": 2,
    # two compute streams
    "ResourcesShared": 2,
    "FusedOpTakesOneResource": 2,
    # an op, one that follows it on another stream, and one beside them
    "FirstWaitLost": 3,
    "ListDependencyUntracked": 3,
    "WriteAfterReadUntracked": 3,
    "WritesUnknown": 3,
    # two ops of one stream, and one of another
    "PreviousOpRecorded": 3,
    "TokenSharedByCollectives": 3,
    "OldMakespanDeclared": 3,
    # two collectives, and compute beside the second
    "CollectivesUnordered": 3,
    "FusedOpUnordered": 3,
    # an op, a view, one that follows on another stream, and one beside them
    "ViewDependencyUntracked": 4,
    "GateBehindAView": 4,
}

#: The same for experts on local tokens, and attention that is sliced.
EXPERT_MINIMA = {
    # all_reduce, norm, gating, routing and the way back
    "RowsLeftByExpert": 5,
    "ChoicesOfFirstRank": 5,
    "GateOnAllTokens": 5,
    # all_reduce, a sum that stays local, attention, its projection, and the sum of both
    "FirstChunkOfAttention": 5,
}

SEEDS = range(6)

#: Mutants of the default tests, with two seeds each.
CHOSEN = ("GatherOrderLost", "ViewKeepsAllTokens", "ResidualAddedTwice")
CHOSEN_STREAMS = ("WrittenOperandGated", "WaitSharedByReaders", "OldMakespanDeclared")


def _found(name: str, seed: int, directory: Path, drawn: Drawn) -> tuple[Program, int]:
    """The program of the first counterexample, and trials that it took to reduce it to it."""
    world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
    plan = CampaignPlan(
        drawn(world_size=world_size),
        f"{world_size} ranks",
        directory / f"reports-{seed}",
        directory / f"state-{seed}",
        max_examples=1000,
        seed=seed,
        shrink_time=600.0,
        fail_fast=True,
    )
    finished = Campaign(InProcess(prepare_pass(MUTANTS[name], "", {})), plan, None).run()
    (case,) = finished.counterexamples
    assert not case.shrink_cut
    return case.program, finished.statistics.shrinking


def _reaches_the_minimum(
    name: str, minimum: int, seeds: range, directory: Path, drawn: Drawn = transformer_programs
) -> list[Program]:
    programs, trials = zip(*(_found(name, seed, directory, drawn) for seed in seeds), strict=True)
    sizes = [program.size for program in programs]
    print(f"{name:<28} minimum {minimum}, reduced to {sizes} in {list(trials)} trials")
    assert min(sizes) == statistics.median(sizes) == minimum
    assert max(sizes) <= minimum + 2
    return list(programs)


def _reads_easily(program: Program) -> bool:
    """Whether what a program says of time is plain: costs of one digit, no device, and no overhead but one microsecond."""
    costs = [n.meta["cost_s"] for graph in program.graphs for n in graph.nodes if "cost_s" in n.meta]
    settings = program.streams
    if settings is not None and (settings.device is not None or settings.sync_overhead_s not in (0.0, 1e-6)):
        return False
    return all(cost == float(f"{cost:.0e}") for cost in costs)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_mutant_is_reduced_to_its_cause(name: str, tmp_path: Path) -> None:
    _reaches_the_minimum(name, MINIMA[name], range(2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIMA)
def test_every_mutant_is_reduced_to_its_cause(name: str, tmp_path: Path) -> None:
    _reaches_the_minimum(name, MINIMA[name], SEEDS, tmp_path)


def test_a_mutant_of_experts_is_reduced_to_its_cause(tmp_path: Path) -> None:
    _reaches_the_minimum("RowsLeftByExpert", EXPERT_MINIMA["RowsLeftByExpert"], range(2), tmp_path, moe_programs)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_MINIMA)
def test_every_mutant_of_experts_is_reduced_to_its_cause(name: str, tmp_path: Path) -> None:
    _reaches_the_minimum(name, EXPERT_MINIMA[name], SEEDS, tmp_path, moe_programs)


@pytest.mark.parametrize("name", CHOSEN_STREAMS)
def test_a_mutant_of_scheduling_is_reduced_to_its_cause(name: str, tmp_path: Path) -> None:
    found = _reaches_the_minimum(name, STREAM_MINIMA[name], range(3, 5), tmp_path, overlap_programs)
    assert all(map(_reads_easily, found))


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [overlap_programs, mixed_programs], ids=["overlap", "mixed"])
@pytest.mark.parametrize("name", STREAM_MINIMA)
def test_every_mutant_of_scheduling_is_reduced_to_its_cause(name: str, drawn: Drawn, tmp_path: Path) -> None:
    found = _reaches_the_minimum(name, STREAM_MINIMA[name], SEEDS, tmp_path, drawn)
    assert sum(map(_reads_easily, found)) > len(found) / 2


# ----------------------------------------------------------------------------------------------------------- predicates


def _calls(program: Program, op: str) -> list[fx.Node]:
    return [
        node
        for graph in program.graphs
        for node in graph.nodes
        if node.op == "call_function" and qualified_name(node.target) == f"tensor_cast::{op}"
    ]


def _is(node: object, *ops: str) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return qualified_name(node.target) in ops


def _name(node: fx.Node) -> str:
    return qualified_name(node.target) if node.op == "call_function" else node.op


def reduced_then_normed(program: Program) -> bool:
    return any(_is(node.args[0], "tensor_cast::all_reduce") for node in _calls(program, "rms_norm"))


def reduced_then_added_and_normed(program: Program) -> bool:
    return any(_is(node.args[0], "tensor_cast::all_reduce") for node in _calls(program, "add_rms_norm"))


def region_between(program: Program) -> bool:
    marker = "tensor_cast::_internal_mark_region_begin"
    return any(
        _is(node.args[0], marker) and _is(node.args[0].args[0], "tensor_cast::all_reduce")  # type: ignore[union-attr]
        for node in _calls(program, "rms_norm")
    )


def normed_twins(program: Program) -> bool:
    """One value is summed over two groups of more than one rank, and a norm reads each sum."""
    found: dict[object, set[tuple[int, ...]]] = {}
    for norm in _calls(program, "rms_norm"):
        if _is(norm.args[0], "tensor_cast::all_reduce"):
            value, _, group = norm.args[0].args  # type: ignore[union-attr]
            found.setdefault(value, set()).add(tuple(program.ranks[0].constants[group.name]))  # type: ignore[union-attr,arg-type]
    return any(len([group for group in groups if len(group) > 1]) > 1 for groups in found.values())


def view_between(program: Program) -> bool:
    return any(
        _is(node.args[0], "aten::view") and _is(node.args[0].args[0], "tensor_cast::all_reduce")  # type: ignore[union-attr]
        for node in _calls(program, "rms_norm")
    )


def read_twice(program: Program) -> bool:
    return any(
        len([user for user in node.users if user.op == "call_function"]) > 1 for node in _calls(program, "all_reduce")
    )


def chained_residual(program: Program) -> bool:
    """The residual output of one add_rms_norm2 is an operand of another."""
    return any(
        _is(node.args[1], "python::getitem") and node.args[1].args[1] == 1  # type: ignore[union-attr]
        for node in _calls(program, "add_rms_norm2")
    )


def _drawn(shows: Callable[[Program], bool], seed: int) -> Program:
    meshes = [mesh for size in WORLD_SIZES for mesh in all_meshes(size)]
    source = random.Random(seed)
    while True:
        program = decode(source.choice(meshes), source.randbytes(300))
        if shows(program):
            return program


@pytest.mark.parametrize(
    ("shows", "minimum"),
    [
        pytest.param(reduced_then_normed, 2, id="all_reduce-rms_norm"),
        pytest.param(reduced_then_added_and_normed, 2, id="all_reduce-add_rms_norm"),
        pytest.param(region_between, 3, id="all_reduce-region-rms_norm"),
        pytest.param(normed_twins, 4, id="twins"),
        pytest.param(view_between, 3, id="all_reduce-view-rms_norm"),
        pytest.param(read_twice, 3, id="all_reduce-read-twice"),
        pytest.param(chained_residual, 2, id="add_rms_norm2-chain"),
    ],
)
def test_a_predicate_is_reduced_to_what_it_needs(shows: Callable[[Program], bool], minimum: int) -> None:
    found = [reduce(_drawn(shows, seed), shows) for seed in range(2)]
    sizes = [one.program.size for one in found]
    print(f"{shows.__name__:<30} minimum {minimum}, reduced to {sizes} in {[one.trials for one in found]} trials")
    assert sizes == [minimum] * 2
