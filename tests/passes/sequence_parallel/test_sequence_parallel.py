"""P1 on hand-built programs: it fires where it may, and what it makes is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcverify.passes import SequenceParallel
from tcverify.program import (
    Mesh,
    MeshDim,
    compute_nodes,
)
from tests.sizes import by_night
from tests.support.sequence_programs import (
    ALL_MESHES,
    GRID,
    LAYOUTS,
    REVERSED,
    STRIDED,
    TP2,
    TP3,
    Builder,
    apply,
    check,
    findings,
    ops,
    program,
)


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_norms_with_and_without_residual(mesh: Mesh, shape: tuple[int, ...]) -> None:
    def build(b: Builder) -> Any:
        first = b.rms_norm(b.all_reduce(b["x"]))
        return first, b.add_rms_norm(b.all_reduce(b["y"]), b["r"])

    check(build, 2, shape, mesh)


def test_the_rewrite_is_reduce_scatter_norm_all_gather() -> None:
    rewritten = check(lambda b: b.rms_norm(b.all_reduce(b["x"])), 1)
    assert ops(rewritten) == ["reduce_scatter", "rms_norm", "all_gather"]


def test_inserted_collectives_take_rank_and_group_from_the_all_reduce() -> None:
    rewritten = check(lambda b: b.rms_norm(b.all_reduce(b["x"])), 1, mesh=STRIDED)
    for rank, group in ((0, [0, 2]), (1, [3, 1]), (2, [0, 2]), (3, [3, 1])):
        nodes = compute_nodes(rewritten.graph(rank))
        assert [list(nodes[i].args[-1]) for i in (0, 2)] == [group, group]
        assert [nodes[i].args[-2] for i in (0, 2)] == [rank, rank]


def test_a_replicated_residual_is_sliced_at_the_position_in_the_group() -> None:
    rewritten = check(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"]), 1, mesh=REVERSED)
    starts = [n.args[2] for rank in (0, 1) for n in compute_nodes(rewritten.graph(rank)) if n.name == "residual_shard"]
    assert starts == [6, 0]


def test_a_residual_that_was_gathered_is_taken_from_its_shard() -> None:
    def build(b: Builder) -> Any:
        gathered = b.call("all_gather", b["s"], -2, b.graph.rank, b.graph.group("tp"))
        return b.add_rms_norm(b.all_reduce(b["x"]), gathered)

    rewritten = check(build, 1, (3, 12, 8), REVERSED)
    assert ops(rewritten) == ["reduce_scatter", "add_rms_norm", "all_gather"]


def test_a_gathered_residual_that_others_read_stays_for_them() -> None:
    def build(b: Builder) -> Any:
        gathered = b.call("all_gather", b["s"], 0, b.graph.rank, b.graph.group("tp"))
        return b.add_rms_norm(b.all_reduce(b["x"]), gathered), gathered

    assert ops(check(build, 1)).count("all_gather") == 2


def test_a_residual_gathered_on_another_dim_is_sliced() -> None:
    def build(b: Builder) -> Any:
        half = b.call("aten::slice.Tensor", b["r"], 1, 0, 4)
        gathered = b.call("all_gather", half, 1, b.graph.rank, b.graph.group("tp"))
        return b.add_rms_norm(b.all_reduce(b["x"]), gathered)

    assert "slice" in ops(check(build, 1))


def test_a_norm_feeds_the_next_residual_from_its_shard() -> None:
    def build(b: Builder) -> Any:
        first = b.rms_norm(b.all_reduce(b["x"]))
        return b.add_rms_norm(b.all_reduce(b["y"]), first)

    rewritten = check(build, 2)
    assert ops(rewritten).count("all_gather") == 1
    assert "slice" not in ops(rewritten)


@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_the_all_reduce_may_be_the_second_addend(mesh: Mesh) -> None:
    check(lambda b: b.add_rms_norm(b["r"], b.all_reduce(b["x"])), 1, (3, 12, 8), mesh)


def test_both_addends_may_be_the_same_all_reduce() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return b.add_rms_norm(reduced, reduced)

    assert ops(check(build, 1)) == ["reduce_scatter", "add_rms_norm", "all_gather"]


def test_a_product_of_tokens_by_themselves_stays() -> None:
    def build(b: Builder) -> Any:
        total = b.add(b.all_reduce(b["x"]), b["r"])
        return b.rms_norm(b.add(b.all_reduce(b["y"]), b.call("aten::mm", total, total)))

    original = program(build, (4, 4))
    rewritten, _ = apply(original, SequenceParallel())
    assert findings(original, SequenceParallel()) == set()
    (product,) = (node for node in rewritten.graphs[0].nodes if "aten.mm" in str(node.target))
    assert product.meta["val"].shape == (4, 4)


def test_both_addends_may_be_all_reduces() -> None:
    check(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b.all_reduce(b["y"])), 1)


@pytest.mark.parametrize("up", ["aten::view", "aten::reshape", "aten::unsqueeze"])
@pytest.mark.parametrize("mesh", [TP2, TP3, STRIDED], ids=str)
def test_a_view_that_adds_a_batch_of_one(mesh: Mesh, up: str) -> None:
    def build(b: Builder) -> Any:
        reduced = b.call(up, b.all_reduce(b["x"]), 0 if "unsqueeze" in up else [1, 12, 8])
        return b.add_rms_norm(reduced, b["r"])

    check(build, 1, (12, 8), mesh)


@pytest.mark.parametrize("down", ["aten::view", "aten::reshape", "aten::squeeze.dim"])
def test_a_view_that_drops_a_batch_of_one(down: str) -> None:
    def build(b: Builder) -> Any:
        reduced = b.call(down, b.all_reduce(b["x"]), 0 if "squeeze" in down else [12, 8])
        return b.add_rms_norm(reduced, b["r"])

    check(build, 1, (1, 12, 8))


def test_a_squeeze_that_does_nothing_does_not_drop_a_shard_of_one_token() -> None:
    check(lambda b: b.rms_norm(b.call("aten::squeeze.dim", b.all_reduce(b["x"]), 1)), 1, (3, 2, 8))


def test_views_of_the_result_keep_their_storage() -> None:
    def build(b: Builder) -> Any:
        norm = b.rms_norm(b.all_reduce(b["x"]))
        return norm, b.view(norm, 3, 4, 8)

    check(build, 1)


def test_a_marker_moves_to_the_shard() -> None:
    rewritten = check(lambda b: b.rms_norm(b.view(b.begin(b.all_reduce(b["x"])), 1, 12, 8)), 1)
    assert ops(rewritten) == ["reduce_scatter", "_internal_mark_region_begin", "view", "rms_norm", "all_gather"]


def test_a_marker_moves_once_with_all_its_norms() -> None:
    def build(b: Builder) -> Any:
        marked = b.begin(b.all_reduce(b["x"]))
        return b.rms_norm(marked), b.add_rms_norm(b.view(marked, 1, 12, 8), b["r"])

    rewritten = check(build, 2)
    assert ops(rewritten).count("_internal_mark_region_begin") == 1
    assert ops(rewritten).count("reduce_scatter") == 1


def test_an_all_reduce_behind_a_marker_keeps_the_marker_in_full() -> None:
    """The second all_reduce moves to the shard, but it reads its own operand on all tokens."""

    def build(b: Builder) -> Any:
        marked = b.view(b.begin(b.all_reduce(b["x"])), 1, 12, 8)
        return b.rms_norm(marked), b.rms_norm(b.all_reduce(marked))

    rewritten = check(build, 1)
    assert ops(rewritten).count("all_reduce") == 1


def test_a_view_that_others_read_stays_for_them() -> None:
    def build(b: Builder) -> Any:
        viewed = b.view(b.all_reduce(b["x"]), 1, 12, 8)
        return b.rms_norm(b.begin(viewed)), b.call("aten::relu", viewed)

    assert ops(check(build, 1)).count("view") == 2


def test_several_norms_share_one_reduce_scatter() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return b.rms_norm(reduced), b.rms_norm(b.view(reduced, 1, 12, 8)), b.add_rms_norm(reduced, b["r"])

    rewritten = check(build, 3)
    assert ops(rewritten).count("reduce_scatter") == 1
    assert "all_reduce" not in ops(rewritten)


def test_other_readers_keep_the_all_reduce() -> None:
    def build(b: Builder) -> Any:
        reduced = b.all_reduce(b["x"])
        return b.rms_norm(reduced), reduced, b.call("aten::add.Tensor", reduced, b["r"])

    rewritten = check(build, 1)
    assert ops(rewritten).count("all_reduce") == 1


def test_groups_of_two_mesh_dims_are_not_mixed() -> None:
    def build(b: Builder) -> Any:
        return b.rms_norm(b.all_reduce(b["x"], "tp")), b.rms_norm(b.all_reduce(b["x"], "dp"))

    rewritten, fired = apply(program(build, mesh=GRID), SequenceParallel())
    assert fired == 8
    groups = [list(n.args[-1]) for n in compute_nodes(rewritten.graph(1)) if n.name.startswith("reduce_scatter")]
    assert groups == [[0, 1], [1, 3]]
    assert findings(program(build, mesh=GRID), SequenceParallel()) == set()


def test_a_long_chain_of_norms_is_rewritten_without_recursion() -> None:
    def build(b: Builder) -> Any:
        value = b["x"]
        for _ in range(by_night(600, 300)):
            value = b.rms_norm(b.all_reduce(value))
        for _ in range(by_night(3000, 1500)):
            value = b.call("aten::relu", value)
        return value

    _, fired = apply(program(build), SequenceParallel())
    assert fired == by_night(1200, 600)


def test_a_long_chain_of_views_is_rewritten_without_recursion() -> None:
    def build(b: Builder) -> Any:
        value = b.all_reduce(b["x"])
        for i in range(by_night(4000, 1500)):
            value = b.view(value, *((1, 12, 8) if i % 2 == 0 else (12, 8)))
        return b.rms_norm(value)

    rewritten, fired = apply(program(build), SequenceParallel())
    assert fired == 2
    assert "all_reduce" not in ops(rewritten)


def test_fake_tensors_keep_their_mode_and_device() -> None:
    gm = program(lambda b: b.add_rms_norm(b.all_reduce(b["x"]), b["r"])).graph_module(1)
    modes = {node.meta["val"].fake_mode for node in gm.graph.nodes if "val" in node.meta}
    SequenceParallel()(gm)
    after = [node.meta["val"] for node in gm.graph.nodes if node.op != "output"]
    assert {val.fake_mode for val in after} == modes
    assert {val.device for val in after} == {torch.device("cpu")}


def test_the_rewritten_module_computes_without_a_process_group_of_more_than_one() -> None:
    mesh = Mesh(1, (MeshDim("tp", ((0,),)),))
    gm = program(lambda b: b.rms_norm(b.all_reduce(b["x"])), mesh=mesh).graph_module(0)
    before = gm.code
    assert SequenceParallel()(gm).code == before
