"""Programs: graphs shared by ranks, their metadata and inputs, and the builder."""

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec
from tcverify.program import (
    PARTIAL,
    REPLICATED,
    GraphBuilder,
    InputSpec,
    Mesh,
    MeshDim,
    Program,
    RankBinding,
    RankConstant,
    compute_nodes,
    dumps,
    shard,
    spmd_program,
)
from tcverify.program import inputs as inputs_module

UNEVEN = Mesh(3, (MeshDim("tp", ((0,), (2, 1))),))
X = InputSpec("x", (4, 6), placements=(("tp", PARTIAL),))
W = InputSpec("w", (6,))


def reduce_and_norm(b: GraphBuilder) -> fx.Node:
    x, w = b.input("x"), b.input("w")
    total = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
    return b.call("tensor_cast::rms_norm", total, w, 1e-5)


def program(mesh: Mesh | None = None) -> Program:
    return spmd_program(mesh or Mesh.grid({"dp": 2, "tp": 2}), [X, W], reduce_and_norm, seed=3)


def node(graph: fx.Graph, name: str) -> fx.Node:
    found: fx.Node = next(n for n in graph.nodes if n.name == name)
    return found


# ------------------------------------------------------------------------------------------------------ building


def test_ranks_of_equal_shapes_share_one_graph() -> None:
    made = program()
    assert len(made.graphs) == 1
    assert [r.constants for r in made.ranks] == [
        {"rank": rank, "tp": group} for rank, group in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]])
    ]


def test_groups_of_different_size_make_distinct_graphs() -> None:
    made = program(UNEVEN)
    assert len(made.graphs) == 2
    assert [r.graph for r in made.ranks] == [0, 1, 1]
    assert made.ranks[1].constants["tp"] == [2, 1]


def test_uneven_shards_make_distinct_graphs() -> None:
    x = InputSpec("x", (5, 2), placements=(("tp", shard(0)),))
    made = spmd_program(Mesh.grid({"tp": 3}), [x], lambda b: b.call("aten::relu", b.input("x")))
    assert [r.graph for r in made.ranks] == [0, 0, 1]
    assert [node(made.graph(rank), "relu").meta["val"].shape for rank in range(3)] == [(2, 2), (2, 2), (1, 2)]


def test_the_shared_graph_holds_constants_and_specs() -> None:
    graph = program().graphs[0]
    assert list(node(graph, "all_reduce").args[1:]) == [RankConstant("rank"), RankConstant("tp")]
    val = node(graph, "rms_norm").meta["val"]
    assert isinstance(val, TensorSpec)
    assert val.shape == (4, 6)


def test_dead_nodes_are_dropped_and_inputs_stay() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        x, w = b.input("x"), b.input("w")
        b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        return b.call("aten::relu", w)

    graph = spmd_program(Mesh.grid({"tp": 2}), [X, W], build).graphs[0]
    assert [n.name for n in graph.nodes] == ["x", "w", "relu", "output"]


def test_a_tuple_result_is_taken_apart_by_getitem() -> None:
    def build(b: GraphBuilder) -> tuple[fx.Node, fx.Node]:
        x, w = b.input("x"), b.input("w")
        both = b.call("tensor_cast::add_rms_norm2", x, x, w, 1e-5)
        assert b.shape(b.getitem(both, 1)) == (4, 6)
        return b.getitem(both, 0), b.getitem(both, -1)

    made = spmd_program(Mesh.grid({"tp": 2}), [X, W], build)
    val = node(made.graph(0), "add_rms_norm2").meta["val"]
    assert isinstance(val, tuple)
    assert [v.shape for v in val] == [(4, 6), (4, 6)]
    assert made.size == 1


def test_a_constant_of_ones_own_depends_on_the_rank() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        start = b.constant("start", lambda rank: 2 * rank)
        end = b.constant("end", lambda rank: 2 * rank + 2)
        return b.call("aten::slice.Tensor", b.input("x"), 0, start, end)

    made = spmd_program(Mesh.grid({"tp": 2}), [X], build)
    assert node(made.graph(1), "slice_1").args[2:] == (2, 4)


