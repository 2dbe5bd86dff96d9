"""Lockstep: what ranks compute together, where they wait for ever, and how well-conditioned a program is."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.errors import UnsupportedOp
from tcverify.execution import Lockstep, Run
from tcverify.execution.interpreter import Watch
from tcverify.execution.lockstep import lockstep
from tcverify.execution.lockstep.lockstep import run_watched
from tcverify.program import (
    PARTIAL,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    MeshDim,
    Program,
    RankBinding,
    Recipe,
    shard,
    spmd_program,
)
from tcverify.verification.verifier import verify
from tests.sizes import by_night

Build = Callable[[GraphBuilder], Any]

PAIR = Mesh.grid({"tp": 2})
VARIES = (("tp", VARYING),)
X = InputSpec("x", (4, 6), torch.float64, VARIES)


def outputs(run: Run) -> list[torch.Tensor]:
    """The first output of every rank."""
    assert run.finished
    return [result.outputs[0] for result in run.ranks]


def run_spmd(build: Build, mesh: Mesh = PAIR, inputs: Sequence[InputSpec] = (X,), observe: bool = False) -> Run:
    return Lockstep().run(spmd_program(mesh, inputs, build), observe=observe)


def per_rank(mesh: Mesh, builds: Sequence[Build], inputs: Sequence[InputSpec] = (X,)) -> Program:
    """A program in which every rank has a graph of its own."""
    graphs, ranks = [], []
    for rank, build in enumerate(builds):
        builder = GraphBuilder(mesh, {spec.name: spec for spec in inputs}, rank)
        graphs.append(builder.finish(build(builder)))
        ranks.append(RankBinding(rank, builder.bindings(rank)))
    return Program(mesh, tuple(graphs), tuple(ranks), tuple(inputs))


def reduce_in(*dims: str, op: str = "tensor_cast::all_reduce") -> Build:
    """All-reduce x over each of these mesh dims in turn, independently, and return all results."""

    def build(b: GraphBuilder) -> list[fx.Node]:
        x = b.input("x")
        return [b.call(op, x, b.rank, b.group(dim)) for dim in dims]

    return build


# ------------------------------------------------------------------------------------------------------ collectives

REVERSED = Mesh(3, (MeshDim("tp", ((2, 0, 1),)),))


def test_all_reduce_sums_over_the_group() -> None:
    mesh = Mesh(3, (MeshDim("tp", ((0,), (2, 1))),))
    x = [X.values(mesh, rank, 0) for rank in range(3)]
    zero, one, two = outputs(run_spmd(reduce_in("tp"), mesh))
    assert torch.equal(zero, x[0])
    assert torch.equal(one, x[1] + x[2])
    assert torch.equal(two, one)


def test_all_gather_joins_in_group_order() -> None:
    x = [X.values(REVERSED, rank, 0) for rank in range(3)]
    run = run_spmd(lambda b: b.call("tensor_cast::all_gather", b.input("x"), 1, b.rank, b.group("tp")), REVERSED)
    for out in outputs(run):
        assert torch.equal(out, torch.cat([x[2], x[0], x[1]], 1))


def test_gathered_shards_are_the_whole() -> None:
    sharded = InputSpec("x", (6, 4), torch.float64, (("tp", shard(0)),))
    whole = InputSpec("x", (6, 4), torch.float64).values(REVERSED, 0, 0)
    build: Build = lambda b: b.call("tensor_cast::all_gather", b.input("x"), 0, b.rank, b.group("tp"))  # noqa: E731
    for out in outputs(run_spmd(build, REVERSED, [sharded])):
        assert torch.equal(out, whole)


def test_reduce_scatter_gives_the_chunk_at_the_position() -> None:
    x = [X.values(REVERSED, rank, 0) for rank in range(3)]
    run = run_spmd(lambda b: b.call("tensor_cast::reduce_scatter", b.input("x"), 1, b.rank, b.group("tp")), REVERSED)
    total = x[2] + x[0] + x[1]
    for rank, position in enumerate([1, 2, 0]):
        assert torch.equal(outputs(run)[rank], total[:, 2 * position : 2 * position + 2])


def test_all_to_all_exchanges_uneven_chunks() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        sent = b.constant("sent", lambda rank: [[1, 3], [2, 2]][rank])
        received = b.constant("received", lambda rank: [[1, 2], [3, 2]][rank])
        return b.call("tensor_cast::all_to_all", b.input("x"), received, sent, b.rank, b.group("tp"))

    x = [X.values(PAIR, rank, 0) for rank in range(2)]
    first, second = outputs(Lockstep().run(per_rank(PAIR, [build, build])))
    assert torch.equal(first, torch.cat([x[0][:1], x[1][:2]]))
    assert torch.equal(second, torch.cat([x[0][1:], x[1][2:]]))


def test_pipeline_send_recv_moves_a_value() -> None:
    mesh = Mesh.grid({"tp": 3})
    x = [X.values(mesh, rank, 0) for rank in range(3)]
    run = run_spmd(lambda b: b.call("tensor_cast::pipeline_send_recv", b.input("x"), 2, 0, 0, 1), mesh)
    for out, expected in zip(outputs(run), [x[2], x[1], x[2]], strict=True):
        assert torch.equal(out, expected)


def test_matmul_all_reduce_multiplies_and_sums() -> None:
    weight, bias = InputSpec("w", (6, 3), torch.float64, VARIES), InputSpec("c", (3,), torch.float64)

    def build(b: GraphBuilder) -> fx.Node:
        x, w, c = b.input("x"), b.input("w"), b.input("c")
        return b.call("tensor_cast::matmul_all_reduce", x, w, c, b.rank, b.group("tp"))

    products = [X.values(PAIR, r, 0) @ weight.values(PAIR, r, 0) for r in range(2)]
    expected = products[0] + products[1] + 2 * bias.values(PAIR, 0, 0)
    for out in outputs(run_spmd(build, inputs=[X, weight, bias])):
        torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)


def test_values_are_carried_in_float64() -> None:
    half = InputSpec("x", (4, 6), torch.bfloat16, VARIES)

    def build(b: GraphBuilder) -> fx.Node:
        total = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        narrow = b.call("aten::_to_copy", total, dtype=torch.float16)
        return b.call("aten::add.Tensor", narrow, b.call("aten::full", [6], 0.1, dtype=torch.float32))

    x = [half.values(PAIR, rank, 0).double() for rank in range(2)]
    constant = torch.full((6,), 0.1, dtype=torch.float32).double()
    (out, _) = outputs(run_spmd(build, inputs=[half]))
    assert out.dtype is torch.float64
    torch.testing.assert_close(out, x[0] + x[1] + constant, rtol=0, atol=1e-8)


def test_floats_made_of_integers_are_carried_too() -> None:
    index = InputSpec("x", (4,), torch.int64, recipe=Recipe("integers", 5))
    run = run_spmd(lambda b: b.call("aten::mul.Scalar", b.input("x"), 0.5), inputs=[index])
    assert outputs(run)[0].dtype is torch.float64


def test_the_calls_of_a_rank_are_listed_in_order() -> None:
    run = run_spmd(reduce_in("tp", "tp"))
    assert [(call.node, call.collective.kind) for call in run.ranks[1].calls] == [
        ("all_reduce", "all_reduce"),
        ("all_reduce_1", "all_reduce"),
    ]


def test_results_of_ranks_share_no_storage() -> None:
    run = run_spmd(lambda b: b.call("aten::neg_", reduce_in("tp")(b)[0]))
    assert torch.equal(*outputs(run))


# ------------------------------------------------------------------------------------------------------ hangs

CROSSED = Mesh(2, (MeshDim("a", ((0, 1),)), MeshDim("b", ((1, 0),))))
PLAIN = InputSpec("x", (4, 6), torch.float64)


def test_crossed_orders_over_two_groups_are_a_deadlock_told_in_words() -> None:
    run = Lockstep().run(per_rank(CROSSED, [reduce_in("a", "b"), reduce_in("b", "a")], [PLAIN]))
    assert run.hang is not None
    assert run.hang.cycle
    assert str(run.hang) == (
        "rank 0 waits in all_reduce #1 of group [0, 1]; rank 1 waits in all_reduce #1 of group [1, 0]"
    )
    assert not run.finished


def test_equal_orders_over_two_groups_are_none() -> None:
    assert Lockstep().run(per_rank(CROSSED, [reduce_in("a", "b")] * 2, [PLAIN])).finished


def test_a_cycle_of_three_is_followed_and_those_who_wait_for_it_are_left_out() -> None:
    mesh = Mesh(
        4,
        (
            MeshDim("lead", ((0, 1), (2,), (3,))),
            MeshDim("a", ((1, 2), (0,), (3,))),
            MeshDim("b", ((2, 3), (0,), (1,))),
            MeshDim("c", ((3, 1), (0,), (2,))),
        ),
    )
    builds = [reduce_in("lead"), reduce_in("a", "c", "lead"), reduce_in("b", "a"), reduce_in("c", "b")]
    run = Lockstep().run(per_rank(mesh, builds, [PLAIN]))
    assert run.hang is not None
    assert [wait.rank for wait in run.hang.waits] == [1, 2, 3]
    assert run.hang.cycle


def test_waits_are_counted_per_kind_and_group() -> None:
    run = Lockstep().run(per_rank(CROSSED, [reduce_in("a", "a", "b"), reduce_in("a", "b", "a")], [PLAIN]))
    assert str(run.hang) == (
        "rank 0 waits in all_reduce #2 of group [0, 1]; rank 1 waits in all_reduce #1 of group [1, 0]"
    )


def test_a_rank_that_finishes_without_joining_is_named() -> None:
    run = Lockstep().run(per_rank(PAIR, [lambda b: b.input("x"), reduce_in("tp")]))
    assert run.hang is not None
    assert not run.hang.cycle
    assert run.hang.finished == 0
    assert str(run.hang) == "rank 1 waits in all_reduce #1 of group [0, 1]; rank 0 has finished without joining"


def test_a_mismatch_ends_the_run_with_a_sentence_and_the_calls() -> None:
    def gather(b: GraphBuilder) -> fx.Node:
        return b.call("tensor_cast::all_gather", b.input("x"), 0, b.rank, b.group("tp"))

    run = Lockstep().run(per_rank(PAIR, [reduce_in("tp"), gather]))
    assert run.mismatch is not None
    sentence, calls = run.mismatch
    assert sentence == "rank 0 calls all_reduce while rank 1 calls all_gather"
    assert {rank: call.node for rank, call in calls.items()} == {0: "all_reduce", 1: "all_gather"}
    assert not run.finished


# ------------------------------------------------------------------------------------------------------ errors


def test_a_node_that_raises_ends_its_rank_and_is_named() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        row = b.call("aten::select.int", b.input("x"), 0, b.constant("row", lambda rank: 9 * rank))
        return b.call("tensor_cast::all_reduce", row, b.rank, b.group("tp"))

    run = run_spmd(build)
    assert run.error is not None
    assert run.error.rank == 1
    assert str(run.error.error).startswith("node 'select' raises IndexError: ")
    assert run.hang is None  # rank 0 waits forever, but that is not the cause
    assert not run.finished


def test_a_wrong_rank_constant_raises_on_its_node() -> None:
    run = run_spmd(lambda b: b.call("tensor_cast::all_reduce", b.input("x"), 0, b.group("tp")))
    assert run.error is not None
    assert str(run.error.error) == "node 'all_reduce' raises ValueError: all_reduce on rank 1 says rank=0"


@pytest.mark.parametrize(
    ("target", "name"), [(torch.ops.aten.rand_like.default, "aten::rand_like"), (torch.relu, "foreign::torch")]
)
def test_an_op_without_a_meaning_is_named_before_anything_runs(target: Any, name: str) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"),)))
    program = Program(PAIR, (graph,), (RankBinding(0, {}),) * 2, (X,))
    with pytest.raises(UnsupportedOp, match=f"op {name}"):
        Lockstep().run(program)


# ------------------------------------------------------------------------------------------------------ conditioning


def norm_of_sum(b: GraphBuilder) -> fx.Node:
    x, w = b.input("x"), b.input("w")
    return b.call("tensor_cast::rms_norm", b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp")), w, 1e-12)


def probe(recipe: str, ranks: int = 4) -> float:
    x = InputSpec("x", (4, 8), torch.float64, (("tp", PARTIAL),), Recipe(recipe))
    weight = InputSpec("w", (8,), recipe=Recipe("norm_weight"))
    program = spmd_program(Mesh.grid({"tp": ranks}), [x, weight], norm_of_sum)
    executor = Lockstep()
    return executor.probe(program, executor.run(program))["output 0"]


#: Few ranks run one by one, many are stacked.
RANKS = pytest.mark.parametrize("ranks", [4, 16])


@RANKS
def test_a_norm_is_well_conditioned(ranks: int) -> None:
    assert 0 < probe("uniform", ranks) < 1e-13


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_norm_of_cancelling_sums_is_not(ranks: int) -> None:
    """Two addends have one order: it shows because each is perturbed, as a program may round it that divides before it adds."""
    assert 1e-11 < probe("cancelling", ranks) < 1e-6


@RANKS
def test_the_probe_is_the_same_every_time(ranks: int) -> None:
    assert probe("uniform", ranks) == probe("uniform", ranks)


def test_many_ranks_are_probed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op by op, and collective by collective, as few are: what ranks compute one by one changes by as much."""

    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        total = b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", x, "sum", "tp"))
        return total, b.call("aten::mul.Tensor", x, 3.0), b.call("aten::view", x, [-1])

    program = spmd_program(Mesh.grid({"tp": 16}), [InputSpec("x", (4, 8), placements=(("tp", VARYING),))], build)
    baseline = Lockstep().run(program)
    found = []
    for stacked_from in (16, 17):
        monkeypatch.setattr(lockstep, "STACKED_FROM", stacked_from)
        monkeypatch.setattr(lockstep, "_execute", lockstep._execute if stacked_from == 17 else None)
        found.append(Lockstep().probe(program, baseline))
        monkeypatch.undo()
    stacked, alone = found
    assert stacked.keys() == alone.keys()
    for label, change in alone.items():
        assert change / 4 <= stacked[label] <= change * 4
    assert stacked["output 0"] > 0
    assert stacked["output 1"] > 0
    assert not stacked["output 2"]


