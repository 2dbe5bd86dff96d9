"""Ops with effects go through PyTorch's partitioners: what is lost, doubled or brought out of step on some ranks is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import Program, verify
from tcverify.ops import lookup, qualified_name, resolve, schema_of
from tcverify.program import GraphBuilder, InputSpec, Mesh, RankBinding, spmd_program
from tcverify.pytorch.effects import define_shapes, effects_as
from tcverify.pytorch.partitioning import DefaultPartition, MergeEqual, MinCutPartition
from tcverify.strategies import DECODERS
from tests.sizes import by_night

C10D = "_c10d_functional::"
MESH = Mesh.grid({"dp": 2})
X, G = InputSpec("x", (4,)), InputSpec("g", (4,))


def kinds(made: Any, program: Program) -> set[str]:
    return {finding.kind for finding in verify(made, program).findings}


def transfers(b: GraphBuilder, rank: int) -> Any:
    """Each rank sends to the other and receives from it, twice, rank 0 first; the result is added to the input."""
    x, peer = b.input("x"), 1 - rank
    b.call("p2p::barrier", "dp")
    made = x
    for _ in range(2):
        if rank:
            received = b.call("p2p::recv", x, peer)
            b.call("p2p::send", x, peer)
        else:
            b.call("p2p::send", x, peer)
            received = b.call("p2p::recv", x, peer)
        made = b.call("aten::add.Tensor", made, received)
    return made


def program(write: Callable[[GraphBuilder, int], Any] = transfers) -> Program:
    """A program with a graph for each rank."""
    graphs = []
    for rank in range(MESH.world_size):
        builder = GraphBuilder(MESH, {"x": X}, rank)
        graphs.append(builder.finish(write(builder, rank)))
    return Program(MESH, tuple(graphs), tuple(RankBinding(rank, {}) for rank in range(2)), (X,), 1, ())


def without(number: int, name: str) -> Callable[[fx.GraphModule], None]:
    """A pass that removes a call of an op from rank 0."""

    def rewrite(gm: fx.GraphModule) -> None:
        found = [n for n in gm.graph.nodes if n.op == "call_function" and qualified_name(n.target) == name]
        if gm.meta["rank"] == 0:
            gm.graph.erase_node(found[number])

    return rewrite


def twice(name: str, ranks: tuple[int, ...]) -> Callable[[fx.GraphModule], None]:
    """A pass that calls an op once more on some ranks."""

    def rewrite(gm: fx.GraphModule) -> None:
        node = next(n for n in gm.graph.nodes if n.op == "call_function" and qualified_name(n.target) == name)
        if gm.meta["rank"] in ranks:
            with gm.graph.inserting_after(node):
                gm.graph.node_copy(node)

    return rewrite


def receive_first(gm: fx.GraphModule) -> None:
    """A pass that puts the first receive before the first send."""
    by_name = {qualified_name(n.target): n for n in reversed(gm.graph.nodes) if n.op == "call_function"}
    by_name["p2p::send"].prepend(by_name["p2p::recv"])


def same(gm: fx.GraphModule) -> None:
    gm.graph.lint()


def test_sound_passes_stay_silent() -> None:
    assert verify(same, program()).status == "passed"


def test_an_effect_that_is_lost_is_found() -> None:
    assert kinds(without(0, "p2p::send"), program()) >= {"changed-effects", "deadlock"}
    assert kinds(without(0, "p2p::barrier"), program()) >= {"changed-effects"}


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_an_effect_that_is_doubled_is_found(ranks: tuple[int, ...]) -> None:
    found = kinds(twice("p2p::barrier", ranks), program())
    assert "changed-effects" in found
    assert ("deadlock" in found or "collective-mismatch" in found) == (len(ranks) == 1)


def test_effects_in_another_order_stand_still() -> None:
    assert "deadlock" in kinds(receive_first, program())


def test_drawn_programs_pass_where_nothing_is_changed() -> None:
    decoder, drawn = DECODERS["effects"], []
    for seed in range(by_night(20, 8)):
        choices = bytes((seed * 37 + k * 11) % 256 for k in range(decoder.width))
        drawn.append(decoder.decode(Mesh.grid({"dp": 2, "tp": 2}), choices))
        assert verify(same, drawn[-1]).status == "passed"
    labels = {label for one in drawn for label in one.labels}
    assert {"exchange", "barrier", "shares", "gradient"} <= labels
    calls = [node for one in drawn for graph in one.graphs for node in graph.nodes if node.op == "call_function"]
    schemas = [schema_of(node.target) for node in calls if lookup(node.target).phase != "wait"]
    assert not any(schema is not None and schema.is_mutable for schema in schemas)


def test_most_drawn_programs_are_joint_graphs_that_a_partitioner_divides() -> None:
    decoder, divided = DECODERS["effects"], 0
    for seed in range(10):
        choices = bytes((seed * 37 + k * 11) % 256 for k in range(decoder.width))
        program = decoder.decode(MESH, choices)
        divided += verify(DefaultPartition(), replace(program, options={"cut": 0.5})).pair.changed
    assert divided >= 8


# ------------------------------------------------------------------------------------------------ PyTorch's partitioners


def shares(b: GraphBuilder, rank: int) -> Any:
    """Two all_reduces; rank 0 brings the same value to both."""
    x = b.input("x")
    parts = [b.call("aten::mul.Tensor", x, share) for share in (1.0, 1.0 + rank)]
    starts = [b.call(C10D + "all_reduce", part, "sum", "dp") for part in parts]
    return tuple(b.call("aten::neg", b.call(C10D + "wait_tensor", start)) for start in starts)


def test_collectives_that_are_equal_on_one_rank_only_are_merged_there() -> None:
    # torch/_functorch/compile_utils.py:fx_graph_cse, in all versions
    assert kinds(MergeEqual(), program(shares)) & {"deadlock", "collective-mismatch"}


def test_what_differs_everywhere_is_not_merged() -> None:
    def differ(b: GraphBuilder, rank: int) -> Any:
        x = b.input("x")
        parts = [b.call("aten::mul.Tensor", x, share) for share in (1.0, 2.0)]
        return tuple(b.call(C10D + "wait_tensor", b.call(C10D + "all_reduce", part, "sum", "dp")) for part in parts)

    verdict = verify(MergeEqual(), program(differ))
    assert verdict.status == "passed"


def trained(b: GraphBuilder) -> Any:
    """A forward, and behind it the gradient that comes back."""
    x, g = b.input("x"), b.input("g")
    hidden = b.call("aten::sin", x)
    out = b.call(C10D + "wait_tensor", b.call(C10D + "all_reduce", hidden, "sum", "dp"))
    slope = b.call("aten::cos", x)
    return out, b.call("aten::mul.Tensor", slope, g)


@pytest.mark.parametrize("made", [DefaultPartition, MinCutPartition])
def test_a_graph_is_divided_and_joined_without_loss(made: Any) -> None:
    verdict = verify(made(), spmd_program(MESH, [X, G], trained))
    assert verdict.status == "passed", verdict.findings[:1] or verdict.doubts


def synchronised(b: GraphBuilder) -> Any:
    """A forward that begins with a barrier, and behind it the gradient that comes back."""
    x, g = b.input("x"), b.input("g")
    b.call("p2p::barrier", "dp")
    hidden = b.call("aten::sin", b.call("aten::neg", x))
    out = b.call(C10D + "wait_tensor", b.call(C10D + "all_reduce", hidden, "sum", "dp"))
    return out, b.call("aten::mul.Tensor", g, 2.0), b.call("aten::mul.Tensor", b.call("aten::cos", x), g)


def test_a_barrier_of_the_forward_runs_again_in_the_backward() -> None:
    # torch/_functorch/partitioners.py:_must_be_in_forward, in all versions
    program = spmd_program(MESH, [X, G], synchronised)
    verdict = verify(DefaultPartition(), program)
    assert [finding.kind for finding in verdict.findings] == ["changed-effects"]
    assert "runs barrier ('dp' [0, 1]) 2 times, and ran it 1 times" in verdict.findings[0].title
    assert verify(MinCutPartition(), program).status == "passed"


def test_what_has_no_backward_is_declined() -> None:
    verdict = verify(DefaultPartition(), program(shares))
    assert verdict.status == "inconclusive"


@pytest.mark.parametrize("made", [DefaultPartition, MinCutPartition])
def test_what_returns_several_results_as_one_is_declined(made: Any) -> None:
    """What AOTAutograd hands to a partitioner returns tensors."""

    def with_both(b: GraphBuilder) -> Any:
        out, gradient = trained(b)
        return out, gradient, b.call("aten::min.dim", out, 0)

    verdict = verify(made(), spmd_program(MESH, [X, G], with_both))
    assert verdict.status == "inconclusive"
    assert "which is not one tensor" in verdict.doubts[0].detail


# ---------------------------------------------------------------------------------------------------------- registration


def test_ordered_effects_are_known_while_asked_for_and_not_longer() -> None:
    from torch._higher_order_ops.effects import has_effects

    def ordered() -> bool:
        target = resolve("p2p::barrier")
        try:
            return bool(has_effects(target))
        except TypeError:  # torch 2.9 looks at the arguments too
            return bool(has_effects(target, ("dp",), {}))

    define_shapes()
    before = ordered()
    with effects_as("ordered"):
        assert ordered()
    assert not before
    assert not ordered()
    with effects_as("declared"):
        assert not ordered()
        assert resolve("p2p::barrier") in torch.fx.node._side_effectful_functions
