"""P1 on hand-built programs: it leaves alone what it must, and every planted defect shows."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from tcverify.execution import Lockstep
from tcverify.passes import SequenceParallel
from tcverify.program import (
    PARTIAL,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    MeshDim,
    Recipe,
    spmd_program,
)
from tests.mutants.sequence_parallel import EXPECTED, MUTANTS
from tests.support.sequence_programs import (
    GRID,
    REVERSED,
    STRIDED,
    TP2,
    Build,
    Builder,
    apply,
    findings,
    program,
)

# ---------------------------------------------------------------------------------------------- what it leaves alone


def in_place(b: Builder) -> Any:
    reduced = b.all_reduce(b["x"])
    viewed = b.view(reduced, 1, 12, 8)
    b.inputs["touched"] = touched = b.call("aten::add_.Tensor", viewed, b["r"])
    return b.rms_norm(reduced), touched


def marker_with_other_reader(b: Builder) -> Any:
    marked = b.begin(b.all_reduce(b["x"]))
    return b.rms_norm(marked), b.call("aten::relu", marked)


def marker_behind_a_shared_marker(b: Builder) -> Any:
    outer = b.begin(b.all_reduce(b["x"]))
    return b.rms_norm(b.begin(outer)), b.call("aten::relu", outer)


def residual_of_mutated_input(b: Builder) -> Any:
    touched = b.call("aten::mul_.Tensor", b["r"], b["v"])
    return b.add_rms_norm(b.all_reduce(b["x"]), b["r"]), touched


def split_by_rank(b: Builder) -> Any:
    start = b.graph.constant("start", lambda rank: rank)
    stop = b.graph.constant("stop", lambda rank: 12 + rank)
    doubled = b.call("aten::cat", [b["r"], b["q"]], 0)
    return b.add_rms_norm(b.all_reduce(b["x"]), b.call("aten::slice.Tensor", doubled, 0, start, stop))


def scaled_by_rank(b: Builder) -> Any:
    factor = b.graph.constant("factor", lambda rank: rank + 2)
    return b.add_rms_norm(b.all_reduce(b["x"]), b.call("aten::mul.Scalar", b["r"], factor))


def reduced_over_another_group(b: Builder) -> Any:
    return b.add_rms_norm(b.all_reduce(b["x"], "tp"), b.all_reduce(b["v"], "dp"))


def sum_with_marker_read_twice(b: Builder) -> Any:
    left = b.end(b.add(b.all_reduce(b["x"]), b["r"]))
    return b.rms_norm(left), left


def sum_in_place(b: Builder) -> Any:
    total = b.add(b.all_reduce(b["x"]), b["r"])
    norm = b.rms_norm(total)
    return norm, b.call("aten::mul_.Tensor", total, b["v"])


def fused_in_place(b: Builder) -> Any:
    hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
    return hidden, b.call("aten::mul_.Tensor", residual, b["v"])


LEFT_ALONE: dict[str, tuple[Build, tuple[int, ...], Mesh]] = {
    "group of one": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (12, 8), Mesh(2, (MeshDim("tp", ((0,), (1,))),))),
    "tokens not divisible": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (5, 8), TP2),
    "fewer tokens than ranks": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (2, 8), Mesh.grid({"tp": 4})),
    "batch divisible, tokens not": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (2, 5, 8), TP2),
    "no tokens": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (0, 8), TP2),
    "four dims": (lambda b: b.rms_norm(b.all_reduce(b["x"])), (2, 2, 2, 8), TP2),
    "one dim": (lambda b: b.rms_norm(b.all_reduce(b["w"])), (12, 8), TP2),
    "a view that merges batch and tokens": (
        lambda b: b.rms_norm(b.view(b.all_reduce(b["x"]), 24, 8)), (2, 12, 8), TP2,
    ),
    "a view that splits the hidden dim": (
        lambda b: b.call("rms_norm", b.view(b.all_reduce(b["x"]), 24, 4), b.call("aten::slice.Tensor", b["w"], 0, 0, 4), 1e-6),
        (12, 8), TP2,
    ),
    "a view whose tokens the norm takes as one": (
        lambda b: b.call("rms_norm", b.view(b.all_reduce(b["x"]), 96), b.view(b["r"], 96), 1e-6),
        (12, 8), TP2,
    ),
    "a transpose before the norm": (
        lambda b: b.rms_norm(b.call("aten::transpose.int", b.all_reduce(b["x"]), 0, 1)), (8, 8), TP2,
    ),
    "an op between": (lambda b: b.rms_norm(b.call("aten::relu", b.all_reduce(b["x"]))), (12, 8), TP2),
    "a varying residual": (lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["v"]), (12, 8), TP2),
    "a partial residual": (lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["y"]), (12, 8), TP2),
    "a varying first addend": (lambda b: b.add_rms_norm(b["v"], b.all_reduce(b["x"])), (12, 8), TP2),
    "a varying weight": (lambda b: b.rms_norm(b.all_reduce(b["x"]), "u"), (12, 8), TP2),
    "a residual that is broadcast": (
        lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b.call("aten::mean.dim", b["r"], [0], True)), (12, 8), TP2,
    ),
    "a weight for every token": (
        lambda b: b.call("rms_norm", b.all_reduce(b["x"]), b["r"], 1e-6), (12, 8), TP2,
    ),
    "a marker that others read": (marker_with_other_reader, (12, 8), TP2),
    "a marker behind one that others read": (marker_behind_a_shared_marker, (12, 8), TP2),
    "an all_reduce written in place": (in_place, (12, 8), TP2),
    "a residual written in place": (residual_of_mutated_input, (12, 8), TP2),
    "a residual selected by rank": (split_by_rank, (12, 8), TP2),
    "a residual scaled by rank": (scaled_by_rank, (12, 8), TP2),
    "a residual reduced over another group": (reduced_over_another_group, (12, 8), GRID),
    "add_rms_norm2 whose tuple is read whole": (lambda b: b.add_rms_norm2(b.all_reduce(b["x"]), b["r"]), (12, 8), TP2),
    "add_rms_norm2 with a varying residual": (lambda b: b.fused(b.all_reduce(b["x"]), b["v"]), (12, 8), TP2),
    "a sum without a norm": (lambda b: b.add(b.all_reduce(b["x"]), b["r"]), (12, 8), TP2),
    "a sum with an op before the norm": (
        lambda b: b.rms_norm(b.call("aten::relu", b.add(b.all_reduce(b["x"]), b["r"]))), (12, 8), TP2,
    ),
    "a sum with a varying residual": (lambda b: b.rms_norm(b.add(b.all_reduce(b["x"]), b["v"])), (12, 8), TP2),
    "a sum with a bias": (lambda b: b.rms_norm(b.add(b.all_reduce(b["x"]), b["w"])), (12, 8), TP2),
    "a sum with a number": (lambda b: b.rms_norm(b.add(b.all_reduce(b["x"]), 1.0)), (12, 8), TP2),
    "a sum that others multiply": (
        lambda b: b.rms_norm(b.call("aten::add.Tensor", b.all_reduce(b["x"]), b["r"], alpha=2)), (12, 8), TP2,
    ),
    "a sum whose marker others read": (sum_with_marker_read_twice, (12, 8), TP2),
    "a sum written in place": (sum_in_place, (12, 8), TP2),
    "a residual of add_rms_norm2 written in place": (fused_in_place, (12, 8), TP2),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    build, shape, mesh = LEFT_ALONE[case]
    original = program(build, shape, mesh)
    for rank in range(mesh.world_size):
        gm = original.graph_module(rank)
        code = gm.code
        pass_ = SequenceParallel()
        pass_(gm)
        assert not any(pass_.rewrites.values())
        gm.recompile()
        assert gm.code == code


@pytest.mark.parametrize(
    ("tp", "dp"), [(((0, 1), (2, 3)), ((0, 2), (3, 1))), (((0, 1),), ((0, 1),))], ids=["crossing", "twice the same"]
)
def test_an_input_that_varies_over_a_dim_which_tells_the_members_apart(tp: Any, dp: Any) -> None:
    mesh = Mesh(2 * len(tp), (MeshDim("tp", tp), MeshDim("dp", dp)))
    specs = [
        InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)),
        InputSpec("v", (4, 8), placements=(("dp", VARYING),)),
        InputSpec("w", (8,), recipe=Recipe("norm_weight")),
    ]

    def build(graph: GraphBuilder) -> Any:
        b = Builder(graph, ["x", "v", "w"])
        return b.add_rms_norm(b.all_reduce(b["x"]), b["v"])

    original = spmd_program(mesh, specs, build)
    assert findings(original, SequenceParallel()) == set()
    assert apply(original, SequenceParallel())[1] == 0


@pytest.mark.parametrize("lost", ["x", "r", "w", "all_reduce", "add_rms_norm"])
def test_missing_metadata_leaves_the_graph_alone(lost: str) -> None:
    gm = program(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"])).graph_module(0)
    del next(node for node in gm.graph.nodes if node.name == lost).meta["val"]
    pass_ = SequenceParallel()
    pass_(gm)
    assert not any(pass_.rewrites.values())


@pytest.mark.parametrize("stale", ["all_reduce_1", "getitem"])
def test_what_reads_a_value_of_wrong_metadata_stays(stale: str) -> None:
    def build(b: Builder) -> Any:
        return b.fused(b.all_reduce(b["x"]), b.all_reduce(b["y"]))[0]

    gm = program(build).graph_module(0)
    node = next(node for node in gm.graph.nodes if node.name == stale)
    node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    pass_ = SequenceParallel()
    pass_(gm)
    assert not any(pass_.rewrites.values())


@pytest.mark.parametrize("lost", ["r", "w"])
def test_a_missing_placement_means_varying(lost: str) -> None:
    gm = program(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"])).graph_module(0)
    del next(node for node in gm.graph.nodes if node.name == lost).meta["placement"]
    pass_ = SequenceParallel()
    pass_(gm)
    assert not any(pass_.rewrites.values())


@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize("indexed", ["all_reduce", "rms_norm"])
def test_what_indexes_a_tensor_reads_it_in_full(indexed: str, index: int) -> None:
    original = program(lambda b: b.rms_norm(b.all_reduce(b["x"])))
    graphs = []
    for rank in (0, 1):
        graph = original.graph_module(rank).graph
        value, output = (next(n for n in graph.nodes if n.name == name) for name in (indexed, "output"))
        with graph.inserting_before(output):
            row = graph.call_function(operator.getitem, (value, index))
        row.meta["val"] = value.meta["val"][index]
        output.args = ((output.args[0], row),)
        graphs.append(graph)
    assert findings(original.with_graphs(graphs), SequenceParallel()) == set()


def test_a_norm_that_nobody_reads_is_still_gathered() -> None:
    """An unused collective is one that other ranks may wait for: ranks that differ in dead code stay matched."""
    original = program(lambda b: b.rms_norm(b.all_reduce(b["x"])))
    graphs = []
    for rank in (0, 1):
        gm = original.graph_module(rank)
        if rank == 1:
            output = next(iter(reversed(gm.graph.nodes)))
            output.args = (next(iter(gm.graph.nodes)),)
        graphs.append(SequenceParallel()(gm).graph)
    assert Lockstep().run(original.with_graphs(graphs)).finished


def test_an_all_reduce_that_was_unused_before_stays() -> None:
    def unused(gm: Any) -> Any:
        graph = gm.graph
        reduced = next(node for node in graph.nodes if node.name == "all_reduce")
        with graph.inserting_after(reduced):
            graph.node_copy(reduced, lambda node: node)
        return gm

    original = program(lambda b: b.rms_norm(b.all_reduce(b["x"])))
    gm = SequenceParallel()(unused(original.graph_module(0)))
    assert sum(node.name.startswith("all_reduce") for node in gm.graph.nodes) == 1


# ----------------------------------------------------------------------------------------------------- planted defects


def with_residual(b: Builder) -> Any:
    return b.add_rms_norm(b.all_reduce(b["x"]), b["r"])


def norm_only(b: Builder) -> Any:
    return b.rms_norm(b.all_reduce(b["x"]))


def norm_and_reader(b: Builder) -> Any:
    reduced = b.all_reduce(b["x"])
    return b.rms_norm(reduced), b.call("aten::add.Tensor", reduced, b["r"])


def two_groups(b: Builder) -> Any:
    return b.rms_norm(b.all_reduce(b["x"], "tp")), b.rms_norm(b.all_reduce(b["x"], "dp"))


def sum_and_norm(b: Builder) -> Any:
    return b.rms_norm(b.add(b.all_reduce(b["x"]), b["r"]))


def two_norms(b: Builder) -> Any:
    first, second = b.all_reduce(b["x"]), b.all_reduce(b["y"])
    return b.rms_norm(first), b.rms_norm(second)


def residual_read_twice(b: Builder) -> Any:
    hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
    return b.fused(b.all_reduce(b["y"]), residual), hidden, residual


def residual_of_dp(b: Builder) -> Any:
    _, residual = b.fused(b.all_reduce(b["x"], "dp"), b["r"])
    return b.fused(b.all_reduce(b["y"], "tp"), residual)


def gathered_along_hidden(b: Builder) -> Any:
    half = b.call("aten::clone", b.call("aten::slice.Tensor", b["r"], 1, 0, 4), memory_format=torch.contiguous_format)
    gathered = b.call("all_gather", half, 1, b.graph.rank, b.graph.group("tp"))
    return b.add_rms_norm(b.all_reduce(b["x"]), gathered)


def last_item(b: Builder) -> Any:
    return b.graph.getitem(b.add_rms_norm2(b.all_reduce(b["x"]), b["r"]), -1)


def equal_items(b: Builder) -> Any:
    both = b.add_rms_norm2(b.all_reduce(b["x"]), b["r"])
    return b.graph.getitem(both, 0), b.graph.getitem(both, 0)


SAME_RANKS = Mesh(2, (MeshDim("dp", ((1, 0),)), MeshDim("tp", ((0, 1),))))

SHOWN_BY: dict[str, tuple[Build, tuple[int, ...], Mesh]] = {
    "ResidualNotSliced": (with_residual, (12, 8), TP2),
    "RankNumberPicksShard": (with_residual, (12, 8), STRIDED),
    "FirstChunkForAll": (with_residual, (12, 8), TP2),
    "VaryingAddendSliced": (LEFT_ALONE["a varying residual"][0], (12, 8), TP2),
    "BroadcastAddendSliced": (LEFT_ALONE["a residual that is broadcast"][0], (12, 8), TP2),
    "ResidualAddedTwice": (sum_and_norm, (12, 8), TP2),
    "ResidualOfAnotherGroup": (residual_of_dp, (12, 8), GRID),
    "ResidualInAnotherOrder": (residual_of_dp, (12, 8), SAME_RANKS),
    "ResidualGatheredAlongAnotherDim": (gathered_along_hidden, (12, 8), TP2),
    "LocalResidualReturned": (lambda b: b.fused(b.all_reduce(b["x"]), b["r"]), (12, 8), TP2),
    "LocalReadersHideFullOnes": (residual_read_twice, (12, 8), TP2),
    "BatchScattered": (norm_only, (2, 4, 8), TP2),
    "BatchGathered": (norm_only, (2, 4, 8), TP2),
    "OutputNotGathered": (norm_only, (12, 8), TP2),
    "GatherOrderLost": (norm_only, (12, 8), REVERSED),
    "GatherOverFirstGroup": (two_groups, (12, 8), GRID),
    "GatherSkippedOnFirstRank": (norm_only, (12, 8), TP2),
    "AllReduceErasedOnFirstRank": (norm_only, (12, 8), TP2),
    "ScatterMovedOnOddRanks": (two_norms, (12, 8), TP2),
    "OneScatterForAllGroups": (two_groups, (12, 8), GRID),
    "IndivisibleTokensAccepted": (norm_only, (5, 8), TP2),
    "OtherReadersTakeShard": (norm_and_reader, (12, 8), TP2),
    "MarkerMovesAlone": (marker_with_other_reader, (12, 8), TP2),
    "ViewKeepsAllTokens": (lambda b: b.rms_norm(b.view(b.all_reduce(b["x"]), 1, 12, 8)), (12, 8), TP2),
    "ViewMergesTokens": (LEFT_ALONE["a view that merges batch and tokens"][0], (2, 12, 8), TP2),
    "TupleLeftLocal": (LEFT_ALONE["add_rms_norm2 whose tuple is read whole"][0], (12, 8), TP2),
    "NegativeItemMistaken": (last_item, (12, 8), TP2),
    "EqualItemsGatheredTwice": (equal_items, (12, 8), TP2),
    "WeightPerTokenAccepted": (LEFT_ALONE["a weight for every token"][0], (12, 8), TP2),
    "WritesIgnored": (in_place, (12, 8), TP2),
    "StaleMetadata": (norm_only, (12, 8), TP2),
    "GatherHasLocalMetadata": (norm_only, (12, 8), TP2),
    "ScattersShareStorage": (two_norms, (12, 8), TP2),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refuted(name: str) -> None:
    found = findings(program(*SHOWN_BY[name]), MUTANTS[name]())
    assert found & EXPECTED[name], f"found {found}"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_sound_pass_is_not_refuted_where_a_mutant_is(name: str) -> None:
    assert findings(program(*SHOWN_BY[name]), SequenceParallel()) == set()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("FirstChunkForAll", {"wrong-value"}),
        ("GatherSkippedOnFirstRank", {"deadlock"}),
        ("AllReduceErasedOnFirstRank", {"collective-mismatch"}),
        ("StaleMetadata", {"stale-metadata"}),
        ("IndivisibleTokensAccepted", {"pass-raised"}),
    ],
)
def test_each_check_refutes_a_mutant_alone(name: str, kinds: set[str]) -> None:
    assert findings(program(*SHOWN_BY[name]), MUTANTS[name]()) == kinds


def test_mutants_carry_their_own_names() -> None:
    assert {mutant.name for mutant in MUTANTS.values()} == set(MUTANTS)
    assert SequenceParallel.name == "sequence_parallel"
