"""What comm-buffer lowering leaves alone: ranks that run other graphs, groups of one, values of unknown shape."""

from __future__ import annotations

from typing import Any

import pytest

from tcverify.passes import CommBuffers
from tcverify.program import InputSpec, Mesh, MeshDim, Program, shard
from tcverify.program.graph import RankBinding
from tests.passes.comm_buffers.test_comm_buffers import (
    TP2,
    Build,
    Builder,
    buffers,
    calls,
    holds,
    lowered,
    program,
    small_sum,
    two_groups_under_way,
)


def changed(given: Program, **options: Any) -> bool:
    return any(any(lowered(given, rank, **options)[1].rewrites.values()) for rank in range(given.world_size))


def test_groups_whose_members_run_other_graphs_are_left_alone() -> None:
    sharded = InputSpec("x", (5, 8), placements=(("tp", shard(0)),))
    uneven = program(small_sum_of_rows, x=sharded)
    assert len(uneven.graphs) == 2
    assert not changed(uneven)
    assert changed(uneven, unsafe_alike=True)


def small_sum_of_rows(b: Builder) -> Any:
    return b.relu(b.wait(b.start(b.call("aten::sum.dim_IntList", b.x, [0]))))


def test_ranks_are_alike_when_all_of_their_kind_are() -> None:
    mesh = Mesh(5, (MeshDim("tp", ((0, 1), (2, 3), (4,))), MeshDim("dp", ((0, 2), (1, 3), (4,)))))
    meta = [module.meta["alike"] for module in program(two_groups_under_way, mesh).graph_modules()]
    assert meta == [("tp", "dp")] * 5
    crossed = Mesh(4, (MeshDim("tp", ((0, 1), (2, 3))), MeshDim("dp", ((0, 2, 1), (3,)))))
    meta = [module.meta["alike"] for module in program(small_sum, crossed).graph_modules()]
    assert meta == [("dp",)] * 4  # rank 3 is in no other group of three, so ranks 2 and 3 differ


def test_what_is_sent_to_ranks_that_differ_lives_in_no_buffer() -> None:
    """Ranks 1 and 2 form a group of their like, and send the result on to ranks 0 and 3, which know nothing of its buffer."""
    mesh = Mesh(4, (MeshDim("dp", ((0, 1), (3, 2))), MeshDim("tp", ((3, 0), (2, 1)))))

    def build(order: bool) -> Build:
        def written(b: Builder) -> Any:
            x, y = b.made(), b.made(b.relu(b.x))
            if order:
                first, second = b.start(x, "avg"), b.start(y, "avg")
            else:
                second, first = b.start(y, "avg"), b.start(x, "avg")
            sent = b.wait(b.call("broadcast", b.wait(first), 0, "dp"))
            return b.relu(sent), b.relu(b.wait(second))

        return written

    one, two = program(build(True), mesh), program(build(False), mesh)
    pairs = {0: 0, 1: 1, 2: 1, 3: 0}
    ranks = tuple(RankBinding(graph, one.ranks[rank].constants) for rank, graph in pairs.items())
    both = Program(mesh, (one.graphs[0], two.graphs[0]), ranks, one.inputs)
    assert [module.meta["alike"] for module in both.graph_modules()] == [("tp",)] * 4
    gm, done = lowered(both, 1)
    assert done.rewrites["in-place"] == 2
    assert list(buffers(gm)) == ["mm_1"]
    holds(both)


def test_costs_and_names_do_not_tell_ranks_apart() -> None:
    first, second = program(small_sum), program(small_sum)
    for node in second.graphs[0].nodes:
        node.meta["cost_s"] = 1e-6
    both = Program(
        first.mesh, (first.graphs[0], second.graphs[0]), (first.ranks[0], first.ranks[1].__class__(1, first.ranks[1].constants)),
        first.inputs,
    )  # fmt: skip
    assert [module.meta["alike"] for module in both.graph_modules()] == [("tp",), ("tp",)]
    holds(both)


def test_a_graph_without_such_collectives_is_not_touched() -> None:
    assert not changed(program(lambda b: b.relu(b.made())))


@pytest.mark.parametrize("what", ["group of one", "nobody waits", "no metadata", "stale metadata"])
def test_left_alone(what: str) -> None:
    def build(b: Builder) -> Any:
        x = b.made()
        start = b.start(x, "avg")
        if what == "nobody waits":
            return b.relu(x), start
        return b.relu(b.wait(start))

    given = program(build, Mesh(2, (MeshDim("tp", ((0,), (1,))),)) if what == "group of one" else TP2)
    gm = given.graph_module(0)
    for node in gm.graph.nodes:
        if what == "no metadata" and node.name in ("x", "w"):
            del node.meta["val"]
        if what == "stale metadata" and node.name == "mm":
            node.meta["val"] = node.meta["val"].new_empty(3, 8)
    done = CommBuffers()
    done(gm)
    assert not done.rewrites["in-place"]
    assert not done.rewrites["out-of-place"]
    assert not done.rewrites["one-shot"]


def test_what_reads_a_result_that_is_under_way_stays() -> None:
    def build(b: Builder) -> Any:
        first = b.start(b.made(), "avg")
        return b.relu(b.wait(b.start(first, "max"))), b.relu(b.wait(first))

    gm, _ = lowered(program(build))
    assert calls(gm)[:2] == ["all_reduce_", "all_reduce"]