def test_python_operators_are_probed_as_other_ops_are() -> None:
    build: Build = lambda b: b.call("python::add", b.input("x"), 1.0)  # noqa: E731
    program = spmd_program(PAIR, [X], build)
    executor = Lockstep()
    assert 0 < executor.probe(program, executor.run(program))["output 0"] < 1e-14


def test_a_discrete_result_that_flips_is_an_infinite_change() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        x = b.input("x")
        return b.call("aten::gt.Tensor", b.call("aten::mul.Scalar", x, 3.0), b.call("aten::mul.Scalar", x, 3.0))

    program = spmd_program(PAIR, [X], build)
    executor = Lockstep()
    assert executor.probe(program, executor.run(program)) == {"output 0": math.inf}


def test_the_change_is_the_largest_of_all_reruns() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        return b.call("aten::exp", b.call("aten::mul.Scalar", b.input("x"), 3.0))

    program = spmd_program(PAIR, [X], build)
    baseline = Lockstep().run(program)
    changes = [Lockstep().probe(program, baseline, reruns=number)["output 0"] for number in range(1, 9)]
    assert changes == sorted(changes)
    assert 0 < changes[0] < changes[-1]


def test_what_watches_may_write_into_the_inputs() -> None:
    program = spmd_program(PAIR, [X], lambda b: b.call("aten::exp", b.input("x")))
    seen: list[torch.Tensor] = []

    def watcher(rank: int, inputs: list[torch.Tensor]) -> Watch:
        seen.append(inputs[0].clone())
        inputs[0].zero_()
        return lambda step, args, kwargs, value: value

    for _ in range(2):
        run_watched(program, watcher)
    assert [bool(values.any()) for values in seen] == [True] * 4
    assert torch.equal(seen[0], seen[2])