def test_building_names_what_is_wrong() -> None:
    def builder() -> GraphBuilder:
        return GraphBuilder(Mesh.grid({"tp": 2}), {"x": X, "w": W, "class": InputSpec("class", (2,))}, 0)

    with pytest.raises(ProgramError, match="the program has no input 'y'"):
        builder().input("y")
    with pytest.raises(ProgramError, match="'class' cannot be the name of a placeholder"):
        builder().input("class")
    with pytest.raises(UnsupportedOp, match="aten::no_such_op"):
        builder().call("aten::no_such_op")
    b = builder()
    with pytest.raises(ShapeError, match="aten::mm"):
        b.call("aten::mm", b.input("x"), b.input("w"))


# ------------------------------------------------------------------------------------------------- a rank's graph


def test_a_rank_sees_its_constants() -> None:
    made = program()
    assert node(made.graph(3), "all_reduce").args[1:] == (3, [2, 3])


def test_metadata_of_a_rank_is_fake_tensors_of_one_mode() -> None:
    graph = program().graph(0)
    values = [n.meta["val"] for n in graph.nodes if n.op != "output"]
    assert all(isinstance(v, FakeTensor) for v in values)
    assert len({id(v.fake_mode) for v in values}) == 1
    assert values[-1].dtype is torch.float32


def test_views_share_the_storage_of_their_fake_tensors() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        view = b.call("aten::view", x, [24])
        return view, b.call("aten::clone", view)

    graph = spmd_program(Mesh.grid({"tp": 2}), [X], build).graph(1)
    x, view, copy = (node(graph, n).meta["val"].untyped_storage()._cdata for n in ("x", "view", "clone"))
    assert x == view
    assert x != copy


def test_placeholders_carry_their_placement_by_group() -> None:
    made = program()
    assert node(made.graph(2), "x").meta["placement"] == {(0, 2): REPLICATED, (2, 3): PARTIAL}
    assert node(made.graph(2), "w").meta["placement"] == {(0, 2): REPLICATED, (2, 3): REPLICATED}
    assert made.placements("x", 1) == {(1, 3): REPLICATED, (0, 1): PARTIAL}


def test_groups_of_one_carry_no_placement() -> None:
    made = program(UNEVEN)
    assert made.placements("x", 0) == {}
    assert made.placements("x", 1) == {(2, 1): PARTIAL}


def test_a_rank_gets_a_new_graph_every_time() -> None:
    made = program()
    first = made.graph_module(0)
    first.graph.erase_node(next(n for n in first.graph.nodes if n.op == "output"))
    assert [n.op for n in made.graph(0).nodes][-1] == "output"


def test_ranks_of_one_graph_share_its_fake_tensors_and_nothing_else() -> None:
    first, second = program(Mesh.grid({"tp": 2})).graph_modules()
    for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        assert one is not other
        assert one.meta is not other.meta
        assert one.meta.get("val") is other.meta.get("val")


def test_a_graph_module_runs_as_it_is() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        return b.call("tensor_cast::rms_norm", b.input("x"), b.input("w"), 1e-5)

    made = spmd_program(Mesh.grid({"tp": 1}), [X, W], build)
    x, w = made.values(0)
    torch.testing.assert_close(made.graph_module(0)(x, w), torch.nn.functional.rms_norm(x, (6,), w, 1e-5))


def test_a_rank_gets_its_values_in_the_order_of_its_placeholders() -> None:
    made = program()
    x, w = made.values(1)
    assert torch.equal(x, X.values(made.mesh, 1, 3))
    assert torch.equal(w, W.values(made.mesh, 1, 3))


def test_the_size_counts_compute_nodes_of_the_largest_rank() -> None:
    made = program()
    assert made.size == 2
    assert [n.name for n in compute_nodes(made.graphs[0])] == ["all_reduce", "rms_norm"]


# ------------------------------------------------------------------------------------------------------ with_graphs


