"""Buckets: values side by side are followed part by part, and what takes a wrong part out of them is to blame."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from tcverify.explain.diagnosis import Diagnosis, diagnose
from tcverify.program import PARTIAL, Finding, GraphBuilder, InputSpec, Mesh, Program, spmd_program

MESH = Mesh.grid({"tp": 2})
INPUTS = (
    InputSpec("a", (2, 3), placements=(("tp", PARTIAL),)),
    InputSpec("b", (4,), placements=(("tp", PARTIAL),)),
)
Build = Callable[[GraphBuilder, fx.Node, fx.Node], object]
WRONG = Finding("wrong-value", "equivalence", "output 1 is wrong", "", None, 0, {"label": "output 1"})


def program(build: Build) -> Program:
    return spmd_program(MESH, INPUTS, lambda b: build(b, b.input("a"), b.input("b")), seed=5)


def reduce(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return b.call("tensor_cast::all_reduce", value, b.rank, b.group("tp"))


def two_reductions(b: GraphBuilder, a: fx.Node, other: fx.Node) -> object:
    return reduce(b, a), reduce(b, other)


def bucket(start: int = 6, *, halves: bool = False, reduces: bool = True) -> Build:
    def build(b: GraphBuilder, a: fx.Node, other: fx.Node) -> object:
        both = b.call("aten::cat", [b.call("aten::view", a, [6]), other], 0)
        summed = b.call("aten::mul.Tensor", both, 0.5) if halves else both
        summed = reduce(b, summed) if reduces else summed
        first = b.call("aten::view", b.call("aten::slice.Tensor", summed, 0, 0, 6), [2, 3])
        return first, b.call("aten::slice.Tensor", summed, 0, start, start + 4)

    return build


def look(after: Build) -> Diagnosis:
    # The bucket's all_reduce must not bear the name of one of the original's.
    rewritten = program(after)
    graphs = [rewritten.graph(rank) for rank in range(2)]
    for graph in graphs:
        for node in graph.nodes:
            if node.name.startswith("all_reduce"):
                node.name = "bucket_reduce"
    return diagnose(program(two_reductions), rewritten.with_graphs(graphs), WRONG)


def test_every_value_of_a_sound_bucket_is_explained() -> None:
    found = look(bucket())
    assert found.first is None
    relations = found.relations or {}
    assert {name: relation.kind for name, relation in relations.items()} == {
        "a": "equal",
        "b": "equal",
        "view": "reshaped",
        "cat": "bundle",
        "bucket_reduce": "bundle",
        "slice_1": "reshaped",
        "view_1": "equal",
        "slice_2": "equal",
    }
    assert relations["bucket_reduce"].text == (
        "several values side by side along dim 0: the original's 'all_reduce' in another shape; "
        "equal to the original's 'all_reduce_1'"
    )


def test_the_slice_that_takes_a_wrong_part_is_to_blame() -> None:
    first = look(bucket(start=5)).first
    assert first is not None
    assert first.node == "slice_2"


def test_a_bucket_whose_parts_are_wrong_is_to_blame() -> None:
    first = look(bucket(halves=True)).first
    assert first is not None
    assert first.node == "mul"


def test_a_bucket_that_is_never_added_up_is_taken_apart_into_addends() -> None:
    first = look(bucket(reduces=False)).first
    assert str(first) == (
        "output 1 returns 'slice_2', which is equal to the original's 'b', where the original returns 'all_reduce_1'"
    )