# ------------------------------------------------------------------------------------------- mutation, observation


def written(b: GraphBuilder) -> Any:
    x = b.input("x")
    copy = b.call("aten::clone", x)
    return b.call("aten::add_.Tensor", x, copy), b.call("aten::mul_.Scalar", copy, 5.0)


def test_inputs_that_are_written_to_are_seen_after_the_run() -> None:
    run = run_spmd(written)
    x = X.values(PAIR, 1, 0)
    assert run.ranks[1].input_names == ["x"]
    assert torch.equal(run.ranks[1].inputs[0], 2 * x)


def test_inputs_that_are_not_written_to_are_not_compared() -> None:
    assert run_spmd(reduce_in("tp")).ranks[0].mutates is False


def test_observed_values_are_those_before_later_writes() -> None:
    run = run_spmd(written, observe=True)
    values = run.ranks[0].values
    x = X.values(PAIR, 0, 0)
    assert values is not None
    assert torch.equal(values["x"], x)
    assert torch.equal(values["clone"], x)
    assert torch.equal(values["add_"], 2 * x)
    assert torch.equal(values["mul_"], 5 * x)


def test_values_are_kept_only_when_asked_for() -> None:
    assert run_spmd(written).ranks[0].values is None


def test_a_run_leaves_the_inputs_of_the_next_alone() -> None:
    program = spmd_program(PAIR, [X], written)
    first, second = Lockstep().run(program), Lockstep().run(program)
    assert torch.equal(first.ranks[0].inputs[0], second.ranks[0].inputs[0])


