"""Inner reshardings become outer ones, which can be lowered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from tcverify.errors import Unsupported
from tcverify.execution import ProcessGroupPool
from tcverify.ops import Layout, Resharding
from tcverify.passes.editing import op_name
from tcverify.passes.resharding.contiguous import MakeReshardingContiguous
from tcverify.passes.resharding.layouts import resharding_of
from tcverify.passes.resharding.lowering import ConvertOpToCommunication
from tcverify.program import Program
from tcverify.program.global_view.builder import PlacedBuilder
from tcverify.verification.verifier import verify

GRID = "[[0, 3], [2, 1]]"


def one(source: str, target: str, shape: Sequence[int] = (12, 12), *, dim: int | None = None) -> Program:
    b = PlacedBuilder(4)
    x = b.input("x", shape, source)
    y = b.set(x, target) if dim is None else b.reduce(x, dim, target)
    return b.build(b.call("aten::neg", y))


def reshardings(program: Program, rank: int) -> list[Resharding]:
    gm = MakeReshardingContiguous()(program.graph_module(rank))
    return [made for node in gm.graph.nodes if (made := resharding_of(node)) is not None]


INNER = [
    ("[1, 0, 2] shard(1)", "[1, 0, 2] replicated", (12, 12), None),
    ("[0, 1] shard(2)", "[1, 2] replicated", (3, 5, 4), None),
    ("[3] replicated", "[1, 0] shard(1)", (12, 12), None),
    ("[2, 0] replicated", "[3, 1, 0] shard(2)", (2, 1, 6), None),
    ("[0, 1, 2, 3] shard(0)", "[0, 1, 2, 3] shard(1)", (8, 2, 8), 0),
    ("[2, 0] shard(1)", "[2, 0] shard(1)", (3, 2, 4), 1),
    ("[2, 0] shard(2)", "[2, 0] shard(1)", (3, 4, 2), 2),
    (f"{GRID} shard(0), shard(1)", f"{GRID} shard(0), replicated", (4, 8), None),
    (f"{GRID} shard(2), shard(1)", f"{GRID} shard(2), shard(1)", (4, 6, 2, 4), 2),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "shape", "dim"), INNER)
def test_inner_reshardings_can_be_lowered(source: str, target: str, shape: tuple[int, ...], dim: int | None) -> None:
    program = one(source, target, shape, dim=dim)
    with pytest.raises(Unsupported, match="inner resharding"):
        ConvertOpToCommunication()(program.graph_module(Layout.parse(source).mesh.ranks[0]))
    alone = verify(MakeReshardingContiguous(), program)
    assert (alone.status, alone.changed) == ("passed", True)
    for domain in ("float64", "exact"):
        both = verify([MakeReshardingContiguous(), ConvertOpToCommunication()], program, domain=domain)
        assert (both.status, both.changed) == ("passed", True)


@pytest.mark.parametrize(
    "mesh",
    ["[0, 1] {}", "[3, 1, 0] {}", "[0, 1, 2, 3] {}", "[[0, 1], [2, 3]] {}, shard(3)", "[[2, 0], [1, 3]] shard(3), {}"],
)
def test_with_it_every_change_of_one_mesh_dim_is_lowered(mesh: str) -> None:
    b = PlacedBuilder(4)
    placements = ("shard(0)", "shard(1)", "shard(2)", "replicated")
    shape = (12, 12, 12, 4)
    inputs = {p: b.input(f"x{i}", shape, mesh.format(p)) for i, p in enumerate(placements)}
    results = [b.set(inputs[before], mesh.format(after)) for before, after in itertools.product(placements, repeat=2)]
    mesh = mesh.replace("shard(3)", "shard(2)")  # in the result of a reduction
    for before, after in itertools.product((0, 1, 2), ("shard(0)", "shard(1)", "replicated")):
        results.append(b.reduce(inputs[f"shard({before})"], before, mesh.format(after)))
    program = b.build(*results)
    verdict = verify([MakeReshardingContiguous(), ConvertOpToCommunication()], program)
    assert verdict.status == "passed", [doubt.detail for doubt in verdict.doubts]


def test_a_chain_on_gloo(pool: Callable[[int], ProcessGroupPool]) -> None:
    b = PlacedBuilder(4)
    x = b.input("x", (4, 6, 8), "[2, 0, 3] shard(1)")
    whole = b.set(x, "[2, 0, 3] replicated")
    there = b.set(b.call("aten::sin", whole), "[0, 1] shard(2)")
    least = b.reduce(x, 1, "[2, 0, 3] replicated", "min")
    program = b.build(b.call("aten::relu", there), b.set(there, "[3] replicated"), least)
    verdict = verify([MakeReshardingContiguous(), ConvertOpToCommunication()], program, confirm=pool(4))
    assert verdict.status == "passed"
    assert "gloo" in verdict.executors


def test_the_dim_goes_to_the_front_on_all_ranks_alike() -> None:
    program = one("[0, 1] shard(2)", "[1, 2] replicated", (3, 5, 4))
    expected = Resharding(Layout.parse("[0, 1] shard(0)"), Layout.parse("[1, 2] replicated"), (4, 3, 5))
    assert [reshardings(program, rank) for rank in (0, 1, 2)] == [[expected]] * 3
    # a dim behind the one that is reduced away, of an operand on a mesh of two dims
    program = one(f"{GRID} shard(2), shard(1)", f"{GRID} shard(2), shard(1)", (4, 6, 2, 4), dim=2)
    (made,) = reshardings(program, 3)
    assert (made.shape, made.dim) == ((4, 4, 6, 2), 3)
    assert (str(made.source), str(made.target)) == (f"{GRID} shard(3), shard(2)", f"{GRID} shard(0), shard(2)")


def test_results_are_contiguous_as_before() -> None:
    program = one("[1, 0] shard(1)", "[1, 0] replicated", (4, 6))
    gm = MakeReshardingContiguous()(program.graph_module(1))
    (neg,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    assert neg.args[0].meta["val"].stride() == (6, 1)
    assert neg.args[0].meta["layout"] == "[1, 0] replicated"


def test_a_stream_axis_stays_with_the_result() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4, 6), "[0, 1] shard(1)")
    program = b.build(b.set(x, "[0, 1] replicated", stream_axis=1))
    gm = MakeReshardingContiguous()(program.graph_module(0))
    (marked,) = [node for node in gm.graph.nodes if "stream_axis" in node.meta]
    assert (op_name(marked), marked.meta["stream_axis"]) == ("aten::clone", 1)
    assert verify(MakeReshardingContiguous(), program).status == "passed"


@pytest.mark.parametrize(
    ("source", "target", "dim"),
    [
        ("[0, 1] shard(0)", "[0, 1] replicated", None),
        ("[0, 1] shard(1)", "[2, 3] shard(1)", None),
        ("[0, 1] shard(0)", "[0, 1] shard(1)", None),
        ("[0, 1] replicated", "[0, 1] shard(1)", None),
        ("[0, 1] shard(1)", "[2, 3] shard(0)", None),  # refused for another reason
        ("[0, 1] shard(1)", "[2, 3] replicated", 0),
    ],
)
def test_others_are_left_alone(source: str, target: str, dim: int | None) -> None:
    program = one(source, target, dim=dim)
    chosen = MakeReshardingContiguous()
    gm = program.graph_module(0)
    before = gm.code
    assert chosen(gm).code == before
    assert not any(chosen.rewrites.values())


def test_it_counts_and_a_second_application_changes_nothing() -> None:
    program = one("[0, 1] shard(1)", "[0, 1] replicated")
    chosen = MakeReshardingContiguous()
    gm = chosen(program.graph_module(0))
    assert chosen.rewrites == {"set": 1, "reduce": 0}
    before = gm.code
    assert chosen(gm).code == before
    assert chosen.rewrites == {"set": 0, "reduce": 0}


def test_an_operand_of_unknown_shape_is_refused_before_anything_is_changed() -> None:
    gm = one("[0, 1] shard(1)", "[0, 1] replicated").graph_module(0)
    x = next(iter(gm.graph.nodes))
    del x.meta["val"]
    before = str(gm.graph)
    with pytest.raises(Unsupported, match=r"the metadata of its operand 'x' has no shape of known sizes"):
        MakeReshardingContiguous()(gm)
    assert str(gm.graph) == before