@pytest.mark.parametrize("mesh", [Mesh.grid({"dp": 2, "tp": 2}), UNEVEN], ids=["grid", "uneven"])
def test_a_program_is_the_same_after_its_graphs_went_out_and_in(mesh: Mesh) -> None:
    made = program(mesh)
    again = made.with_graphs([made.graph(rank) for rank in range(mesh.world_size)])
    assert len(again.graphs) == 1  # they differ in integers alone, groups of other sizes included
    for rank in range(mesh.world_size):
        assert str(again.graph(rank)) == str(made.graph(rank))
    assert dumps(again.with_graphs([again.graph(rank) for rank in range(mesh.world_size)])) == dumps(again)


def test_names_of_rank_constants_survive() -> None:
    made = program()
    again = made.with_graphs([made.graph(rank) for rank in range(4)])
    assert [r.constants for r in again.ranks] == [r.constants for r in made.ranks]


def test_graphs_of_other_shapes_stay_apart() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        return b.call("tensor_cast::all_gather", b.input("x"), 0, b.rank, b.group("tp"))

    made = spmd_program(UNEVEN, [X], build)
    again = made.with_graphs([made.graph(rank) for rank in range(3)])
    assert [r.graph for r in again.ranks] == [0, 1, 1]


def test_new_integers_become_rank_constants() -> None:
    made = program()
    graphs = [made.graph(rank) for rank in range(4)]
    for rank, graph in enumerate(graphs):
        norm = node(graph, "rms_norm")
        with graph.inserting_after(norm):
            cut = graph.call_function(torch.ops.aten.slice.Tensor, (norm, 0, 10 * rank, 10 * rank + 1))
        node(graph, "output").args = (cut,)
    again = made.with_graphs(graphs)
    assert len(again.graphs) == 1
    assert node(again.graph(3), cut.name).args[2:] == (30, 31)


def test_modules_keep_their_graphs_apart() -> None:
    made = program(Mesh.grid({"tp": 2}))
    modules = [made.graph_module(rank) for rank in range(2)]
    again = made.with_graphs([m.graph for m in modules], modules)
    assert len(again.graphs) == 2
    assert again.modules == tuple(modules)


# ------------------------------------------------------------------------------------------------------ errors


def parts() -> dict[str, Any]:
    made = program(Mesh.grid({"tp": 2}))
    return {"mesh": made.mesh, "graphs": made.graphs, "ranks": made.ranks, "inputs": made.inputs}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mesh": Mesh.grid({"tp": 3})}, "the mesh has 3 ranks, but 2 are described"),
        ({"ranks": (RankBinding(0, {}), RankBinding(1, {}))}, "rank 1 runs graph 1, but there are 1"),
        ({"ranks": (RankBinding(-1, {}), RankBinding(0, {}))}, "rank 0 runs graph -1, but there are 1"),
        ({"inputs": (X, W, X)}, "two inputs share a name"),
        ({"inputs": (X,)}, "placeholder 'w' has no input of its name"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProgramError, match=sentence):
        Program(**{**parts(), **change})


def test_a_rank_constant_without_a_value_is_named() -> None:
    made = Program(**{**parts(), "ranks": (RankBinding(0, {"rank": 0}), RankBinding(0, {"rank": 1}))})
    with pytest.raises(ProgramError, match="rank constant 'tp' has no value on this rank"):
        made.graph(0)


def test_inputs_that_are_too_large_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "MAX_INPUT_ELEMENTS", 29)
    with pytest.raises(ProgramError, match="the inputs of rank 0 have 30 elements; at most 29 are allowed"):
        program().values(0)


def test_inputs_come_before_calls() -> None:
    specs = [InputSpec("x", (2,)), InputSpec("y", (2,))]

    def late(b: GraphBuilder) -> object:
        return b.call("aten::add.Tensor", b.call("aten::neg", b.input("x")), b.input("y"))

    with pytest.raises(ProgramError, match="input 'y' is added after a call"):
        spmd_program(Mesh.grid({"tp": 2}), specs, late)