def test_compare_shows_what_a_rewrite_changed() -> None:
    def build(factor: float) -> Program:
        return spmd_program(PAIR, [X], lambda b: b.call("aten::mul.Scalar", b.input("x"), factor))

    same, other = Lockstep().compare(build(2.0), build(2.0)), Lockstep().compare(build(2.0), build(2.5))
    assert [delta.difference for delta in same.deltas] == [0.0, 0.0]
    assert [delta.rank for delta in other.deltas] == [0, 1]
    x = X.values(PAIR, 1, 0)
    assert other.deltas[1].difference == float((2.5 * x - 2.0 * x).abs().max())


def test_programs_that_hang_are_not_compared() -> None:
    whole = per_rank(CROSSED, [reduce_in("a", "b")] * 2, [PLAIN])
    stuck = per_rank(CROSSED, [reduce_in("a", "b"), reduce_in("b", "a")], [PLAIN])
    comparison = Lockstep().compare(whole, stuck)
    assert comparison.deltas == []
    assert comparison.rewritten.hang is not None


# ------------------------------------------------------------------------------------------------------ size


def test_a_thousand_ranks_run() -> None:
    mesh = Mesh.grid({"dp": 500, "tp": 2})
    small = InputSpec("x", (2, 2), torch.float64, (("tp", PARTIAL), ("dp", VARYING)))
    program = spmd_program(mesh, [small], reduce_in("tp", "dp"))
    run = Lockstep().run(program)
    assert run.finished
    assert len(program.graphs) == 1
    expected = small.values(mesh, 998, 0) + small.values(mesh, 999, 0)
    assert torch.equal(run.ranks[999].outputs[0], expected)


def test_a_chain_of_thousands_of_nodes_runs() -> None:
    length = by_night(10_000, 2_000)

    def build(b: GraphBuilder) -> fx.Node:
        value = b.input("x")
        for _ in range(length):
            value = b.call("aten::neg", value)
        return value

    program = spmd_program(PAIR, [X], build)
    assert program.size == length
    again = program.with_graphs([program.graph(rank) for rank in range(2)])
    assert torch.equal(outputs(Lockstep().run(again))[1], X.values(PAIR, 1, 0))


def test_an_integer_that_is_no_dtype_is_an_error_of_its_node() -> None:
    """torch would crash on it, and so would the verifier."""

    def build(b: GraphBuilder) -> fx.Node:
        return b.call("aten::neg", b.input("x"))

    def casts_to_nothing(gm: fx.GraphModule) -> fx.GraphModule:
        (neg,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
        neg.target, neg.args = torch.ops.aten.to.dtype, (neg.args[0], -1)
        return gm

    program = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (2, 4))], build)
    verdict = verify(casts_to_nothing, program)
    assert verdict.status == "refuted"
    assert "'neg' raises ValueError: dtype is -1, which is no dtype" in verdict.findings[0].title
