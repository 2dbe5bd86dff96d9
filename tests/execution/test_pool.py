"""The process-group pool on real gloo groups: it computes what lockstep computes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tcverify.errors import ExecutorError, ProgramError, UnsupportedOp, UsageError
from tcverify.execution import Lockstep, ProcessGroupPool, compare_ranks, digest
from tcverify.execution.named_executors import make_executor
from tcverify.execution.process_group.pool import WINDOW_BYTES
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
    spmd_program,
)

#: Other kernels round otherwise.
ON_CUDA = os.environ.get("TCVERIFY_TESTS_DEVICE") == "cuda"
ROUNDING = 1e-13 if ON_CUDA else 0.0

Pools = Callable[[int], ProcessGroupPool]
Build = Callable[[GraphBuilder], Any]

X = InputSpec("x", (12, 5), placements=(("tp", VARYING),))


def group_of(*groups: Sequence[int]) -> Mesh:
    return Mesh(sum(map(len, groups)), (MeshDim("tp", tuple(map(tuple, groups))),))


def collective(kind: str, *arguments: Any) -> Build:
    return lambda b: b.call(f"tensor_cast::{kind}", b.input("x"), *arguments, b.rank, b.group("tp"))


def program_of(mesh: Mesh, build: Build, spec: InputSpec = X) -> Program:
    return spmd_program(mesh, [spec], build)


def norm(rewritten: bool, *, factor: float = 1.0, rows: int = 12, layers: int = 1) -> Program:
    """all_reduce → rms_norm, or the same with the norm on shards."""

    def build(b: GraphBuilder) -> Any:
        x, weight = b.input("x"), b.input("w")
        for _ in range(layers):
            if rewritten:
                y = b.call("tensor_cast::reduce_scatter", x, 0, b.rank, b.group("tp"))
                y = b.call("tensor_cast::rms_norm", y, weight, 1e-6)
                x = b.call("tensor_cast::all_gather", y, 0, b.rank, b.group("tp"))
            else:
                x = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
                x = b.call("tensor_cast::rms_norm", x, weight, 1e-6)
        return b.call("aten::mul.Tensor", x, factor)

    x = InputSpec("x", (rows, 4), placements=(("tp", PARTIAL),))
    return spmd_program(group_of([0, 1]), [x, InputSpec("w", (4,), recipe=Recipe("norm_weight"))], build)


def check_agreement(pools: Pools, program: Program) -> None:
    """Both executors give the same outputs, up to the order of sums."""
    expected, actual = Lockstep().run(program), pools(program.world_size).run(program)
    assert expected.finished
    assert actual.finished
    for before, after in zip(expected.ranks, actual.ranks, strict=True):
        assert len(after.outputs) == len(before.outputs) > 0
        assert after.structure == before.structure
        assert after.calls == before.calls
        for delta in compare_ranks(before, after):
            assert delta.problem is None, delta
            assert delta.difference <= 1e-14 * delta.scale, delta


MESHES: dict[str, Mesh] = {
    "pair": group_of([0, 1]),
    "swapped pair": group_of([1, 0]),
    "rotated three": group_of([2, 0, 1]),
    "one and two": group_of([0], [2, 1]),
    "reversed four": group_of([3, 2, 1, 0]),
    "two pairs": group_of([0, 2], [3, 1]),
    "three and one": group_of([3, 0, 2], [1]),
}
KINDS: dict[str, Build] = {
    "all_reduce": collective("all_reduce"),
    "reduce_scatter 0": collective("reduce_scatter", 0),
    "all_gather 0": collective("all_gather", 0),
    "all_gather 1": collective("all_gather", -1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_over_any_group_agree_with_lockstep(pool: Pools, mesh: str, kind: str) -> None:
    check_agreement(pool, program_of(MESHES[mesh], KINDS[kind]))


@pytest.mark.parametrize("mesh", MESHES)
def test_reduce_scatter_on_an_inner_dim_agrees_with_lockstep(pool: Pools, mesh: str) -> None:
    spec = InputSpec("x", (2, 12, 3), placements=(("tp", VARYING),))
    check_agreement(pool, program_of(MESHES[mesh], collective("reduce_scatter", 1), spec))


@pytest.mark.parametrize("mesh", MESHES)
def test_all_to_all_with_uneven_splits_agrees_with_lockstep(pool: Pools, mesh: str) -> None:
    """The member at position i sends 2i + j rows to position j: none from the first to itself."""
    groups = MESHES[mesh].dims[0]

    def sent(rank: int) -> list[int]:
        return [2 * groups.position(rank) + j for j in range(len(groups.group(rank)))]

    def received(rank: int) -> list[int]:
        return [2 * i + groups.position(rank) for i in range(len(groups.group(rank)))]

    def build(b: GraphBuilder) -> Any:
        output, inputs = b.constant("output", received), b.constant("input", sent)
        rows = b.call("aten::slice.Tensor", b.input("x"), 0, 0, b.constant("rows", lambda rank: sum(sent(rank))))
        return b.call("tensor_cast::all_to_all", rows, output, inputs, b.rank, b.group("tp"))

    spec = InputSpec("x", (30, 2), placements=(("tp", VARYING),))
    check_agreement(pool, mpmd(MESHES[mesh], [spec], build))


def mpmd(mesh: Mesh, inputs: Sequence[InputSpec], build: Build) -> Program:
    """A program in which every rank has a graph of its own, with shapes of its own."""
    graphs = []
    bindings = []
    for rank in range(mesh.world_size):
        builder = GraphBuilder(mesh, {spec.name: spec for spec in inputs}, rank)
        graphs.append(builder.finish(build(builder)))
        bindings.append(builder.bindings(rank))
    ranks = tuple(RankBinding(i, constants) for i, constants in enumerate(bindings))
    return Program(mesh, tuple(graphs), ranks, tuple(inputs))


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (2, 0), (1, 2), (1, 1)])
def test_send_recv_agrees_with_lockstep(pool: Pools, source: int, target: int) -> None:
    def build(b: GraphBuilder) -> Any:
        return b.call("tensor_cast::pipeline_send_recv", b.input("x"), source, target, 0, 1)

    check_agreement(pool, program_of(group_of([0, 1, 2]), build))


def test_groups_whose_members_have_made_different_groups_before_meet() -> None:
    """Ranks 1 and 2 make a group that rank 0 takes no part in, before rank 1 makes one with rank 0."""
    with ProcessGroupPool(3, timeout=20) as fresh:
        for groups in ([[0], [1, 2]], [[0, 1], [2]], [[2, 0], [1]]):
            program = program_of(group_of(*groups), collective("all_reduce"))
            for before, after in zip(Lockstep().run(program).ranks, fresh.run(program).ranks, strict=True):
                assert torch.equal(before.outputs[0], after.outputs[0])


def test_groups_of_two_mesh_dims_take_turns(pool: Pools) -> None:
    mesh = Mesh.grid({"dp": 2, "tp": 2})

    def build(b: GraphBuilder) -> Any:
        x = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        y = b.call("tensor_cast::all_gather", x, 1, b.rank, b.group("dp"))
        return x, b.call("tensor_cast::reduce_scatter", y, 0, b.rank, b.group("tp"))

    check_agreement(pool, program_of(mesh, build))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.bfloat16]
)
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_of_every_dtype_agree_with_lockstep(pool: Pools, kind: str, dtype: torch.dtype) -> None:
    recipe = Recipe("mask") if dtype is torch.bool else Recipe("integers", 100)
    spec = InputSpec("x", (6, 2), dtype, (("tp", VARYING),), recipe)
    check_agreement(pool, program_of(group_of([0, 1, 2]), KINDS[kind], spec))


@pytest.mark.parametrize("shape", [(0, 3), (), (1,)])
def test_collectives_of_odd_shapes_agree_with_lockstep(pool: Pools, shape: tuple[int, ...]) -> None:
    spec = InputSpec("x", shape, placements=(("tp", VARYING),))
    check_agreement(pool, program_of(group_of([0, 1]), collective("all_reduce"), spec))


def test_a_transposed_contribution_arrives_in_its_own_order(pool: Pools) -> None:
    def build(b: GraphBuilder) -> Any:
        turned = b.call("aten::transpose.int", b.input("x"), 0, 1)
        return b.call("tensor_cast::all_gather", turned, 0, b.rank, b.group("tp"))

    check_agreement(pool, program_of(group_of([1, 0]), build))


def test_a_pool_of_one_rank_runs(pool: Pools) -> None:
    check_agreement(pool, program_of(group_of([0]), collective("all_reduce")))


# ---------------------------------------------------------------------------------------------------- what comes back


def test_outputs_keep_stride_nesting_and_shared_storage(pool: Pools) -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        return {"turned": b.call("aten::transpose.int", x, 0, 1), "rest": [x, 7, None]}

    result = pool(2).run(program_of(group_of([0, 1]), build)).ranks[1]
    turned, x, seven, none = result.outputs
    assert turned.stride() == (1, 5)
    assert turned.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (seven, none) == (7, None)
    assert "turned" in result.structure


def test_observed_values_are_those_of_lockstep(pool: Pools) -> None:
    program = norm(rewritten=True)
    expected, actual = Lockstep().run(program, observe=True), pool(2).run(program, observe=True)
    for before, after in zip(expected.ranks, actual.ranks, strict=True):
        assert before.values is not None
        assert after.values is not None
        assert list(after.values) == list(before.values)
        for name, value in before.values.items():
            assert torch.allclose(after.values[name], value, rtol=ROUNDING, atol=0), name


def test_values_that_are_not_finite_come_back_exactly(pool: Pools) -> None:
    def build(b: GraphBuilder) -> Any:
        zero = b.call("aten::mul.Tensor", b.input("x"), 0.0)
        return b.call("aten::reciprocal", zero), b.call("aten::div.Tensor", zero, zero)

    spec = InputSpec("x", (2,), placements=(("tp", VARYING),))
    outputs = pool(2).run(program_of(group_of([0, 1]), build, spec)).ranks[0].outputs
    assert outputs[0].isinf().all()
    assert outputs[1].isnan().all()


def test_an_unobserved_run_has_no_values(pool: Pools) -> None:
    assert pool(2).run(norm(rewritten=False)).ranks[0].values is None


def test_mutated_inputs_come_back(pool: Pools) -> None:
    def build(b: GraphBuilder) -> Any:
        return b.call("aten::add_.Tensor", b.input("x"), 1.0)

    program = program_of(group_of([0, 1]), build)
    expected, actual = Lockstep().run(program).ranks[1], pool(2).run(program).ranks[1]
    assert actual.input_names == ["x"]
    assert torch.equal(actual.inputs[0], expected.inputs[0])


# --------------------------------------------------------------------------------------------------------- comparisons


def test_a_sound_rewrite_differs_by_rounding_at_most(pool: Pools) -> None:
    comparison = pool(2).compare(norm(rewritten=False), norm(rewritten=True))
    assert comparison.executor == ("gloo (CUDA)" if ON_CUDA else "gloo")
    assert [delta.rank for delta in comparison.deltas] == [0, 1]
    assert all(d.problem is None and d.difference <= 1e-14 * d.scale for d in comparison.deltas)


def test_a_wrong_rewrite_differs_as_in_lockstep(pool: Pools) -> None:
    before, after = norm(rewritten=False), norm(rewritten=True, factor=2.0)
    expected, actual = Lockstep().compare(before, after), pool(2).compare(before, after)
    assert actual.deltas == expected.deltas
    assert actual.deltas[0].difference > 0.1


def test_a_comparison_brings_digests_and_calls_but_no_outputs(pool: Pools) -> None:
    program = norm(rewritten=False)
    result = pool(2).compare(program, norm(rewritten=True)).original.ranks[1]
    expected = Lockstep().run(program).ranks[1]
    assert result.outputs == []
    assert len(result.digest) == len(expected.outputs) == 1
    assert result.digest[0] == pytest.approx(digest(expected.outputs)[0], rel=ROUNDING, abs=0)
    assert result.calls == expected.calls


def test_infinite_differences_survive_the_journey(pool: Pools) -> None:
    before, after = norm(rewritten=False), norm(rewritten=False, factor=float("inf"))
    deltas = pool(2).compare(before, after).deltas
    assert all(delta.overflow and delta.problem is None for delta in deltas)


def test_programs_in_flight_come_back_with_their_own_results(pool: Pools) -> None:
    before = norm(rewritten=False)
    factors = [float(f) for f in range(1, 13)]
    tickets = [pool(2).submit(before, norm(rewritten=True, factor=f)) for f in factors]
    found = {i: pool(2).result(tickets[i]).deltas[0] for i in reversed(range(len(tickets)))}
    for i, factor in enumerate(factors):
        expected = (factor - 1) * found[i].scale
        assert found[i].difference == pytest.approx(expected, abs=1e-13)


def test_requests_beyond_the_window_wait_their_turn(pool: Pools) -> None:
    large = norm(rewritten=False, layers=600)
    tickets = [pool(2).submit(large, large) for _ in range(3)]
    assert len(tickets[0].request) > WINDOW_BYTES
    assert all(pool(2).result(ticket).original.finished for ticket in tickets)


# ------------------------------------------------------------------------------------------------------ programs that raise


def raising(ranks: Sequence[int], world_size: int = 2) -> Program:
    """On some ranks, a node before the collective raises: an index that is out of range."""

    def build(b: GraphBuilder) -> Any:
        row = b.call("aten::select.int", b.input("x"), 0, b.constant("index", lambda rank: 0))
        return b.call("tensor_cast::all_reduce", row, b.rank, b.group("tp"))

    program = program_of(group_of(range(world_size)), build)
    bindings = [
        RankBinding(binding.graph, {**binding.constants, "index": 99 if rank in ranks else 0})
        for rank, binding in enumerate(program.ranks)
    ]
    return replace(program, ranks=tuple(bindings))


def test_a_node_that_raises_everywhere_is_recorded_on_every_rank(pool: Pools) -> None:
    run = pool(2).run(raising([0, 1]))
    assert [r.error.node if r.error else None for r in run.ranks] == ["select", "select"]


def test_the_pool_goes_on_after_a_node_that_raised_everywhere(pool: Pools) -> None:
    first = pool(2).submit(raising([0, 1]), raising([0, 1]))
    ranks = pool(2).pids
    second = pool(2).submit(norm(rewritten=False), norm(rewritten=True))
    assert pool(2).result(second).deltas[0].problem is None
    assert pool(2).result(first).original.error is not None
    assert pool(2).pids == ranks


def test_the_rewritten_version_is_blamed_for_what_it_alone_raises(pool: Pools) -> None:
    comparison = pool(2).compare(raising([]), raising([0, 1]))
    assert comparison.original.finished
    assert comparison.rewritten.error is not None
    assert comparison.deltas == []


def test_the_error_is_that_of_lockstep(pool: Pools) -> None:
    program = raising([0, 1])
    assert pool(2).run(program).ranks[0].error == Lockstep().run(program).ranks[0].error


def test_an_op_without_meaning_is_refused(pool: Pools) -> None:
    program = program_of(group_of([0, 1]), lambda b: b.call("aten::neg", b.input("x")))
    node = next(n for n in program.graphs[0].nodes if n.op == "call_function")
    node.target = torch.ops.aten.rand_like.default
    with pytest.raises(UnsupportedOp, match="random"):
        pool(2).run(program)


def test_a_program_that_files_cannot_hold_is_an_executor_error(pool: Pools) -> None:
    program = program_of(group_of([0, 1]), lambda b: b.call("aten::neg", b.input("x")))
    node = next(n for n in program.graphs[0].nodes if n.op == "call_function")
    node.args = (node.args[0], 1j)
    with pytest.raises(ExecutorError, match="1j"):
        pool(2).run(program)


def test_an_op_that_refuses_its_arguments_in_the_ranks_is_unsupported(pool: Pools) -> None:
    program = program_of(
        group_of([0, 1]), lambda b: b.call("aten::dropout", b.input("x"), 0.5, False), InputSpec("x", (3, 8))
    )
    node = next(n for n in program.graphs[0].nodes if n.name == "dropout")
    node.args = (node.args[0], 0.5, True)
    with pytest.raises(UnsupportedOp, match="its result is random"):
        pool(2).run(program)
    assert pool(2).run(norm(rewritten=False)).finished


def test_inputs_that_are_too_large_are_refused(pool: Pools) -> None:
    spec = InputSpec("x", (1 << 20, 1 << 20))
    program = program_of(group_of([0, 1]), lambda b: b.call("aten::sum", b.input("x")), spec)
    with pytest.raises(ProgramError, match="at most"):
        pool(2).run(program)


def test_a_program_of_another_world_size_is_refused(pool: Pools) -> None:
    with pytest.raises(UsageError, match="3 ranks cannot run on a pool of 2"):
        pool(2).run(program_of(group_of([0, 1, 2]), collective("all_reduce")))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"world_size": 0}, "0 ranks"),
    ({"world_size": 2, "device": "tpu"}, "tpu"),
    ({"world_size": 2, "timeout": 0.0}, "time-out"),
    ({"world_size": 2, "core": 100_000}, "core 100000"),
])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProcessGroupPool(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_says_so() -> None:
    with ProcessGroupPool(2, device="cuda") as cuda, pytest.raises(ExecutorError, match="no CUDA device"):
        cuda.run(norm(rewritten=False))


def test_nccl_refuses_ranks_without_a_device_of_their_own() -> None:
    with pytest.raises(
        UsageError, match=r"NCCL wants a CUDA device for each of 64 ranks, and this machine has \d"
    ) as refused:
        make_executor("nccl", 64)
    assert refused.value.hint == "use --confirm cuda, by which ranks may share a device"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_agrees_with_lockstep() -> None:
    program = norm(rewritten=True)
    with ProcessGroupPool(2, device="cuda") as cuda:
        run = cuda.run(program)
    assert run.executor == "nccl"
    for before, after in zip(Lockstep().run(program).ranks, run.ranks, strict=True):
        assert torch.allclose(before.outputs[0], after.outputs[0], rtol=1e-12)
