"""Asynchronous collectives: what they compute, when they read and write, who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.checks.ordering.accesses import accesses_of
from tcverify.checks.ordering.asynchrony import asynchrony_of
from tcverify.domains import NATIVE, Exact
from tcverify.execution import Lockstep, ProcessGroupPool, Run, overlapped_starts, run_at_extremes
from tcverify.ops import REDUCTIONS, ShapeError
from tcverify.program import PARTIAL, Contract, InputSpec, Mesh, MeshDim, Program
from tcverify.program.builder import GraphBuilder, spmd_program

LOCKSTEP = Lockstep()
TWO = Mesh.grid({"tp": 2})
THREE = Mesh(3, (MeshDim("tp", ((2, 0, 1),)), MeshDim("dp", ((0, 1, 2),)), MeshDim("ep", ((0,), (1, 2)))))
X = InputSpec("x", (6, 4), placements=(("tp", PARTIAL),))
N = InputSpec("n", (6, 4), dtype=torch.int64, placements=(("tp", PARTIAL),))


def wait(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return b.call("_c10d_functional::wait_tensor", value)


def start(b: GraphBuilder, op: str, *args: Any, **kwargs: Any) -> fx.Node:
    return b.call(f"_c10d_functional::{op}", *args, **kwargs)


def program(build: Callable[[GraphBuilder], Any], mesh: Mesh = TWO, inputs: Sequence[InputSpec] = (X,)) -> Program:
    return spmd_program(mesh, list(inputs), build)


def outputs(run: Run) -> list[list[torch.Tensor]]:
    assert run.finished, run.why
    return [result.outputs for result in run.ranks]


def given(p: Program) -> list[torch.Tensor]:
    """The first input on every rank."""
    return [p.values(rank)[0].double() for rank in range(p.world_size)]


# --------------------------------------------------------------------------------------------------- what they compute


@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
def test_all_reduce_reduces_by_its_op(op: str) -> None:
    p = program(lambda b: wait(b, start(b, "all_reduce", b.input("x"), op, "tp")), THREE)
    stacked = torch.stack(given(p))
    expected = {
        "sum": stacked.sum(0), "avg": stacked.mean(0), "product": stacked.prod(0), "min": stacked.amin(0),
        "max": stacked.amax(0),
    }[op]  # fmt: skip
    for (found,) in outputs(LOCKSTEP.run(p)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_integers_reduce_bit_by_bit(op: str) -> None:
    p = program(lambda b: wait(b, start(b, "all_reduce", b.input("n"), op, "tp")), TWO, [N])
    first, second = (p.values(rank)[0] for rank in range(2))
    for (found,) in outputs(LOCKSTEP.run(p)):
        assert torch.equal(found, REDUCTIONS[op](first, second))


def test_shards_go_by_position_in_the_group() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        gathered = wait(b, start(b, "all_gather_into_tensor", x, 3, "tp"))
        scattered = wait(b, start(b, "reduce_scatter_tensor", x, "sum", 3, "tp"))
        sent = wait(b, start(b, "broadcast", x, 0, "tp"))
        return gathered, scattered, sent

    p = program(build, THREE)
    x = given(p)
    for rank, (gathered, scattered, sent) in enumerate(outputs(LOCKSTEP.run(p))):
        assert torch.equal(gathered, torch.cat([x[2], x[0], x[1]]))
        place = (2, 0, 1).index(rank)
        torch.testing.assert_close(scattered, sum(x)[2 * place : 2 * place + 2])
        assert torch.equal(sent, x[2])


def test_forms_that_write_into_operands() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        own = b.call("aten::clone", x)
        whole = b.call("aten::cat", [x, x])
        part = b.call("aten::slice.Tensor", x, 0, 0, 3)
        piece = b.call("aten::clone", part)
        start(b, "all_reduce_", own, "sum", "tp")
        out = start(b, "all_gather_into_tensor_out", x, 2, "tp", out=whole)
        scattered = start(b, "reduce_scatter_tensor_out", x, "sum", 2, "tp", out=piece)
        return wait(b, own), own, wait(b, out), wait(b, scattered), whole

    p = program(build)
    x = given(p)
    for timing in ("issue", "wait", "apart"):
        for rank, (total, own, gathered, scattered, whole) in enumerate(outputs(LOCKSTEP.run(p, timing=timing))):
            torch.testing.assert_close(total, x[0] + x[1])
            assert total.data_ptr() == own.data_ptr()
            assert torch.equal(gathered, torch.cat(x))
            assert torch.equal(whole, gathered)
            torch.testing.assert_close(scattered, (x[0] + x[1])[3 * rank : 3 * rank + 3])


def test_coalesced_forms_start_and_end_tensor_by_tensor() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        y = b.call("aten::mul.Tensor", x, 3.0)
        sums = start(b, "all_reduce_coalesced", [x, y], "sum", "tp")
        rows = start(b, "all_gather_into_tensor_coalesced", [x, y], 2, "tp")
        parts = start(b, "reduce_scatter_tensor_coalesced", [x, y], "sum", 2, "tp")
        return [wait(b, b.getitem(found, i)) for found in (sums, rows, parts) for i in (0, 1)]

    p = program(build)
    x = given(p)
    for timing in ("issue", "wait", "apart"):
        found = outputs(LOCKSTEP.run(p, timing=timing))[1]
        torch.testing.assert_close(found[0], x[0] + x[1])
        torch.testing.assert_close(found[1], 3 * (x[0] + x[1]))
        assert torch.equal(found[2], torch.cat(x))
        torch.testing.assert_close(found[5], 3 * (x[0] + x[1])[3:])


def everything(b: GraphBuilder) -> Any:
    """Most ops of the dialect, under way side by side, on three ranks and three groups of which two have the same members."""
    x, n = b.input("x"), b.input("n")
    size = b.constant("ep_size", lambda rank: 1 if rank == 0 else 2)
    first = start(b, "all_reduce", x, "sum", "tp")
    second = start(b, "all_reduce", b.call("aten::mul.Tensor", x, 2.0), "sum", "dp")
    third = start(b, "all_gather_into_tensor", x, size, "ep")
    more = [start(b, "all_reduce", x, op, "tp") for op in ("avg", "product", "min")]
    more += [start(b, "reduce_scatter_tensor", x, op, 3, "tp") for op in ("sum", "max")]
    more += [start(b, "all_reduce", n, op, "dp") for op in ("sum", "bxor", "max")]
    more += [start(b, "all_to_all_single", x, [2, 2, 2], [2, 2, 2], "tp"), start(b, "broadcast", x, 1, "dp")]
    b.call("p2p::barrier", "tp")
    return [wait(b, value) for value in (third, second, first, *reversed(more))]


def test_process_groups_compute_what_lockstep_computes() -> None:
    p = program(everything, THREE, [X, N])
    with ProcessGroupPool(3) as pool:
        for domain in (None, NATIVE, Exact(0)):
            options = {} if domain is None else {"domain": domain}
            here, there = LOCKSTEP.run(p, **options), pool.run(p, **options)
            for mine, theirs in zip(outputs(here), outputs(there), strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert torch.equal(a, b) if domain is not None and domain.kind == "exact" else torch.allclose(a, b)


@pytest.mark.parametrize("op", ["all_reduce_", "broadcast_", "all_reduce_coalesced_"])
def test_communication_writes_into_contiguous_tensors_only(op: str) -> None:
    def build(b: GraphBuilder, part: fx.Node) -> Any:
        arguments: dict[str, Any] = {"broadcast_": (part, 0, "tp"), "all_reduce_coalesced_": ([part], "sum", "tp")}
        start(b, op, *arguments.get(op, (part, "sum", "tp")))
        return wait(b, part)

    def rows(b: GraphBuilder) -> Any:
        return build(b, b.call("aten::slice.Tensor", b.call("aten::clone", b.input("x")), 0, 1, 3))

    def columns(b: GraphBuilder) -> Any:
        return build(b, b.call("aten::slice.Tensor", b.call("aten::clone", b.input("x")), 1, 1, 3))

    assert LOCKSTEP.run(program(rows)).finished
    with pytest.raises(ShapeError, match=r"writes into a tensor of shape \[6, 2\] and stride \[4, 1\]"):
        program(columns)


def test_outputs_of_other_strides_are_refused() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        turned = b.call("aten::t", b.call("aten::new_empty", x, [4, 12]))
        return wait(b, start(b, "all_gather_into_tensor_out", x, 2, "tp", out=turned))

    with pytest.raises(ShapeError, match="not contiguous"):
        program(build)


@pytest.mark.parametrize("op", ["SUM", "premul_sum"])
def test_ways_to_reduce_that_c10d_does_not_know_raise(op: str) -> None:
    p = program(lambda b: wait(b, start(b, "all_reduce", b.input("x"), op, "tp")))
    error = LOCKSTEP.run(p).error
    assert error is not None
    assert f"all_reduce reduces by '{op}'; c10d knows sum, avg" in str(error.error)


def test_one_shot_sums_alone() -> None:
    def build(b: GraphBuilder, op: str) -> Any:
        return b.call("symm_mem::one_shot_all_reduce", b.input("x"), op, "tp")

    p = program(lambda b: build(b, "sum"))
    torch.testing.assert_close(outputs(LOCKSTEP.run(p))[1][0], sum(given(p)))
    error = LOCKSTEP.run(program(lambda b: build(b, "max"))).error
    assert error is not None
    assert "one_shot_all_reduce sums contiguous tensors" in str(error.error)


# ------------------------------------------------------------------------------------------- when they read and write


def test_sound_programs_compute_the_same_at_every_extreme() -> None:
    p = program(everything, THREE, [X, N])
    base = outputs(LOCKSTEP.run(p))
    for timing in ("wait", "apart", lambda rank, node: ("issue", "wait", "apart")[(rank + len(node)) % 3]):
        for mine, theirs in zip(base, outputs(LOCKSTEP.run(p, timing=timing)), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


LATE = {
    "all_gather_into_tensor": (2, "tp"),
    "all_gather_into_tensor_coalesced": (2, "tp"),
    "all_to_all_single": ([3, 3], [3, 3], "tp"),
    "reduce_scatter_tensor": ("max", 2, "tp"),
}
AT_ONCE = {"all_reduce": ("max", "tp"), "all_reduce_coalesced": ("max", "tp"), "broadcast": (0, "tp")}


@pytest.mark.parametrize("op", [*LATE, *AT_ONCE])
def test_a_late_collective_reads_what_was_written_behind_its_start(op: str) -> None:
    """But for those that copy their operand first."""
    several = op.endswith("_coalesced")

    def build(b: GraphBuilder) -> Any:
        y = b.call("aten::mul.Tensor", b.input("x"), 1.0)
        under_way = start(b, op, [y] if several else y, *(LATE | AT_ONCE)[op])
        b.call("aten::add_.Tensor", y, 1.0)
        return wait(b, b.getitem(under_way, 0) if several else under_way)

    p = program(build)
    early, apart, late = (outputs(LOCKSTEP.run(p, timing=timing))[0][0] for timing in ("issue", "apart", "wait"))
    torch.testing.assert_close(apart, early)
    torch.testing.assert_close(late, early + (op in LATE))
    assert bool(asynchrony_of(accesses_of(p, 0)).hazards) == (op in LATE)


def test_of_late_collectives_the_first_to_start_ends_first() -> None:
    """The first rank writes between its waits, while the second already waits for the last collective."""

    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        y = b.call("aten::mul.Tensor", x, 1.0)
        first, second = (start(b, "reduce_scatter_tensor", value, "sum", 2, "tp") for value in (x, y))
        if b.representative == 1:
            return wait(b, second), wait(b, first)
        waited = wait(b, first)
        b.call("aten::add_.Tensor", y, 1.0)
        return wait(b, second), waited

    p = two_graphs(build, TWO)
    total = sum(given(p))
    for rank, (second, first) in enumerate(outputs(LOCKSTEP.run(p, timing="wait"))):
        own = total[3 * rank : 3 * rank + 3]
        torch.testing.assert_close(first, own)
        torch.testing.assert_close(second, own + 1)


def test_a_result_that_is_read_too_early_is_poison() -> None:
    def build(b: GraphBuilder) -> Any:
        under_way = start(b, "all_reduce", b.input("x"), "sum", "tp")
        early = b.call("aten::mul.Tensor", under_way, 1.0)
        return early, wait(b, under_way)

    p = program(build)
    assert not outputs(LOCKSTEP.run(p, timing="issue"))[0][0].isnan().any()
    for timing in ("wait", "apart"):
        early, waited = outputs(LOCKSTEP.run(p, timing=timing))[0]
        assert early.isnan().all()
        torch.testing.assert_close(waited, sum(given(p)))


def test_values_are_kept_as_collectives_deliver_them() -> None:
    p = program(lambda b: wait(b, start(b, "all_reduce", b.input("x"), "sum", "tp")))
    for timing in ("issue", "wait"):
        run = LOCKSTEP.run(p, observe=True, timing=timing)
        for result in run.ranks:
            assert result.values is not None
            assert torch.equal(result.values["all_reduce"], result.outputs[0])


def test_waits_in_the_order_of_the_starts_or_turned_round_deliver_the_same() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        values = [b.call("aten::mul.Tensor", x, float(i)) for i in range(40)]
        started = [start(b, "all_reduce", value, "sum", "tp") for value in values]
        ends = {i: wait(b, started[i]) for i in (*range(0, 40, 2), *reversed(range(1, 40, 2)))}
        return [ends[i] for i in range(40)]

    p = program(build)
    total = sum(given(p))
    for timing in ("issue", "wait", "apart"):
        for found in outputs(LOCKSTEP.run(p, timing=timing)):
            torch.testing.assert_close(torch.stack(found), torch.stack([total * i for i in range(40)]))


# ------------------------------------------------------------------------------------------------- who waits for whom


def crossed(b: GraphBuilder) -> Any:
    """Rank 0 starts on tp, then on dp; rank 1 the other way round; each waits for both in the order of its starts."""
    x = b.input("x")
    mine, other = ("tp", "dp") if b.representative == 0 else ("dp", "tp")
    first = start(b, "all_reduce", x, "sum", mine)
    second = start(b, "all_reduce", x, "sum", other)
    one, two = wait(b, first), wait(b, second)
    return (one, two) if b.representative == 0 else (two, one)


def two_graphs(build: Callable[[GraphBuilder], Any], mesh: Mesh, inputs: Sequence[InputSpec] = (X,)) -> Program:
    """A program whose ranks have graphs of their own."""
    builders = [GraphBuilder(mesh, {spec.name: spec for spec in inputs}, rank) for rank in range(mesh.world_size)]
    graphs = [builder.finish(build(builder)) for builder in builders]
    whole = program(lambda b: b.input(inputs[0].name), mesh, inputs)
    return whole.with_graphs(graphs)


BOTH = Mesh(2, (MeshDim("tp", ((0, 1),)), MeshDim("dp", ((0, 1),))))


def test_starts_do_not_block() -> None:
    p = two_graphs(crossed, BOTH)
    total = sum(given(p))
    for timing in ("issue", "wait", "apart"):
        for found in outputs(LOCKSTEP.run(p, timing=timing)):
            torch.testing.assert_close(found[0], total)
        hang = Lockstep(conservative=True).run(p, timing=timing).hang
        assert hang is not None
        assert hang.cycle
        assert (
            str(hang)
            == "rank 0 waits in all_reduce #1 of group 'tp' [0, 1]; rank 1 waits in all_reduce #1 of group 'dp' [0, 1]"
        )


def test_waits_in_the_wrong_order_hang() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        first, second = ("tp", "dp") if b.representative == 0 else ("dp", "tp")
        one = wait(b, start(b, "all_reduce", x, "sum", first))
        return one, wait(b, start(b, "all_reduce", x, "sum", second))

    hang = LOCKSTEP.run(two_graphs(build, BOTH)).hang
    assert hang is not None
    assert hang.cycle


def test_a_start_that_a_peer_never_issues_hangs_though_nobody_waits() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        if b.representative == 1:
            start(b, "all_reduce_", b.call("aten::clone", x), "sum", "tp")
        return x

    hang = LOCKSTEP.run(two_graphs(build, TWO)).hang
    assert hang is not None
    assert str(hang) == "rank 1 waits in all_reduce #1 of group 'tp' [0, 1]; rank 0 has finished without joining"


def test_calls_of_one_communicator_meet_in_the_order_of_issue() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        y = b.call("aten::mul.Tensor", x, 2.0)
        one, two = (x, y) if b.representative == 0 else (y, x)
        first, second = start(b, "all_reduce", one, "sum", "tp"), start(b, "all_reduce", two, "sum", "tp")
        return wait(b, second), wait(b, first)

    p = two_graphs(build, TWO)
    x = given(p)
    second, first = outputs(LOCKSTEP.run(p))[0]
    torch.testing.assert_close(first, x[0] + 2 * x[1])
    torch.testing.assert_close(second, 2 * x[0] + x[1])


def test_collectives_that_do_not_match_are_told() -> None:
    def build(b: GraphBuilder) -> Any:
        op = "sum" if b.representative == 0 else "max"
        return wait(b, start(b, "all_reduce", b.input("x"), op, "tp"))

    mismatch = LOCKSTEP.run(two_graphs(build, TWO)).mismatch
    assert mismatch is not None
    assert mismatch[0] == "in all_reduce, rank 0 reduces by sum while rank 1 reduces by max"


def test_opaque_transfers_block_and_deliver() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        b.call("p2p::barrier", "tp")
        if b.representative == 0:
            b.call("p2p::send", x, 1)
            return b.call("p2p::recv", x, 1)
        buffer = b.call("aten::mul.Tensor", x, 0.0)
        b.call("p2p::recv_", buffer, 0)
        b.call("p2p::send", x, 0)
        return buffer

    p = two_graphs(build, TWO)
    x = given(p)
    assert [found[0].equal(x[1 - rank]) for rank, found in enumerate(outputs(LOCKSTEP.run(p)))] == [True, True]
    with ProcessGroupPool(2) as pool:
        assert [found[0].equal(x[1 - rank]) for rank, found in enumerate(outputs(pool.run(p)))] == [True, True]


def test_a_group_that_the_mesh_does_not_have_is_named() -> None:
    error = LOCKSTEP.run(program(lambda b: wait(b, start(b, "all_reduce", b.input("x"), "sum", "pp")))).error
    assert error is not None
    assert "all_reduce on group 'pp', which the mesh does not have" in str(error.error)


# ------------------------------------------------------------------------------------------------------------- verdicts


def written_behind_the_wait(b: GraphBuilder) -> Any:
    y = b.call("aten::mul.Tensor", b.input("x"), 2.0)
    total = wait(b, start(b, "all_to_all_single", y, [3, 3], [3, 3], "tp"))
    b.call("aten::add_.Tensor", y, 1.0)
    return b.call("aten::add.Tensor", total, y)


def sink_the_wait(gm: fx.GraphModule) -> None:
    """Wait behind the write into what the collective may still read."""
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["add_"].append(nodes["wait_tensor"])
    gm.recompile()


def read_the_start(gm: fx.GraphModule) -> None:
    """Read what has not arrived."""
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["add"].args = (nodes["all_to_all_single"], nodes["add"].args[1])
    nodes["add"].append(nodes["wait_tensor"])
    gm.recompile()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (sink_the_wait, "'all_to_all_single' reads and writes as late as it may"),
        (read_the_start, "'all_to_all_single' reads where it starts and writes as late as it may"),
    ],
)
def test_races_are_refuted_and_blamed(broken: Callable[[fx.GraphModule], None], words: str) -> None:
    verdict = verify(broken, program(written_behind_the_wait), checks=["equivalence", "interleavings"])
    assert verdict.status == "refuted"
    (finding,) = verdict.findings
    assert (finding.kind, finding.node) == ("async-race", "all_to_all_single")
    assert words in finding.title


def test_a_race_that_lockstep_finds_is_no_divergence_of_the_process_group() -> None:
    with ProcessGroupPool(2) as pool:
        verdict = verify(
            read_the_start, program(written_behind_the_wait), confirm=pool, always_confirm=True,
            checks=["equivalence", "interleavings"],
        )  # fmt: skip
    assert {finding.kind for finding in verdict.findings} == {"async-race"}
    assert verdict.executors == ["lockstep", "gloo"]


def move_the_sum(gm: fx.GraphModule) -> None:
    """A sound move: the start as early as its operand is there."""
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["mul"].append(nodes["neg"])
    gm.recompile()


def test_sound_moves_pass() -> None:
    def build(b: GraphBuilder) -> Any:
        y = b.call("aten::mul.Tensor", b.input("x"), 2.0)
        under_way = start(b, "all_reduce", y, "sum", "tp")
        other = b.call("aten::neg", y)
        return b.call("aten::add.Tensor", wait(b, under_way), other)

    verdict = verify(move_the_sum, program(build))
    assert verdict.status == "passed"
    assert verdict.changed


def test_an_original_with_a_race_is_not_held_against_the_pass() -> None:
    def build(b: GraphBuilder) -> Any:
        y = b.call("aten::mul.Tensor", b.input("x"), 2.0)
        under_way = start(b, "all_to_all_single", y, [3, 3], [3, 3], "tp")
        b.call("aten::add_.Tensor", y, 1.0)
        return b.call("aten::add.Tensor", wait(b, under_way), b.call("aten::neg", y))

    def change(gm: fx.GraphModule) -> None:
        nodes = {node.name: node for node in gm.graph.nodes}
        nodes["wait_tensor"].append(nodes["neg"])
        nodes["wait_tensor"].prepend(nodes["neg"])
        nodes["add"].args = nodes["add"].args[::-1]
        gm.recompile()

    verdict = verify(change, program(build), checks=["equivalence", "interleavings"])
    assert verdict.status == "inconclusive"
    assert [doubt.reason for doubt in verdict.doubts] == ["ill-typed-program"]


def test_the_contract_says_whether_starts_may_block() -> None:
    def swap(gm: fx.GraphModule) -> None:
        nodes = {node.name: node for node in gm.graph.nodes}
        output = next(node for node in gm.graph.nodes if node.op == "output")
        output.args = (tuple(output.args[0]),)
        nodes["wait_tensor"].append(nodes["wait_tensor_1"])
        gm.recompile()

    verdict = verify(swap, two_graphs(crossed, BOTH), contract=Contract(collectives="conservative"))
    assert verdict.status == "inconclusive"
    assert "ill-typed-program" in {doubt.reason for doubt in verdict.doubts}


# ------------------------------------------------------------------------------------------- what other timings can show


def test_only_collectives_during_which_nodes_run_are_played_at_other_timings() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        at_once = wait(b, start(b, "all_reduce", x, "sum", "tp"))
        own = b.call("aten::clone", x)
        beside = start(b, "all_reduce_", own, "sum", "tp")  # the next node waits for the same memory by another name
        waited = wait(b, own)
        first = start(b, "all_reduce", at_once, "max", "tp")
        second = start(b, "all_reduce", waited, "max", "tp")
        total = wait(b, second)
        assert [str(node) for node in (beside, first)] == ["all_reduce_", "all_reduce_1"]
        return total, wait(b, first)

    p = program(build)
    assert overlapped_starts(p) == ["all_reduce_", "all_reduce_1"]
    baseline = LOCKSTEP.run(p)
    assert len(run_at_extremes(baseline, p, LOCKSTEP)) == 4  # two for all of them, and mixtures
    at_once = program(lambda b: wait(b, start(b, "all_reduce", b.input("x"), "sum", "tp")))
    assert run_at_extremes(LOCKSTEP.run(at_once), at_once, LOCKSTEP) == []
