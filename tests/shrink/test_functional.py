"""The reducer on asynchronous programs: what belongs together goes together, and what is left is in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.execution import Lockstep
from tcverify.program import PARTIAL, VARYING, GraphBuilder, InputSpec, Mesh, MeshDim, Program, Recipe, spmd_program
from tcverify.shrink import reduce
from tcverify.shrink.graph.async_groups import count_untidy
from tcverify.shrink.graph.legalize import facts_of
from tcverify.shrink.graph.sketch import sketch_of
from tcverify.strategies import DECODERS, all_meshes
from tcverify.strategies.draft import PerRank
from tcverify.strategies.functional.draft import AsyncDraft
from tests.execution.test_asynchrony import two_graphs
from tests.support.predicates import has_neg, named, ops

TP2, TP4 = Mesh.grid({"tp": 2}), Mesh.grid({"tp": 4})
C = "_c10d_functional::"
X = InputSpec("x", (8, 2), placements=(("tp", PARTIAL),))
WAIT = C + "wait_tensor"


def written(build: Callable[[GraphBuilder, fx.Node], Any], mesh: Mesh = TP2, spec: InputSpec = X) -> Program:
    return spmd_program(mesh, [spec], lambda b: build(b, b.input("x")))


def waited(b: GraphBuilder, op: str, *args: Any, **kwargs: Any) -> fx.Node:
    return b.call(WAIT, b.call(C + op, *args, **kwargs))


def runs_with(op: str) -> Callable[[Program], bool]:
    return lambda program: bool(named(program, op)) and Lockstep().run(program).finished


def reduced(program: Program, shows: Callable[[Program], bool]) -> Program:
    """What is left, every program on the way being in order."""

    def watched(trial: Program) -> bool:
        assert count_untidy(facts_of(sketch_of(trial))) == 0
        return shows(trial)

    assert watched(program)
    return reduce(program, watched).program


def arguments(program: Program, op: str) -> tuple[Any, ...]:
    (node,) = named(program, C + op)
    return node.args[1:]


# -------------------------------------------------------------------------------------------------- drawn programs


@pytest.mark.parametrize(
    "op",
    ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_reduce_", "all_to_all_single"],
)
def test_drawn_programs_come_down_to_one_collective_and_its_wait(op: str) -> None:
    shows, found = runs_with(C + op), []
    generator = random.Random(1)
    meshes = [mesh for size in (2, 3, 4) for mesh in all_meshes(size)]
    decoder = DECODERS["functional"]
    while len(found) < 3:
        program = decoder.decode(generator.choice(meshes), generator.randbytes(decoder.width))
        if shows(program):
            found.append(reduced(program, shows))
    assert [ops(program) for program in found] == [[op, "wait_tensor"]] * 3
    assert [program.world_size for program in found] == [2] * 3
    assert [len(program.graphs) for program in found] == [1] * 3


@pytest.mark.parametrize("op", ["p2p::recv", "p2p::recv_"])
def test_drawn_transfers_come_down_to_one_that_meets_another(op: str) -> None:
    shows = runs_with(op)
    generator = random.Random(2)
    decoder = DECODERS["functional"]
    while True:
        program = decoder.decode(generator.choice(all_meshes(4)), generator.randbytes(decoder.width))
        if shows(program):
            break
    small = reduced(program, shows)
    assert small.world_size <= 3
    assert small.size <= 3
    assert {name.split("_")[0] for name in ops(small)} <= {"send", "recv"}


# ------------------------------------------------------------------------------------------------ starts and waits


def test_a_collective_in_a_chain_goes_with_its_wait() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> fx.Node:
        first = waited(b, "all_reduce", b.call("aten::relu", x), "sum", "tp")
        again = waited(
            b, "reduce_scatter_tensor", b.call("aten::neg", first), "sum", b.constant("n", lambda _: 2), "tp"
        )
        return b.call("aten::sin", again)

    assert ops(reduced(written(build), has_neg)) == ["neg"]


def test_an_in_place_collective_goes_too_and_so_do_waits_for_the_same() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> Any:
        own = b.call("aten::clone", x)
        first = waited(b, "all_reduce_", own, "sum", "tp")
        second = b.call(WAIT, own)
        return b.call("aten::neg", first), b.call("aten::add.Tensor", second, first)

    assert ops(reduced(written(build), has_neg)) == ["neg"]
    kept = reduced(written(build), lambda p: bool(named(p, C + "all_reduce_")))
    assert ops(kept) == ["all_reduce_", "wait_tensor"]


def test_coalesced_calls_lose_operands_and_become_plain() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> Any:
        values = [b.call("aten::mul.Tensor", x, float(i + 2)) for i in range(3)]
        several = b.call(C + "all_gather_into_tensor_coalesced", values, 2, "tp")
        return [b.call(WAIT, b.getitem(several, i)) for i in range(3)]

    def gathers(program: Program) -> bool:
        names = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")
        return any(named(program, C + name) for name in names) and Lockstep().run(program).finished

    assert ops(reduced(written(build), gathers)) == ["all_gather_into_tensor", "wait_tensor"]

    def of_two(program: Program) -> bool:
        return any(len(node.args[0]) > 1 for node in named(program, C + "all_gather_into_tensor_coalesced"))

    small = reduced(written(build), of_two)
    assert ops(small) == ["all_gather_into_tensor_coalesced", "wait_tensor", "wait_tensor"]
    assert len(arguments(small, "all_gather_into_tensor_coalesced")) == 2


def test_what_is_written_into_a_buffer_is_written_into_a_new_tensor() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> fx.Node:
        buffer = b.call("aten::new_zeros", x, [16, 2])
        return waited(b, "all_gather_into_tensor_out", x, 2, "tp", out=buffer)

    def gathers(program: Program) -> bool:
        return any("all_gather" in name for name in ops(program))

    assert ops(reduced(written(build), gathers)) == ["all_gather_into_tensor", "wait_tensor"]


def test_no_edit_takes_a_wait_from_its_start() -> None:
    program = written(lambda b, x: waited(b, "all_reduce", x, "sum", "tp"))
    assert count_untidy(facts_of(sketch_of(program))) == 0
    racing = written(lambda b, x: b.call("aten::relu", b.call(C + "all_reduce", x, "sum", "tp")))
    assert count_untidy(facts_of(sketch_of(racing))) == 2  # read, and never waited for
    assert ops(reduced(program, lambda p: bool(named(p, C + "all_reduce")))) == ["all_reduce", "wait_tensor"]


# ------------------------------------------------------------------------------------------------------ named groups


def test_group_sizes_and_roots_follow_when_ranks_go() -> None:
    gathered = written(lambda b, x: waited(b, "all_gather_into_tensor", x, 4, "tp"), TP4)
    small = reduced(gathered, runs_with(C + "all_gather_into_tensor"))
    assert (small.world_size, arguments(small, "all_gather_into_tensor")) == (2, (2, "tp"))
    sent = written(lambda b, x: waited(b, "broadcast", x, 3, "tp"), TP4)
    small = reduced(sent, runs_with(C + "broadcast"))
    assert (small.world_size, arguments(small, "broadcast")) == (2, (0, "tp"))


def test_group_sizes_follow_where_they_differ_between_ranks() -> None:
    mesh = Mesh(4, (MeshDim("tp", ((0, 1, 2), (3,))),))

    def groups_differ(program: Program) -> bool:
        sizes = {len(group) for dim in program.mesh.dims for group in dim.groups}
        return len(sizes) > 1 and runs_with(C + "all_gather_into_tensor")(program)

    def build(b: GraphBuilder, x: fx.Node) -> fx.Node:
        return waited(b, "all_gather_into_tensor", x, b.constant("members", lambda rank: (3, 3, 3, 1)[rank]), "tp")

    small = reduced(written(build, mesh), groups_differ)
    assert (small.world_size, [len(group) for group in small.mesh.dims[0].groups]) == (3, [2, 1])
    assert [list(binding.constants.values()) for binding in small.ranks] == [[2], [2], [1]]


def test_splits_of_an_all_to_all_follow() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> fx.Node:
        return waited(b, "all_to_all_single", x, [2] * 4, [2] * 4, "tp")

    small = reduced(written(build, TP4), runs_with(C + "all_to_all_single"))
    received, sent, group = arguments(small, "all_to_all_single")
    assert small.world_size == 2
    assert len(received) == len(sent) == 2
    assert group == "tp"


def test_a_dim_that_calls_name_stays_and_two_alike_become_one() -> None:
    mesh = Mesh(2, (MeshDim("dp", ((1, 0),)), MeshDim("tp", ((0, 1),))))

    def build(b: GraphBuilder, x: fx.Node) -> Any:
        return waited(b, "all_reduce", x, "sum", "tp"), waited(b, "all_reduce", x, "avg", "dp")

    def twice(program: Program) -> bool:
        return len(named(program, C + "all_reduce")) == 2 and Lockstep().run(program).finished

    small = reduced(written(build, mesh), twice)
    assert len(small.mesh.dims) == 1
    assert len({node.args[2] for node in named(small, C + "all_reduce")}) == 1
    kept = reduced(written(build, mesh), lambda p: len({n.args[2] for n in named(p, C + "all_reduce")}) == 2)
    assert len(kept.mesh.dims) == 2


# --------------------------------------------------------------------------------------------- ranks, order, dtypes


def exchanges(mesh: Mesh) -> Program:
    """Two rings, each with odd ranks the other way round, and a negation; a third call declares an order."""
    draft = AsyncDraft(mesh)
    value = draft.input("x", (2, 2), placements=(("tp", VARYING),))
    world = mesh.world_size
    following = PerRank("next", lambda rank: (rank + 1) % world)
    previous = PerRank("previous", lambda rank: (rank - 1) % world)
    odd = frozenset(rank for rank in range(world) if rank % 2)
    for _ in range(2):
        sent = draft.call("p2p::send", value, following)
        received = draft.call("p2p::recv", value, previous)
        draft.swaps.append((sent.number, received.number, odd))
        value = draft.call("aten::relu", received)
    negated = draft.call("aten::neg", value)
    draft.after.append((negated.number, sent.number))
    return draft.program((negated,), 0, [])


def test_transfers_go_on_all_ranks_at_once_and_then_one_graph_is_enough() -> None:
    small = reduced(exchanges(TP4), lambda p: has_neg(p) and Lockstep().run(p).finished)
    assert ops(small) == ["neg"]
    assert (len(small.graphs), small.world_size) == (1, 2)


def test_a_ring_that_loses_ranks_stays_a_ring() -> None:
    small = reduced(exchanges(TP4), lambda p: bool(named(p, "p2p::recv")) and Lockstep().run(p).finished)
    assert small.world_size == 2
    assert sorted(ops(small)) == ["recv", "send"]
    assert Lockstep().run(small).finished


def test_declared_order_goes_where_it_does_not_matter_and_names_what_there_is() -> None:
    def declares(program: Program) -> bool:
        return any("after" in node.meta for graph in program.graphs for node in graph.nodes)

    before = exchanges(TP2)
    assert declares(before)
    assert not declares(reduced(before, lambda p: bool(named(p, "p2p::recv")) and Lockstep().run(p).finished))
    small = reduced(before, declares)
    for graph in small.graphs:
        names = {node.name for node in graph.nodes}
        assert all(set(node.meta.get("after", ())) <= names for node in graph.nodes)


def test_integers_become_floating_where_nobody_needs_them() -> None:
    spec = InputSpec("x", (4,), torch.int64, (("tp", VARYING),), Recipe("integers", 50.0))
    program = written(lambda b, x: waited(b, "all_reduce", x, "max", "tp"), TP2, spec)
    small = reduced(program, runs_with(C + "all_reduce"))
    assert small.inputs[0].dtype is torch.float32
    bits = written(lambda b, x: waited(b, "all_reduce", x, "band", "tp"), TP2, spec)
    assert reduced(bits, runs_with(C + "all_reduce")).inputs[0].dtype is torch.int64


def test_a_wait_of_one_rank_may_have_the_name_of_a_wait_for_nothing_of_another() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        first = b.call(WAIT, x if b.representative == 0 else b.call(C + "all_reduce", x, "sum", "dp"))
        return waited(b, "all_reduce", b.call("aten::neg", first), "sum", "tp")

    mesh = Mesh(2, (MeshDim("tp", ((0, 1),)), MeshDim("dp", ((0,), (1,)))))
    left = reduced(two_graphs(build, mesh), lambda program: len(program.graphs) == 2 and has_neg(program))
    assert len(left.graphs) == 2
